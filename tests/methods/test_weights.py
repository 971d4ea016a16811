from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from sentence_transformers import SentenceTransformer

import pico
from compressing import compress
from recorded_progress import RecordedProgress
from trundle.data.corpus import read_corpus
from trundle.errors import BadInput, ImpossibleCut, UserError
from trundle.evaluate import fidelity
from trundle.methods import METHODS
from trundle.methods.contract import Applied, Context
from trundle.methods.weights import pruning
from trundle.model.encode import embedder
from trundle.model.layout import layout_of
from trundle.model.matrices import prunable, weight_of
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.recipe import make_options, parse_recipe, read_recipe
from trundle.records import WeightMap

TOOL = METHODS["weights"]


def write(path: Path, rows: Iterator[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    numbered = [(number, text) for number in range(45) for text in pico.TEXTS]
    domain = ({"query": f"{text} {n}", "positive": f"{n} is {text}"} for n, text in numbered)
    general = (
        {"query": f"{n} {text}", "positive": f"about {text} {n}", "negative": f"no {n}"}
        for n, text in numbered
    )
    return {
        "domain": write(tmp_path / "domain.jsonl", domain),
        "general": write(tmp_path / "general.jsonl", general),
    }


def prune(model: SentenceTransformer, told: RecordedProgress | None = None, **options: Any) -> Applied:
    context = Context(original=model, seed=1, progress=told or RecordedProgress())
    options = {"samples": 20, "batch_size": 8} | options
    return TOOL.apply(model, TOOL.plan(model, make_options(TOOL, options), context), context)


def weights(model: SentenceTransformer, *, attention: bool = False) -> dict[str, torch.Tensor]:
    backbone = transformer_of(model).model
    return {one.name: weight_of(backbone, one) for one in prunable(layout_of(backbone), attention=attention)}


@pytest.mark.parametrize(
    "method", ["gaprune", "magnitude", "random", "general-fisher", "domain-fisher", "wanda"]
)
def test_every_method_takes_exactly_its_share(
    method: str, pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    model = pico_model("bert")
    small = prune(model, method=method, sparsity="37%", **files)
    zeros = sum(int((weight == 0).sum()) for weight in weights(small.model).values())
    total = sum(weight.numel() for weight in weights(small.model).values())
    rows = method == "wanda"
    expected = (
        sum(w.shape[0] * (w.shape[1] * 37 // 100) for w in weights(model).values())
        if rows
        else total * 37 // 100
    )
    assert zeros == expected == small.facts["zeros"]
    untouched = {k: v for k, v in model.state_dict().items() if "dense" not in k or "attention" in k}
    assert all(torch.equal(small.model.state_dict()[name], weight) for name, weight in untouched.items())


def test_what_is_zero_already_counts_and_stays(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    once = prune(pico_model("bert"), sparsity="30%", **files).model
    twice = prune(once, sparsity="60%", **files).model
    total = sum(weight.numel() for weight in weights(twice).values())
    assert sum(int((weight == 0).sum()) for weight in weights(twice).values()) == total * 60 // 100
    for name, weight in weights(once).items():
        assert (weights(twice)[name][weight == 0] == 0).all()


def test_neurons_that_stay_keep_their_weights(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    model = pico_model("bert")
    small = prune(model, sparsity="50%", structure="neuron", method="magnitude").model
    kept = []
    for layer in range(pico.LAYERS):
        up, down = (
            weights(model)[f"encoder.layer.{layer}.{part}.dense"] for part in ("intermediate", "output")
        )
        worth = up.abs().sum(dim=1) + down.abs().sum(dim=0)
        kept.append(tuple(sorted(worth.argsort(descending=True)[:24].tolist())))
    expected = cut(model, Cut(mlp=tuple(kept)))
    assert all(torch.equal(small.state_dict()[n], w) for n, w in expected.state_dict().items())


def test_neurons_are_healed_if_there_are_texts(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    model = pico_model("bert")
    asked = {"sparsity": "50%", "structure": "neuron", "method": "wanda", "domain": files["domain"]}
    alone, helped = (prune(model, **asked, heal=choice) for choice in ("none", None))
    assert ("healed_on" in alone.facts, helped.facts["healed_on"] > 0) == (False, True)
    texts = [json.loads(line)["positive"] for line in Path(files["domain"]).read_text().splitlines()[:60]]
    wanted = model.encode(texts)
    near = [float((one.model.encode(texts) * wanted).sum(axis=1).mean()) for one in (alone, helped)]
    assert near[0] < near[1]


def test_nothing_is_healed_in_a_model_that_has_zeros_to_keep(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    sparse = prune(pico_model("bert"), sparsity="50%", method="magnitude").model
    cut_too = prune(sparse, sparsity="50%", structure="neuron", method="wanda", domain=files["domain"])
    assert "healed_on" not in cut_too.facts
    assert sum(int((weight == 0).sum()) for weight in weights(cut_too.model).values())


def test_two_of_four_in_every_matrix(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    small = prune(pico_model("gpt2"), structure="2:4", attention=True, **files).model
    for name, weight in weights(small, attention=True).items():
        assert ((weight.reshape(-1, 4) == 0).sum(dim=1) >= 2).all(), name
        assert (weight == 0).sum() == weight.numel() // 2


def test_a_map_is_left_in_the_folder(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    small = prune(pico_model("bert"), sparsity="50%", **files)
    drawn = TypeAdapter(WeightMap).validate_json(str(small.files["weights.json"]))
    assert {(one.layer, one.matrix) for one in drawn.matrices} == {
        (layer, name) for layer in range(pico.LAYERS) for name in ("intermediate.dense", "output.dense")
    }
    assert sum(one.weights - one.kept for one in drawn.matrices) == small.facts["zeros"]
    assert drawn.alignment is not None
    assert sum(drawn.alignment.counts) == small.facts["weights"]


def test_the_same_file_for_both_sources_is_reported(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    told, model = RecordedProgress(), pico_model("bert")
    same = {"domain": files["domain"], "general": files["domain"]}
    small = prune(model, told, sparsity="50%", beta=1, **same)
    assert any("every alignment is 1" in line for line in told.lines)
    assert small.facts["alignment"]["shared"] == small.facts["weights"]
    by_size = prune(model, sparsity="50%", method="magnitude").model
    assert all(torch.equal(small.model.state_dict()[n], w) for n, w in by_size.state_dict().items())


def test_texts_alone_become_pairs(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str], tmp_path: Path
) -> None:
    lines = [
        f"Number {n} is here. {text.capitalize()} number {n}, they say."
        for n in range(40)
        for text in pico.TEXTS
    ]
    (tmp_path / "texts.txt").write_text("\n".join([*lines, "short one", "short two"]), encoding="utf-8")
    told = RecordedProgress()
    small = prune(
        pico_model("bert"), told, sparsity="50%", domain=str(tmp_path / "texts.txt"), general=files["general"]
    )
    assert small.facts["domain"]["pairs"] == "made from texts"
    assert any(
        "pairs are made from the texts" in line and "neighbouring passages" in line for line in told.lines
    )
    assert small.facts["general"]["pairs"] == "given"


def test_few_samples_are_all_used_and_reported(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str]
) -> None:
    told = RecordedProgress()
    small = prune(pico_model("bert"), told, sparsity="50%", samples=2000, **files)
    assert small.facts["domain"]["samples"] == small.facts["domain"]["of"] < 30 * len(pico.TEXTS)
    assert any("samples are used (2,000 requested)" in line for line in told.lines)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"sparsity": "100%"}, ImpossibleCut, "under 1"),
        ({}, ImpossibleCut, "sparsity, such as 50%"),
        ({"sparsity": "50%", "general": None}, BadInput, "--general FILE"),
        (
            {"sparsity": "50%", "domain": None},
            BadInput,
            "--domain FILE, in a recipe weights.domain, or with --data FILE",
        ),
        ({"sparsity": "30%", "structure": "2:4"}, ImpossibleCut, "leave sparsity out"),
        ({"structure": "2:4", "selection": "row"}, ImpossibleCut, "leave selection out"),
        ({"sparsity": "30%", "structure": "neuron", "attention": True}, ImpossibleCut, "leave attention out"),
        ({"sparsity": "30%", "structure": "neuron", "selection": "global"}, ImpossibleCut, "one MLP width"),
    ],
)
def test_invalid_options_are_rejected(
    options: dict[str, Any],
    kind: type[UserError],
    says: str,
    pico_model: Callable[[str], SentenceTransformer],
    files: dict[str, str],
) -> None:
    with pytest.raises(kind, match=says):
        prune(pico_model("bert"), **(files | options))


def test_one_tuple_is_too_few(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str], tmp_path: Path
) -> None:
    one = write(tmp_path / "one.jsonl", iter([{"query": "a question", "positive": "an answer"}]))
    with pytest.raises(BadInput, match="the domain source has 1 tuple"):
        prune(pico_model("bert"), sparsity="50%", domain=one, general=files["general"])


def test_slow_models_are_searched_with_fewer_queries(
    pico_model: Callable[[str], SentenceTransformer], files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pico_model("bert")
    evaluator = prune(model, sparsity="50%", method="magnitude", **files).evaluator
    assert evaluator is not None
    monkeypatch.setattr(pruning, "_FIRST_QUERIES", 5)
    ticks = itertools.count(0, 14)
    monkeypatch.setattr(fidelity, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    first, later = (evaluator(embedder(model, name=name)) for name in ("first", "later"))
    assert list(first) == list(later) == ["domain ndcg@10, 10 queries", "general ndcg@10, 10 queries"]


def test_a_family_without_mlps_is_rejected(pico_model: Callable[[str], SentenceTransformer]) -> None:
    layout = layout_of(transformer_of(pico_model("bert")).model)
    bare = replace(layout, parameters=tuple(one for one in layout.parameters if one.part != "mlp"))
    with pytest.raises(ImpossibleCut, match="has no MLP"):
        prunable(bare)


def test_the_recipe_retrains_scores_both_sides_and_keeps_zeros(
    pico_folders: Callable[[str], Path], files: dict[str, str], tmp_path: Path
) -> None:
    changes = [f"weights.general={files['general']}", "weights.samples=20"]
    changes += ["contrast.steps=3", "contrast.batch_size=8"]
    corpus = read_corpus([files["domain"]], seed=0)
    run = compress(
        str(pico_folders("bert")), read_recipe("gaprune", changes), output=tmp_path / "out", corpus=corpus
    )
    zeros = run.steps[0].facts["zeros"]
    assert sum(int((w == 0).sum()) for w in weights(_opened(tmp_path / "out")).values()) == zeros
    assert [name.split()[0] for name in run.judged] == ["domain", "general"]


@pytest.mark.parametrize("sparsity", ["50%", "10%"])
def test_lora_width_and_align_keep_zeros_too(
    sparsity: str, pico_folders: Callable[[str], Path], files: dict[str, str], tmp_path: Path
) -> None:
    """However few they are: the model says itself that they were pruned."""
    steps = [
        {"weights": {"sparsity": sparsity, "method": "magnitude"}},
        {"contrast": {"steps": 2, "batch_size": 8, "warmup": 0}},
        {"width": {"widths": "1/2", "select": "consecutive", "steps": 2, "batch_size": 8, "texts": 40}},
        {"align": {"steps": 2, "batch_size": 8, "texts": 40, "start": "keep"}},
    ]
    recipe = parse_recipe(json.dumps({"steps": steps}), name="all")
    corpus = read_corpus([files["domain"]], seed=0)
    run = compress(str(pico_folders("bert")), recipe, output=tmp_path / "out", corpus=corpus)
    found = weights(_opened(tmp_path / "out"))
    assert sum(int((w == 0).sum()) for w in found.values()) == run.steps[0].facts["zeros"]


def _opened(folder: Path) -> SentenceTransformer:
    from trundle.model.load import load

    return load(folder)

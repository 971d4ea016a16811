"""The method width: what it writes, what can be extracted later, and what it rejects."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import pico
from compressing import compress
from trundle.data.corpus import Corpus, read_corpus
from trundle.errors import BadInput, BadModel, BadRecipe, ImpossibleCut
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.methods.width import _WidthPlan
from trundle.methods.width.importance import _measure_importance
from trundle.model.load import load
from trundle.model.surgery import transformer_of
from trundle.pipeline.run import Run
from trundle.recipe import make_options, parse_recipe, single

WIDTH = METHODS["width"]
ALIGNED: dict[str, Any] = {"widths": "1/2,1/4", "steps": 3, "batch_size": 8}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rows = [
        {"query": f"{text} {number}", "positive": f"{number} {text}", "negative": f"no {text} {number}"}
        for number in range(25)
        for text in pico.TEXTS
    ]
    file = tmp_path_factory.mktemp("tuples") / "tuples.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return read_corpus([str(file)], seed=0)


@pytest.fixture(scope="module")
def nested(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A nested BERT and the folders of its sizes."""
    output = tmp_path_factory.mktemp("nested") / "out"
    return compress(str(pico_folders("bert")), single(WIDTH, ALIGNED), output=output, corpus=corpus)


def planned(
    model: SentenceTransformer, corpus: Corpus | None, source: str | None = None, **options: Any
) -> _WidthPlan:
    context = Context(original=model, corpus=corpus, source=source)
    plan = WIDTH.plan(model, make_options(WIDTH, options), context)
    assert isinstance(plan, _WidthPlan)
    return plan


def test_each_size_is_a_standard_folder_in_the_model_s_space(
    nested: Run, pico_folders: Callable[[str], Path]
) -> None:
    original = SentenceTransformer(str(pico_folders("bert")), device="cpu").encode(pico.TEXTS)
    assert nested.output is not None
    names = [sibling.output.name for sibling in nested.additional]
    assert names == ["out-1-2", "out-1-4"]
    for folder, width in zip(
        (nested.output, *(one.output for one in nested.additional)), (32, 16, 8), strict=True
    ):
        plain = SentenceTransformer(str(folder), device="cpu")
        assert transformer_of(plain).model.config.hidden_size == width
        assert plain.encode(pico.TEXTS).shape == original.shape
        _, info = AutoModel.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        lineage = json.loads((folder / "trundle.json").read_text())
        assert lineage["after"]["width"] == width
        assert lineage["steps"][0]["plan"]["widths"] == ["1/2", "1/4"]


@pytest.mark.parametrize(
    ("family", "widths", "select"),
    [("bert", "1/2,1/4", "importance"), ("llama", "1/2", "importance"), ("llama", "1/2,1/4", "consecutive")],
)
def test_a_narrow_decoder_does_not_keep_only_outlier_dimensions(
    family: str, widths: str, select: str, pico_model: Callable[[str], SentenceTransformer], corpus: Corpus
) -> None:
    assert planned(pico_model(family), corpus, widths=widths, objective="align", steps=1).select == select


def test_a_size_can_be_extracted_later(nested: Run, tmp_path: Path) -> None:
    assert nested.output is not None
    run = compress(str(nested.output), single(WIDTH, {"extract": "1/4"}), output=tmp_path / "quarter")
    assert "trained" in run.steps[0].says
    assert "untrained" not in run.steps[0].says
    taken = SentenceTransformer(str(tmp_path / "quarter"), device="cpu").encode(pico.TEXTS)
    written = SentenceTransformer(str(nested.additional[1].output), device="cpu").encode(pico.TEXTS)
    np.testing.assert_allclose(taken, written, atol=1e-6)


def test_another_size_is_selected_as_in_the_folder(nested: Run, tmp_path: Path) -> None:
    assert nested.output is not None
    run = compress(str(nested.output), single(WIDTH, {"extract": "3/4"}), output=tmp_path / "wide")
    assert run.steps[0].says == "extract 3/4 (24) of 32, untrained, importance selection"
    with pytest.warns(UserWarning, match="untrained"):
        opened = load(nested.output, width="3/4")
    np.testing.assert_allclose(
        SentenceTransformer(str(tmp_path / "wide"), device="cpu").encode(pico.TEXTS),
        opened.encode(pico.TEXTS),
        atol=1e-6,
    )


def test_a_nested_folder_opens_at_any_of_its_widths(nested: Run) -> None:
    assert nested.output is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width, sibling in zip(("1/2", Fraction(1, 4)), nested.additional, strict=True):
            written = SentenceTransformer(str(sibling.output), device="cpu").encode(pico.TEXTS)
            opened = load(nested.output, width=width).encode(pico.TEXTS)
            np.testing.assert_allclose(opened, written, atol=1e-6)
        whole = load(nested.output, width="1").encode(pico.TEXTS)
        np.testing.assert_array_equal(whole, load(nested.output).encode(pico.TEXTS))
    with pytest.warns(UserWarning, match="untrained .it was trained at 1/2, 1/4"):
        assert load(nested.output, width="3/4").encode(pico.TEXTS).shape == (len(pico.TEXTS), 24)
    with pytest.raises(BadInput, match="is not a share"):
        load(nested.output, width="half")


def test_a_folder_that_is_not_nested_is_narrowed_by_selection(
    pico_folders: Callable[[str], Path], corpus: Corpus
) -> None:
    with pytest.warns(UserWarning, match="never nested"):
        small = load(pico_folders("qwen3"), width="1/2")
    assert transformer_of(small).model.config.head_dim == 8
    model = load(pico_folders("qwen3"))
    says = str(planned(model, None, str(pico_folders("qwen3")), extract="1/2"))
    assert says == "extract 1/2 (16) of 32, untrained, rotary selection"
    mapped = planned(model, corpus, str(pico_folders("qwen3")), extract="1/2")
    assert mapped.mapped
    assert "closed form" in str(mapped)


def test_weights_changed_since_nesting_count_as_untrained(nested: Run, tmp_path: Path) -> None:
    assert nested.output is not None
    changed = load(nested.output)
    next(changed.parameters()).data.mul_(1.01)
    changed.save_pretrained(str(tmp_path / "changed"))
    (tmp_path / "changed" / "nested.safetensors").write_bytes(
        (nested.output / "nested.safetensors").read_bytes()
    )
    with pytest.warns(UserWarning, match="have changed since"):
        assert load(tmp_path / "changed", width="1/2").get_embedding_dimension() == 16
    (tmp_path / "changed" / "nested.safetensors").write_bytes(b"damaged")
    with pytest.raises(BadModel, match="damaged"):
        load(tmp_path / "changed", width="1/2")


def test_one_size_continues_in_a_recipe_and_the_others_are_written(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    recipe = parse_recipe(
        "steps: [depth: {keep: 2}, width: {widths: '1/2,1/4', steps: 2, batch_size: 8, result: 1/2}, "
        "align: {steps: 0}]",
        name="all",
    )
    run = compress(str(pico_folders("qwen2")), recipe, output=tmp_path / "out", corpus=corpus)
    assert run.after.width == 16
    assert run.after.layers == 2
    assert [sibling.output.name for sibling in run.additional] == ["out-full", "out-1-4"]
    assert [
        len(json.loads((tmp_path / n / "trundle.json").read_text())["steps"]) for n in ("out", "out-full")
    ] == [3, 2]
    assert load(tmp_path / "out-full", width="1/4").get_embedding_dimension() == 32
    assert not (tmp_path / "out" / "nested.safetensors").exists()


@pytest.mark.parametrize("family", ["mpnet", "gemma3"])
def test_contrast_gives_each_size_a_space_of_its_own(
    family: str, pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    options = {"widths": "1/2", "objective": "contrast", "steps": 1, "batch_size": 4, "mini_batch": 3}
    run = compress(str(pico_folders(family)), single(WIDTH, options), output=tmp_path / "out", corpus=corpus)
    half = SentenceTransformer(str(run.additional[0].output), device="cpu").encode(pico.TEXTS)
    assert half.shape == (len(pico.TEXTS), 16)
    np.testing.assert_allclose(load(tmp_path / "out", width="1/2").encode(pico.TEXTS), half, atol=1e-6)
    assert run.steps[0].facts["sizes"]["1/2"]["validation"] > 0


def test_long_texts_are_truncated_in_training_only(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    ends = []
    for length in (3, 4):
        options = {
            "widths": "1/2",
            "objective": "contrast",
            "steps": 1,
            "batch_size": 4,
            "max_length": length,
        }
        run = compress(
            str(pico_folders("bert")), single(WIDTH, options), output=tmp_path / str(length), corpus=corpus
        )
        ends.append(run.steps[0].facts["loss"])
    assert ends[0] != ends[1]
    assert load(tmp_path / "3").max_seq_length == load(pico_folders("bert")).max_seq_length


def test_a_random_student_learns_a_teachers_similarities(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    """The paper's baselines: fresh weights, and vanilla distillation."""
    heal = {
        "objective": "distil",
        "train": "full",
        "steps": 25,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "warmup": 0,
    }
    steps = [{"width": {"extract": "1/2", "start": "random"}}, {"contrast": heal}]
    teacher = load(pico_folders("bert", 1))
    with torch.no_grad():  # texts that differ to it, so that there is something to learn
        transformer_of(teacher).model.get_input_embeddings().weight.mul_(30)
    teacher.save_pretrained(source := str(tmp_path / "teacher"))
    recipe = parse_recipe(json.dumps({"steps": steps}), name="distil")
    run = compress(source, recipe, output=tmp_path / "out", corpus=corpus)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "contrast.jsonl").read_text().splitlines()]
    looks = [line["validation"] for line in metrics if line.get("validation") is not None]
    assert min(looks) < looks[0] / 2
    assert run.after.width == 16
    with pytest.raises(BadInput, match="only the objective distil"):
        compress(
            source,
            parse_recipe("steps: [contrast: {teacher: x}]", name="x"),
            output=tmp_path / "other",
            corpus=corpus,
        )


def test_an_existing_folder_of_a_size_is_found_before_any_work(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "out-1-4").mkdir()
    (tmp_path / "out-1-4" / "mine.txt").write_text("precious")
    with pytest.raises(BadInput, match="out-1-4 already exists"):
        compress(str(pico_folders("bert")), single(WIDTH, ALIGNED), output=tmp_path / "out", corpus=corpus)
    assert not (tmp_path / "out").exists()


def test_align_is_for_embedders_and_contrast_for_bare_models(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    bare = pico.save_backbone("llama", str(tmp_path / "bare"))
    assert planned(load(bare), corpus, bare).objective == "contrast"
    folder = str(pico_folders("llama"))
    assert planned(load(folder), corpus, folder).objective == "align"


def test_unused_dimensions_are_least_important(pico_model: Callable[[str], SentenceTransformer]) -> None:
    """A neuron and a value dimension whose outputs are zeroed come last."""
    model = copy.deepcopy(pico_model("gpt2"))
    block = transformer_of(model).model.h[1]
    with torch.no_grad():
        block.mlp.c_proj.weight[5] = 0.0
        block.attn.c_proj.weight[2] = 0.0
    found = _measure_importance(model, pico.TEXTS)
    orders = found.orders([(0, 1, 2, 3)])
    assert orders.mlp[1][-1] == 5
    assert orders.values[1][0][-1] == 2
    assert orders.matches is not None
    assert found.hidden.shape == (32,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"widths": "1/3"}, "not a whole number"),
        ({"widths": "1,1/2"}, "shares under 1"),
        ({"widths": "1/2", "result": "1/4"}, "not one of the widths"),
        ({"widths": "1/2", "start": "random"}, "belongs to extract"),
        ({"objective": "contrast", "steps": 0}, "no closed form for contrast"),
        ({"objective": "contrast", "widths": "1/32"}, "not a whole number"),
        ({"objective": "contrast", "max_length": 100_000}, "takes at most"),
        ({"objective": "align", "max_length": 8}, "only contrast truncates texts to max_length"),
    ],
)
def test_invalid_options_are_rejected(
    options: dict[str, Any], says: str, pico_model: Callable[[str], SentenceTransformer], corpus: Corpus
) -> None:
    with pytest.raises((ImpossibleCut, BadInput), match=says):
        planned(pico_model("bert"), corpus, **options)


def test_odd_vectors_are_rejected_by_the_angle_loss(tmp_path: Path, corpus: Corpus) -> None:
    model = pico.model("bert", str(tmp_path), hidden_size=12, num_attention_heads=1)
    with pytest.raises(BadInput, match="3 is odd"):
        planned(model, corpus, objective="contrast", widths="1/4")


def test_truncated_vectors_are_not_trained_but_have_a_closed_form(
    pico_model: Callable[[str], SentenceTransformer], corpus: Corpus
) -> None:
    model = copy.deepcopy(pico_model("bert"))
    model.truncate_dim = 8
    with pytest.raises(BadInput, match="truncated to 8 dimensions by its truncate_dim"):
        planned(model, corpus, widths="1/2")
    plan = planned(model, corpus, widths="1/2", result="1/2", steps=0)
    small = WIDTH.apply(model, plan, Context(original=model, corpus=corpus)).model
    assert small.encode(pico.TEXTS).shape == (len(pico.TEXTS), 8)


def test_missing_texts_and_invalid_widths_are_rejected(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    with pytest.raises(BadInput, match="pass them with --data"):
        planned(pico_model("bert"), None)
    with pytest.raises(BadInput, match="importance is measured on texts"):
        planned(pico_model("bert"), None, extract="1/2", select="importance")
    with pytest.raises(BadRecipe, match="widths can't be"):
        make_options(WIDTH, {"widths": "half"})

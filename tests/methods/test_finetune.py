"""The method finetune: what it trains, what it writes, and what it rejects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig

import pico
from compressing import compress
from trundle.data.corpus import Corpus, read_corpus
from trundle.errors import BadInput, BadRecipe, UserError
from trundle.methods import METHODS
from trundle.methods.contract import Applied, Context
from trundle.methods.finetune.finetune import _make_head_task
from trundle.recipe import make_options, parse_recipe, single
from trundle.records import read_lineage

PicoModel = Callable[[str], SentenceTransformer]
TOOL = METHODS["finetune"]
WORDS = sorted({word for text in pico.TEXTS for word in text.split() if word.isascii()})
LEARNS = {"epochs": 12, "batch_size": 16, "learning_rate": 5e-3, "dropout": False}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder / name)


def some_texts(count: int) -> list[tuple[str, bool]]:
    """Texts of random words, and whether the word `fox` is among them."""
    rng = np.random.default_rng(0)
    others = [word for word in WORDS if word != "fox"]
    found = []
    for number in range(count):
        words = [*rng.choice(others, size=4), *(["fox"] if number % 2 else [])]
        found.append((" ".join(rng.permutation(words)), bool(number % 2)))
    return found


def classes(folder: Path, count: int = 300) -> Corpus:
    rows = [{"text": text, "label": "has a fox" if fox else "none"} for text, fox in some_texts(count)]
    return read_corpus([write(folder, rows)], seed=0)


def run(model: SentenceTransformer, corpus: Corpus | None, tmp_path: Path, **options: Any) -> Applied:
    context = Context(original=model, corpus=corpus, cache=tmp_path / "cache")
    return TOOL.apply(model, TOOL.plan(model, make_options(TOOL, options), context), context)


def test_classes_are_learned_and_a_plain_load_names_them(pico_model: PicoModel, tmp_path: Path):
    corpus = classes(tmp_path)
    folder = tmp_path / "model"
    source = str(tmp_path / "given")
    pico_model("bert", 1).save(source)
    found = compress(source, single(TOOL, LEARNS), output=folder, corpus=corpus)
    assert found.fidelity is None
    assert found.steps[0].facts["accuracy"] > 0.9

    plain = SentenceTransformer(str(folder), device="cpu")
    names = AutoConfig.from_pretrained(folder).id2label
    held_out = list(corpus.labelled("held_out"))
    answers = plain.encode([row.texts[0] for row in held_out]).argmax(axis=1)
    right = np.mean([names[int(answer)] == row.label for answer, row in zip(answers, held_out, strict=True)])
    assert right == found.steps[0].facts["accuracy"]
    lineage = read_lineage(folder)
    assert lineage is not None
    assert lineage["space"] is None
    assert lineage["scores"][f"accuracy on {len(held_out)} held-out rows"] == right
    assert (folder / "finetune.jsonl").is_file()

    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    code = card.text.split("```python\n")[1].split("```")[0].replace('"model"', repr(str(folder)))
    asked: dict[str, Any] = {}
    exec(code, asked)
    assert set(asked["answers"]) <= {"has a fox", "none"}
    assert "similarity" not in card.text


def test_both_texts_of_a_pair_are_read(pico_model: PicoModel, tmp_path: Path):
    """The answer is in the second text for some rows, in the first for others."""
    rows = [
        {"sentence1": text, "sentence2": f"queries {number}", "label": int(fox)}
        if number % 4 < 2
        else {"sentence1": f"queries {number}", "sentence2": text, "label": int(fox)}
        for number, (text, fox) in enumerate(some_texts(400))
    ]
    corpus = read_corpus([write(tmp_path, rows)], seed=0)
    applied = run(pico_model("bert", 1), corpus, tmp_path, **LEARNS)
    assert applied.facts["accuracy"] > 0.85
    assert set(applied.facts) >= {"f1", "matthews", "held_out_rows"}


def test_a_pair_has_two_segments_where_the_tokenizer_makes_two(pico_model: PicoModel):
    """The tokens are those of the tokenizer itself, called with two texts."""
    model = pico_model("bert")
    pairs = [("queries are short", "the lazy dog"), ("a", "b")]
    task = _make_head_task(model, (pairs, [0, 1]), None, classes=True, batch_size=2)
    features, _ = task.batches.load(np.asarray([0, 1]))
    expected = model.tokenizer(
        [first for first, _ in pairs], [second for _, second in pairs], padding=True, return_tensors="pt"
    )
    for name in expected:
        assert torch.equal(features[name], expected[name]), name


def test_predicted_numbers_have_the_units_of_the_labels(pico_model: PicoModel, tmp_path: Path):
    rows = [{"text": text, "score": 1000.5 + 8 * fox} for text, fox in some_texts(300)]
    corpus = read_corpus([write(tmp_path, rows)], seed=0)
    applied = run(pico_model("mpnet", 1), corpus, tmp_path, **LEARNS)
    assert applied.facts["pearson"] > 0.8
    assert applied.facts["distance"] < 4
    assert applied.model.encode(["fox fox"]).shape == (1, 1)
    assert applied.model[0].model.config.problem_type == "regression"


def test_integers_are_ordered_classes_by_default(pico_model: PicoModel, tmp_path: Path):
    rows = [
        {"text": text, "label": (2, 10, 9)[number % 3]} for number, (text, _) in enumerate(some_texts(60))
    ]
    context = Context(original=pico_model("bert"), corpus=read_corpus([write(tmp_path, rows)], seed=0))
    for kind, labels in (("auto", ("2", "9", "10")), ("number", ())):
        plan = TOOL.plan(pico_model("bert"), make_options(TOOL, {"kind": kind}), context)
        assert plan.labels == labels


def test_fractions_are_numbers_in_a_csv_too(pico_model: PicoModel, tmp_path: Path):
    scores = [f"{number % 26 / 5:.1f}" for number in range(60)]
    rows = [f'"{text}",{score}' for (text, _), score in zip(some_texts(60), scores, strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,score", *rows]), encoding="utf-8")
    corpus = read_corpus([str(tmp_path / "rows.csv")], seed=0)
    context = Context(original=pico_model("bert"), corpus=corpus)
    assert TOOL.plan(pico_model("bert"), make_options(TOOL, {}), context).labels == ()
    named = TOOL.plan(pico_model("bert"), make_options(TOOL, {"kind": "classes"}), context)
    assert named.labels[:2] == ("0.0", "0.2")


def test_held_out_rows_are_not_trained_on(tmp_path: Path):
    rows = [
        {"sentence1": f"left {number % 40}", "sentence2": f"right {number % 37}", "label": number % 2}
        for number in range(400)
    ]
    corpus = read_corpus([write(tmp_path, rows)], seed=0)
    parts = {part: list(corpus.labelled(part)) for part in ("train", "validation", "held_out")}
    assert sum(map(len, parts.values())) == len(rows)
    assert all(parts.values())
    kept_back = {text.text for text in (*corpus.validation(), *corpus.held_out())}
    assert not {text for row in parts["train"] for text in row.texts} & kept_back
    measured = {text.text for text in corpus.held_out()}
    assert not {text for row in parts["validation"] for text in row.texts} & measured


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no label": ([{"text": "a"}], {}, r"no column known as the label \(columns: text\); name the columns"),
    "empty label": ([{"text": "a", "label": None}], {}, "has no label in column 'label'; write a word"),
    "one class": ([{"text": f"a {n}", "label": 1} for n in range(30)], {}, "every row has the label '1'"),
    "too many classes": (
        [{"text": f"a {n}", "label": f"c{n}"} for n in range(30)],
        {},
        "30 different labels of 30 rows are too many for classes",
    ),
    "no number": (
        [{"text": f"a {n}", "label": "red"} for n in range(30)],
        {"kind": "number"},
        "the label 'red', not a number; use kind: classes",
    ),
    "not finite": (
        [{"text": f"a {n}", "label": "nan" if n == 7 else "3.8"} for n in range(30)],
        {"kind": "number"},
        "the label 'nan', not a number; use kind: classes",
    ),
    "too long": ([{"text": "a", "label": 1}], {"max_length": 4000}, "the model takes at most 48 tokens"),
    "twice": (
        [{"text": "a", "label": 1}],
        {"steps": 2, "epochs": 2},
        "set the length of the training; pass one of them",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_options_are_rejected(pico_model: PicoModel, tmp_path: Path, case: str):
    rows, options, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        run(pico_model("bert"), read_corpus([write(tmp_path, rows)], seed=0), tmp_path, **options)


def test_pairs_and_single_texts_are_not_mixed(pico_model: PicoModel, tmp_path: Path):
    single_texts = [{"text": f"a {n}", "label": n % 2} for n in range(20)]
    pairs = [{"sentence1": f"b {n}", "sentence2": f"c {n}", "label": n % 2} for n in range(20)]
    sources = [write(tmp_path, single_texts), write(tmp_path, pairs, "pairs.jsonl")]
    with pytest.raises(BadInput, match="some are pairs; train on one kind"):
        run(pico_model("bert"), read_corpus(sources, seed=0), tmp_path)


def test_it_comes_last_in_a_recipe_and_makes_no_pair(tmp_path: Path):
    with pytest.raises(BadRecipe, match=r"has methods after finetune.*put finetune last"):
        parse_recipe("steps: [finetune, align]", name="x")
    recipe = parse_recipe("steps: [align, finetune]", name="x")
    with pytest.raises(BadInput, match="--pair needs a model"):
        compress("nowhere", recipe, output=tmp_path / "out", pair=True)

"""What align writes besides the model: calibration ranges and the margin, on pico models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.data.corpus import Corpus
from trundle.data.texts import Text
from trundle.evaluate.shortening import read_ranges
from trundle.methods import METHODS
from trundle.methods.contract import Applied, Context
from trundle.model.heads import copy_of
from trundle.model.matrices import block_weights, with_zeros
from trundle.model.save import save
from trundle.recipe import make_options
from trundle.records import CALIBRATION_FILE, Lineage
from trundle.report.reading import _read_training

TEXTS = [Text(text=f"{text} {number}", kind=None) for number in range(20) for text in pico.TEXTS]
CORPUS = Corpus(
    train=lambda: iter(TEXTS),
    validation=lambda: iter(TEXTS[::-1]),
    held_out=lambda: iter(()),
    facts=lambda: (),
)


def aligned(
    student: SentenceTransformer, teacher: SentenceTransformer, cache: Path, **options: Any
) -> Applied:
    step, context = METHODS["align"], Context(original=teacher, corpus=CORPUS, seed=3, cache=cache)
    return step.apply(student, step.plan(student, make_options(step, options), context), context)


def test_pruned_weights_stay_zero_with_muon(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    student = copy_of(pico_model("bert"))
    with_zeros(student, {name: weight < 0 for name, weight in block_weights(student)})
    options = {"steps": 2, "batch_size": 8, "optimizer": "muon"}
    after = dict(block_weights(aligned(student, pico_model("mpnet"), tmp_path, **options).model))
    for name, weight in block_weights(student):
        assert ((after[name] == 0) == (weight == 0)).all(), name


@pytest.mark.parametrize("family", ["bert", "gemma3"])
def test_the_margin_is_logged_and_changes_no_weight(
    family: str, pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    student, teacher = pico_model(family), pico_model("mpnet")
    options = {"steps": 2, "batch_size": 8, "dropout": True}
    plain = aligned(student, teacher, tmp_path / "plain", **options)
    watched = aligned(student, teacher, tmp_path / "watched", **options, margin=True)
    lines = [json.loads(line) for line in watched.files["align.jsonl"].splitlines()]
    looks = [line for line in lines if line["validation"] is not None]
    assert [look["step"] for look in looks] == [0, 2]
    for look in looks:
        assert set(look["measures"]) == {"agreement@10", "agreement@10, own index"}
        assert 0 < look["measures"]["agreement@10"] <= 1
    (tmp_path / "align.jsonl").write_text(str(watched.files["align.jsonl"]))
    drawn = _read_training(tmp_path, "align")
    assert drawn is not None
    assert drawn.watched["agreement@10"] == tuple((e["step"], e["measures"]["agreement@10"]) for e in looks)
    assert "measures" not in plain.files["align.jsonl"]
    for name, weight in plain.model.state_dict().items():
        assert (watched.model.state_dict()[name] == weight).all(), name


def test_the_ranges_of_the_teachers_vectors_are_kept_with_the_model(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    student, teacher = pico_model("bert"), pico_model("mpnet")
    applied = aligned(student, teacher, tmp_path / "cache", steps=0)
    folder = save(
        applied.model, tmp_path / "model", lineage=Lineage(source="x"), card="", files=applied.files
    )
    ranges = read_ranges(folder)
    vectors = teacher.encode([text.text for text in TEXTS])
    assert ranges is not None
    assert ranges.vectors == len(TEXTS)
    # Teacher vectors are stored in half precision.
    np.testing.assert_allclose(ranges.lowest, vectors.min(axis=0), atol=1e-3)
    np.testing.assert_allclose(ranges.highest, vectors.max(axis=0), atol=1e-3)
    assert (folder / CALIBRATION_FILE).is_file()
    SentenceTransformer(str(folder), device="cpu")

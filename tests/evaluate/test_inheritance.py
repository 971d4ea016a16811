"""Shortened vectors of teacher and student, on models with known vectors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trundle.data.texts import Text
from trundle.embedder import Embedder, _plain
from trundle.errors import BadInput
from trundle.evaluate.comparison import compare
from trundle.evaluate.fidelity import watch_margin
from trundle.evaluate.scoring import find_tasks
from trundle.evaluate.shortening import Shorten, measure_ranges

TEXTS = [Text(text=f"{word} number {n}", kind=None) for n in range(40) for word in ("cat", "dog", "rain")]


def test_whole_vectors_score_what_they_score_and_a_copy_inherits_everything(root, words):
    copy = _plain("copy", words.text)
    found = compare([copy], teacher=words, tasks=find_tasks(["all"], root), texts=TEXTS, shorten=Shorten())
    by_task, by_agreement = found.inheritance
    assert by_task.measure == "Small"  # the task with documents
    [ndcg] = [result.score for result in found.results[0] if result.task == "Small"]
    assert by_task.rows[0].scores == {"teacher": ndcg, "asymmetric": ndcg, "student": ndcg}
    assert [(row.dimensions, row.precision) for row in by_task.rows[:4]] == [
        (64, "float32"),
        (64, "int8"),
        (64, "binary"),
        (32, "float32"),
    ]
    assert by_agreement.rows[0].scores["teacher"] == 1
    for row in by_agreement.rows:
        assert len(set(row.scores.values())) == 1
    assert by_agreement.rows[-1].scores["teacher"] < 0.5  # four signs are little
    assert "measured vectors" in by_agreement.calibration
    content = json.loads(json.dumps(found.as_json()))["inheritance"]
    assert content[0]["rows"][0]["tasks"]["teacher"] == {"Small": ndcg}


def test_kept_ranges_are_used_for_both(words):
    elsewhere = measure_ranges([np.array([[5] * 64, [6] * 64], dtype=np.float32)], "teacher")
    models = [_plain("with", words.text), _plain("without", words.text)]
    shorten = Shorten(dimensions=(64,), ranges={"with": elsewhere})
    kept, measured = compare(models, teacher=words, texts=TEXTS, shorten=shorten).inheritance
    assert "2 training vectors" in kept.calibration
    at_bytes = next(row for row in kept.rows if row.precision == "int8")
    as_bytes = next(row for row in measured.rows if row.precision == "int8")
    assert at_bytes.scores["teacher"] < 0.5 < as_bytes.scores["teacher"]  # everything was clipped to one step
    assert at_bytes.kept["teacher"] == at_bytes.scores["teacher"]


def test_impossible_dimensions_are_rejected(words):
    short = measure_ranges([np.ones((1, 8), dtype=np.float32)], "teacher")
    with pytest.raises(BadInput, match="from 1 to 64"):
        compare([words], teacher=words, texts=TEXTS, shorten=Shorten(dimensions=(65,)))
    with pytest.raises(BadInput, match="vectors of 8 dimensions"):
        compare([words], teacher=words, texts=TEXTS, shorten=Shorten(ranges={words.name: short}))
    with pytest.raises(BadInput, match="name the teacher"):
        compare([words], tasks=[object()], shorten=Shorten())


def test_the_margin_is_full_for_a_copy_and_falls_with_noise(words):
    texts = [Text(text=text.text, kind="query" if n % 4 == 0 else "document") for n, text in enumerate(TEXTS)]
    vectors = words.text([text.text for text in texts])
    copy = watch_margin(words, texts, vectors)
    assert copy(0, 1.0) == {"agreement@10": 1.0, "agreement@10, own index": 1.0}
    turned = watch_margin(
        _plain("turned", lambda given: np.roll(words.text(given), 1, axis=1)), texts, vectors
    )
    found = turned(5, 1.0)
    assert found["agreement@10, own index"] == 1.0  # the same shape, in another place
    assert found["agreement@10"] < 0.9
    assert watch_margin(words, texts[:40], vectors[:40]) is None


def test_the_margin_encodes_each_text_in_its_role(words):
    texts = [
        Text(text=text.text, kind=kind)
        for text, kind in zip(TEXTS, ("query", None, "document") * 40, strict=True)
    ]
    asked: dict[str, set[str]] = {"text": set(), "query": set(), "document": set()}

    def role(name):
        return lambda given: (asked[name].update(given), words.text(given))[1]

    student = Embedder(name="student", text=role("text"), query=role("query"), document=role("document"))
    watch_margin(student, texts, words.text([text.text for text in texts]))(0, 1.0)
    by_kind = {
        kind: {text.text for text in texts if text.kind == kind} for kind in ("query", None, "document")
    }
    assert asked == {"query": by_kind["query"], "text": by_kind[None], "document": by_kind["document"]}

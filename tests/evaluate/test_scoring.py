"""Results: what they contain, which texts are encoded for them, and what is rejected."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from recorded_progress import RecordedProgress
from trundle.embedder import Embedder, _plain
from trundle.errors import BadInput, BadModel
from trundle.evaluate.scoring import Result, _mean_score, evaluate, find_tasks
from trundle.evaluate.tasks import KnownItemTask
from trundle.teacher import targets

KNOWN = KnownItemTask(name="known", pairs=[("one", "first one"), ("two", "second two")])


def counting(embedder: Embedder, seen: Counter[tuple[str, str]]) -> Embedder:
    def role(name, encode):
        def count(texts):
            seen.update((name, text) for text in texts)
            return encode(texts)

        return count

    return Embedder(
        name=embedder.name,
        text=role("text", embedder.text),
        query=role("query", embedder.query),
        document=role("document", embedder.document),
    )


def test_a_result_says_everything_and_survives_json(root: Path, words):
    for result in evaluate(words, find_tasks(["all"], root), seed=7):
        assert Result(**json.loads(json.dumps(result.as_json(), allow_nan=False))) == result
        assert result.score == result.measures[result.main]
        assert (result.model, result.mode, result.documents, result.seed) == (
            "bag of words",
            "standard",
            None,
            7,
        )
        assert result.seconds > 0
        assert {"python", "numpy", "scikit-learn", "scipy"} <= result.versions.keys()
        assert len(result.fingerprint) == 32
        assert result.settings


def test_the_same_seed_gives_the_same_figures(root: Path, words):
    tasks = find_tasks(["all"], root)
    first, second = evaluate(words, tasks), evaluate(words, tasks)
    assert [(r.fingerprint, r.measures) for r in first] == [(r.fingerprint, r.measures) for r in second]


def test_each_text_is_encoded_once_in_each_role(root: Path, words):
    seen: Counter[tuple[str, str]] = Counter()
    tasks = [
        *find_tasks(["sts", "retrieval", "pairs"], root),
        *find_tasks(["sts"], root, split="dev"),
        KNOWN,
        KNOWN,
    ]
    evaluate(counting(words, seen), tasks, documents=counting(words, seen))
    # Teacher and student are two models here, so a document is encoded by each of them.
    assert {count for (role, _), count in seen.items() if role != "document"} == {1}
    assert {count for (role, _), count in seen.items() if role == "document"} == {2}


def test_roles_with_one_function_share_their_vectors(words):
    calls: Counter[str] = Counter()

    def encode(texts):
        calls.update(texts)
        return words.text(texts)

    evaluate(_plain("one", encode), [KnownItemTask(name="known", pairs=[("same", "same"), ("x", "y")])])
    assert set(calls.values()) == {1}


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [(0.01, [32, 64, 128, 256, *[512] * 4, 472]), (9.0, [*[32] * 93, 24])],
    ids=["fast", "slow"],
)
def test_texts_are_given_longest_first_in_slices_that_grow(words, seconds, sizes, monkeypatch):
    ticks = itertools.count(0, seconds)
    monkeypatch.setattr(targets, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    batches: list[list[str]] = []

    def encode(texts):
        batches.append(list(texts))
        return words.text(texts)

    pairs = [(f"q{n}", "d" * (n % 50) + str(n)) for n in range(3000)]
    evaluate(
        _plain("slices", encode), [KnownItemTask(name="known", pairs=pairs)], progress=RecordedProgress()
    )
    assert [len(batch) for batch in batches] == 2 * sizes
    for batch in batches:
        assert [len(text) for text in batch] == sorted((len(text) for text in batch), reverse=True)
    assert len(batches[0][-1]) >= len(batches[1][0])


def test_of_two_memories_the_inner_one_shows_progress(words):
    sizes: list[int] = []

    def encode(texts):
        sizes.append(len(texts))
        return words.text(texts)

    outer, inner = RecordedProgress(), RecordedProgress()
    model = targets.HeldOutVectors(inner).remember(_plain("slices", encode), "inner")
    targets.HeldOutVectors(outer).remember(model, "outer").text([f"text {n}" for n in range(90)])
    assert sizes == [32, 58]
    assert [label for label, _ in inner.tasks] == ["inner"]
    assert not outer.tasks


def test_asymmetric_results_come_with_the_standard_ones(root: Path):
    student = _plain("student", lambda texts: np.array([[len(t), 1] for t in texts], np.float32))
    teacher = _plain(
        "teacher", lambda texts: np.array([[t.count("a"), t.count("o")] for t in texts], np.float32)
    )
    results = evaluate(student, [*find_tasks(["sts"], root), KNOWN], documents=teacher)
    assert [(r.task, r.mode, r.model, r.documents) for r in results] == [
        ("Likeness", "standard", "student", None),
        ("known", "standard", "student", None),
        ("known", "asymmetric", "student", "teacher"),
    ]
    crossed = Embedder(name="x", text=student.text, query=student.query, document=teacher.document)
    assert results[2].measures == KNOWN.run(crossed, seed=42).measures


def test_means_count_each_task_once_in_its_mode(root: Path, words):
    results = evaluate(words, [*find_tasks(["sts"], root), KNOWN], documents=words)
    scored = [replace(result, score=score) for result, score in zip(results, (0.2, 0.4, 0.8), strict=True)]
    assert _mean_score(scored) == pytest.approx(0.3)
    assert _mean_score(scored, "asymmetric") == pytest.approx(0.5)
    assert _mean_score(scored[::-1], "asymmetric") == pytest.approx(0.5)
    with pytest.raises(BadInput, match="no results"):
        _mean_score([])


def test_no_tasks_is_rejected(words):
    with pytest.raises(BadInput, match="name at least one"):
        evaluate(words, [])


def test_a_text_that_is_no_string_is_rejected(words):
    with pytest.raises(BadInput, match="numbers holds a int among its texts"):
        evaluate(words, [KnownItemTask(name="numbers", pairs=[("one", 1)])])


def test_vectors_that_are_not_numbers_are_rejected():
    broken = _plain("broken", lambda texts: np.full((len(texts), 2), np.nan, np.float32))
    with pytest.raises(BadModel, match=r"broken gave NaN or infinity for text 1 .*load it in float32"):
        evaluate(broken, [KNOWN])


@pytest.mark.parametrize("shape", [(3, 2), (2,), (2, 2, 2)])
def test_an_array_that_is_not_a_row_for_each_text_is_rejected(shape):
    with pytest.raises(BadModel, match="one row per text"):
        evaluate(_plain("odd", lambda _texts: np.ones(shape, np.float32)), [KNOWN])


def test_a_width_that_changes_between_calls_is_rejected():
    def encode(texts):
        return np.ones((len(texts), len(texts)), np.float32)

    with pytest.raises(BadModel, match="differing widths"):
        evaluate(
            _plain("odd", encode), [KNOWN, KnownItemTask(name="more", pairs=[*KNOWN.pairs, ("three", "x")])]
        )


def test_a_student_of_another_width_is_told_to_align_first():
    narrow = _plain("narrow", lambda texts: np.ones((len(texts), 2), np.float32))
    wide = _plain("wide", lambda texts: np.ones((len(texts), 5), np.float32))
    with pytest.raises(BadInput, match=r"2 and of 5 dimensions.*align the student"):
        evaluate(narrow, [KNOWN], documents=wide)


def test_progress_counts_every_text_and_says_every_score(words):
    shown: Counter[str] = Counter()
    said: list[str] = []

    class Listening:
        @contextmanager
        def task(self, label, total):
            before = shown[label]
            yield lambda units: shown.update({label: units})
            assert shown[label] - before == total

        def say(self, line):
            said.append(line)

    evaluate(words, [KNOWN], documents=_plain("teacher", words.text), progress=Listening())
    assert shown == {"known": 4}
    assert said == [
        "bag of words, known (standard, all): ndcg@10 1.0000",
        "bag of words, known (asymmetric, all): ndcg@10 1.0000",
    ]

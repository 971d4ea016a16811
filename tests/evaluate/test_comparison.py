"""Students compared with a teacher: both modes, shares, agreement, and what is left out."""

from __future__ import annotations

import json
from zlib import crc32

import numpy as np
import pytest

from trundle.data.texts import Text
from trundle.embedder import _plain
from trundle.errors import BadInput
from trundle.evaluate.comparison import compare
from trundle.evaluate.scoring import _mean_score, evaluate, find_tasks

TEXTS = [Text(text=f"{word} number {n}", kind=None) for n in range(40) for word in ("cat", "dog", "rain")]


def noisy(words, amount=0.3, name="noisy"):
    """The same space, a little off: as much for each text every time."""

    def encode(texts):
        noise = [np.random.default_rng(crc32(text.encode())).normal(size=64) for text in texts]
        return (words.text(texts) + amount * np.stack(noise)).astype(np.float32)

    return _plain(name, encode)


def test_both_modes_and_shares_are_those_of_the_single_calls(root, words):
    student = noisy(words)
    tasks = find_tasks(["all"], root)
    found = compare([student], teacher=words, tasks=tasks)
    teacher_alone, student_alone = evaluate(words, tasks), evaluate(student, tasks, documents=words)
    assert [r.score for r in found.results[0]] == [r.score for r in teacher_alone]
    assert [r.score for r in found.results[1]] == [r.score for r in student_alone]
    shares = {(share.over, share.mode): share for share in found.shares}
    assert set(shares) == {
        (over, mode) for over in ("all", "retrieval") for mode in ("standard", "asymmetric")
    }
    for mode in ("standard", "asymmetric"):
        assert shares["all", mode].share == pytest.approx(
            _mean_score(student_alone, mode) / _mean_score(teacher_alone)
        )
        assert shares["all", mode].mean == pytest.approx(_mean_score(student_alone, mode))
    assert shares["retrieval", "asymmetric"].tasks == 1


def test_each_model_encodes_each_text_once(root, words):
    asked: list[str] = []

    def encode(texts):
        asked.extend(texts)
        return words.text(texts)

    teacher = _plain("teacher", encode)
    compare(
        [noisy(words, name="one"), noisy(words, name="two")], teacher=teacher, tasks=find_tasks(["all"], root)
    )
    counted = [text for text in asked if text != "How wide is a vector?"]
    assert len(counted) == len(set(counted)) > 10


def test_texts_show_agreement_and_the_worst_without_labels(words):
    found = compare([noisy(words, 0.1), noisy(words, 2.0, "far")], teacher=words, texts=TEXTS, examples=3)
    near, far = found.fidelity
    assert near.agreement_asymmetric > far.agreement_asymmetric
    assert near.distance < far.distance
    assert (near.queries, near.documents) == (30, 90)
    assert [len(near.farthest), len(near.closest)] == [3, 3]
    assert near.farthest[0].distance >= near.farthest[1].distance > near.closest[0].distance
    content = json.loads(json.dumps(found.as_json()))
    assert content["fidelity"][1]["farthest"][0]["distance"] == far.farthest[0].distance
    assert content["results"] == []


def test_a_model_of_another_width_is_scored_alone(root, words):
    narrow = _plain("narrow", lambda texts: words.text(texts)[:, :16])
    found = compare([narrow], teacher=words, tasks=find_tasks(["retrieval"], root), texts=TEXTS)
    assert [result.mode for result in found.results[1]] == ["standard"]
    assert found.fidelity == ()
    assert "16 dimensions" in found.notes[0]
    assert [share.mode for share in found.shares] == ["standard"]


def test_a_teacher_that_scores_nothing_has_no_shares(root, words):
    blind = _plain("blind", lambda texts: np.ones((len(texts), 64), dtype=np.float32))
    found = compare([words], teacher=blind, tasks=find_tasks(["sts"], root))
    assert [share.share for share in found.shares] == [None]


def test_impossible_comparisons_are_rejected(words):
    with pytest.raises(BadInput, match="nothing to measure"):
        compare([words], teacher=words)
    with pytest.raises(BadInput, match="name its teacher"):
        compare([words], texts=TEXTS)
    with pytest.raises(BadInput, match="too few"):
        compare([words], teacher=words, texts=TEXTS[:20])

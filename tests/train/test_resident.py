"""Batches gathered on the device equal those that are read and tokenised."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pico
from trundle.data.corpus import Corpus
from trundle.data.texts import Text
from trundle.embedder import _plain
from trundle.methods import METHODS
from trundle.methods.align import resident
from trundle.methods.align.leaf import _loader, make_align_task
from trundle.methods.align.resident import (
    _fits,
    _id_map,
    _keep_teachers_tokens,
    _make_resident,
    _Names,
    _Resident,
)
from trundle.methods.contract import Context
from trundle.model import encode
from trundle.model.encode import labelling_embedder
from trundle.model.tokens import ShortCut
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest

KINDS = ("query", "document", None)


@pytest.fixture
def targets(tmp_path: Path):
    return make_targets(tmp_path / "store")


def make_targets(folder: Path, *, scale: float = 1.0, dtype: str = "float16"):
    texts = [
        Text(text=f"{text} {number}", kind=KINDS[number % 3]) for number in range(20) for text in pico.TEXTS
    ]
    random = np.random.default_rng(0)
    teacher = _plain(
        "teacher", lambda asked: (scale * random.normal(size=(len(asked), 16))).astype(np.float32)
    )
    return build_targets(texts, teacher, Manifest(teacher="random", dtype=dtype), folder)


@pytest.mark.parametrize("family", ["bert", "roberta", "qwen2", "gpt2"])
def test_a_resident_batch_equals_the_batch_on_disk(family, pico_model, targets, monkeypatch, tmp_path):
    monkeypatch.setattr(resident, "_CHUNK", 33)
    model = copy.deepcopy(pico_model(family))
    model.prompts = {"query": "asked: ", "document": "said: "}
    held = _make_resident(model, targets, torch.device("cpu"), Context(original=model, cache=tmp_path))
    assert held is not None
    load = _loader(model, targets)
    for positions in (np.array([3]), np.array([0, 139, 7, 7, 64]), np.arange(140)):
        (features, vectors), (expected, wanted) = held.load(positions), load(positions)
        assert features.keys() == expected.keys()
        for name, value in features.items():
            assert torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]
        torch.testing.assert_close(vectors, wanted)


def test_each_process_fills_the_device_of_its_own_student(pico_model, targets, monkeypatch, tmp_path):
    """With several GPUs, the memory of the student's device counts; a fake student names its device."""
    student, asked = copy.deepcopy(pico_model("bert")), []

    def free(device):
        asked.append(device)
        return 1 << 30, 1 << 30

    def make(model, targets, device, context):
        asked.append(device)
        return _make_resident(model, targets, torch.device("cpu"), context)

    monkeypatch.setattr(type(student), "device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(resident, "_make_resident", make)
    task = make_align_task(
        student, targets, None, batch_size=4, context=Context(original=student, cache=tmp_path)
    )
    assert asked == [torch.device("cuda", 1)] * 2
    assert task.batches.load.__func__ is _Resident.load


def test_vectors_are_resident_only_if_they_fit(targets):
    assert _fits(targets, 1 << 30)
    assert not _fits(targets, 4 * len(targets) * targets.width * 2 - 1)


def test_float32_vectors_stay_float32_in_memory(pico_model, tmp_path):
    """Vectors too large for half precision are stored as float32, as the one sentence about them says."""
    large = make_targets(tmp_path, scale=1e5, dtype="float32")
    model = pico_model("bert")
    held = _make_resident(
        model, large, torch.device("cpu"), Context(original=model, cache=tmp_path / "cache")
    )
    positions = np.arange(len(large))
    np.testing.assert_array_equal(held.load(positions)[1].numpy(), large.vectors(positions))
    needed = 4 * int(large.lengths.sum()) + 4 * len(large) * large.width
    assert _fits(large, 4 * needed + 4)
    assert not _fits(large, 4 * needed)


@pytest.fixture
def cut(pico_model, tmp_path):
    """A context, and a model whose vocabulary was cut in it."""
    model = pico_model("bert")
    corpus = Corpus(
        train=lambda: (Text(text=text) for text in pico.TEXTS),
        validation=lambda: iter(()),
        held_out=lambda: iter(()),
        facts=lambda: (),
    )
    context = Context(original=model, cache=tmp_path / "cache", corpus=corpus)
    vocabulary = METHODS["vocabulary"]
    plan = vocabulary.plan(model, vocabulary.options(keep=150), context)
    return context, vocabulary.apply(model, plan, context).model


@pytest.fixture
def tokenised(monkeypatch):
    """How many texts each call tokenises."""
    counts, flat = [], ShortCut.flat

    def counted(self, texts):
        counts.append(len(texts))
        return flat(self, texts)

    monkeypatch.setattr(ShortCut, "flat", counted)
    return counts


def assert_same_tokens(found, student, targets, context, tmp_path):
    again = replace(context, cache=tmp_path / "other")
    expected = _make_resident(student, targets, torch.device("cpu"), again)
    for name in ("tokens", "lengths", "starts"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_tokens_are_kept_and_a_cut_vocabulary_reuses_them(cut, targets, tokenised, tmp_path):
    """Only texts that lost a token are tokenised again, and all of them have the tokens of a new start."""
    (context, student), device = cut, torch.device("cpu")
    for _ in range(2):
        _make_resident(context.original, targets, device, context)
        assert sum(tokenised) == len(targets) + sum(count for count in tokenised if count < len(targets))
    found = _make_resident(student, targets, device, context)
    assert tokenised.count(len(targets)) == 1
    assert_same_tokens(found, student, targets, context, tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_student_gets_the_tokens_that_its_teacher_read(
    family, cut, pico_model, tokenised, tmp_path, monkeypatch
):
    """A teacher that splits texts in another way has tokens that are of no use."""
    monkeypatch.setattr(encode, "_on_gpu", lambda _: True)
    (context, student), teacher, kept = cut, pico_model(family), []
    texts = [Text(text=f"{text} {number}") for number in range(20) for text in pico.TEXTS]
    targets = build_targets(
        texts,
        labelling_embedder(teacher, name="teacher"),
        Manifest(teacher="teacher", shard_size=33),
        tmp_path / "labelled",
        keep_tokens=kept.append,
    )
    _keep_teachers_tokens(teacher, targets, kept, context.cache)
    tokenised.clear()
    found = _make_resident(student, targets, torch.device("cpu"), context)
    assert (max(tokenised) < len(targets)) == (family == "bert")
    assert_same_tokens(found, student, targets, context, tmp_path)


def test_a_token_with_two_roles_keeps_its_id_if_the_other_tokenizer_has_one_of_them():
    """Otherwise every text of a teacher like MPNet would be tokenised again."""
    theirs = {"cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>", "eos_token": "</s>"}
    old = _Names(ids={"<s>": 0, "</s>": 1, "word": 2, "gone": 3}, special=theirs)
    ours = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    new = _Names(ids={"[CLS]": 7, "[SEP]": 8, "word": 9}, special=ours)
    assert _id_map(old, new).tolist() == [7, 8, 9, -1]

"""Batches gathered on the device equal those that are read and tokenised."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import pico
from trundle.data.texts import Text
from trundle.embedder import _plain
from trundle.methods.align import leaf
from trundle.methods.align.leaf import _fits, _loader, _make_resident, _Resident, make_align_task
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
def test_a_resident_batch_equals_the_batch_on_disk(family, pico_model, targets, monkeypatch):
    monkeypatch.setattr(leaf, "_CHUNK", 33)
    model = copy.deepcopy(pico_model(family))
    model.prompts = {"query": "asked: ", "document": "said: "}
    held = _make_resident(model, targets, torch.device("cpu"))
    assert held is not None
    load = _loader(model, targets)
    for positions in (np.array([3]), np.array([0, 139, 7, 7, 64]), np.arange(140)):
        (features, vectors), (expected, wanted) = held.load(positions), load(positions)
        assert features.keys() == expected.keys()
        for name, value in features.items():
            assert torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]
        torch.testing.assert_close(vectors, wanted)


def test_each_process_fills_the_device_of_its_own_student(pico_model, targets, monkeypatch):
    """With several GPUs, the memory of the student's device counts; a fake student names its device."""
    student, asked = copy.deepcopy(pico_model("bert")), []

    def free(device):
        asked.append(device)
        return 1 << 30, 1 << 30

    def make(model, targets, device, *, progress):
        asked.append(device)
        return _make_resident(model, targets, torch.device("cpu"), progress=progress)

    monkeypatch.setattr(type(student), "device", torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(leaf, "_make_resident", make)
    task = make_align_task(student, targets, None, batch_size=4)
    assert asked == [torch.device("cuda", 1)] * 2
    assert task.batches.load.__func__ is _Resident.load


def test_vectors_are_resident_only_if_they_fit(targets):
    assert _fits(targets, 1 << 30)
    assert not _fits(targets, 4 * len(targets) * targets.width * 2 - 1)


def test_float32_vectors_stay_float32_in_memory(pico_model, tmp_path):
    """Vectors too large for half precision are stored as float32, as the one sentence about them says."""
    large = make_targets(tmp_path, scale=1e5, dtype="float32")
    held = _make_resident(pico_model("bert"), large, torch.device("cpu"))
    positions = np.arange(len(large))
    np.testing.assert_array_equal(held.load(positions)[1].numpy(), large.vectors(positions))
    needed = 4 * int(large.lengths.sum()) + 4 * len(large) * large.width
    assert _fits(large, 4 * needed + 4)
    assert not _fits(large, 4 * needed)

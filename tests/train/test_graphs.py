"""Steps whose batches are gathered on the device equal plain steps; on a GPU they are captured as graphs."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pico
from recorded_progress import RecordedProgress
from trundle.data.texts import Text
from trundle.embedder import _plain
from trundle.methods.align import leaf, resident
from trundle.methods.align.leaf import make_align_task
from trundle.methods.contract import Context
from trundle.model.matrices import computing_on_grid, grid_scales
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest
from trundle.train import graphs
from trundle.train.batches import ByBucket, _padded_lengths
from trundle.train.loop import TrainingTask, TrainSettings, train
from trundle.train.trainer import Computing

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
GATHERED = ["bert", "mpnet", "modernbert", "gemma3"]
"""Encoders, relative positions, and both kinds of sliding windows: on a CPU batches are only gathered."""
CAPTURED = ["roberta", "distilbert", "llama", "qwen3", "gpt2"]
LATE_ROUNDING: dict[str, Any] = {"optimizer": "muon", "exact_share": 0.6}


@pytest.fixture
def targets(tmp_path: Path) -> Any:
    random = np.random.default_rng(0)
    words = " ".join(pico.TEXTS).split()
    texts = [
        Text(text=" ".join(random.choice(words, random.integers(1, 30))) + f" {number}", kind=None)
        for number in range(61)
    ]
    teacher = _plain("teacher", lambda asked: random.normal(size=(len(asked), 32)).astype(np.float32))
    return build_targets(texts, teacher, Manifest(teacher="random"), tmp_path / "store")


def task_of(model: Any, targets: Any, monkeypatch: Any, *, graphs: bool = True) -> TrainingTask[Any]:
    """The task of align with its texts on the device, whatever device that is."""
    context = Context(original=model, cache=targets.folder.parent / "cache")
    made = resident._make_resident(model, targets, model.device, context)
    monkeypatch.setattr(leaf, "_resident_on", lambda *_: made)
    task = make_align_task(model, targets, None, batch_size=8, context=context)
    return task if graphs else replace(task, batches=replace(task.batches, gather=None))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "device"),
    [*((family, "cpu") for family in GATHERED)]
    + [pytest.param(family, "cuda", marks=NEEDS_GPU) for family in GATHERED + CAPTURED],
)
def test_graphs_make_the_steps_of_the_plain_trainer(family, device, pico_model, targets, monkeypatch) -> None:
    settings = TrainSettings(steps=6, accumulate=2, learning_rate=1e-3, dropout=False)
    found = []
    for uses_graphs in (True, False):
        model = copy.deepcopy(pico_model(family)).to(device)
        task = task_of(model, targets, monkeypatch, graphs=uses_graphs)
        said = RecordedProgress()
        result = train(model, task, settings, progress=said)
        assert not any("can't be captured" in line for line in said.lines)
        found.append((result.loss, weights(model)))
    (graph_loss, graph_weights), (loss, plain) = found
    assert graph_loss == pytest.approx(loss, rel=1e-4 if device == "cpu" else 1e-3)  # bf16 on a GPU
    for name, weight in plain.items():
        torch.testing.assert_close(graph_weights[name], weight, rtol=1e-3, atol=2e-4, msg=name)


def rounding(model: Any) -> Computing:
    """int4 with scales that are chosen when the exact steps end."""
    scales = grid_scales(model)

    def begin() -> None:
        with torch.no_grad():
            for kept, chosen in zip(scales, grid_scales(model), strict=True):
                kept.copy_(0.9 * chosen)

    return Computing(context=partial(computing_on_grid, model, scales), begin=begin, kept=scales)


@pytest.mark.parametrize("how", [{}, LATE_ROUNDING], ids=["plain", "late rounding"])
@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupted_run_ends_with_the_same_weights(
    device, how, pico_model, targets, monkeypatch, tmp_path
) -> None:
    def begun() -> tuple[Any, TrainingTask[Any]]:
        model = copy.deepcopy(pico_model("bert")).to(device)
        task = task_of(model, targets, monkeypatch)
        return model, replace(task, computing=rounding(model)) if how else task

    found = []
    for stops in (False, True):
        model, task = begun()
        settings = TrainSettings(steps=20, learning_rate=1e-3, checkpoint_every=5, warmup=3, **how)
        folder = tmp_path / str(stops)
        if stops:
            calls = 0
            update = graphs._GraphTrainer.step

            def stop(self, loaded, rate, update=update):
                nonlocal calls
                calls += 1
                if calls == 18:
                    raise KeyboardInterrupt
                update(self, loaded, rate)

            with monkeypatch.context() as patched:
                patched.setattr(graphs._GraphTrainer, "step", stop)
                with pytest.raises(KeyboardInterrupt):
                    train(model, task, settings, folder=folder)
            model, task = begun()
        train(model, task, settings, folder=folder)
        found.append(weights(model))
    for name, weight in found[0].items():
        assert torch.equal(found[1][name], weight), name


@pytest.mark.parametrize("how", [{}, LATE_ROUNDING], ids=["always", "late"])
@pytest.mark.parametrize("device", DEVICES)
def test_rounding_to_int4_happens_inside_each_step(device, how, pico_model, targets, monkeypatch) -> None:
    found = []
    for uses_graphs in (True, False):
        model = copy.deepcopy(pico_model("bert")).to(device)
        task = task_of(model, targets, monkeypatch, graphs=uses_graphs)
        task = replace(task, computing=rounding(model))
        train(model, task, TrainSettings(steps=4, learning_rate=1e-3, dropout=False, **how))
        found.append(weights(model))
    for name, weight in found[1].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-3, atol=2e-4, msg=name)


def test_a_batch_that_does_not_fit_is_processed_in_parts(pico_model, targets, monkeypatch) -> None:
    settings, found = TrainSettings(steps=5, learning_rate=1e-3, dropout=False), []
    for most in (8, 2):
        model = copy.deepcopy(pico_model("bert"))
        task = task_of(model, targets, monkeypatch)
        said = RecordedProgress()

        def loss(model, batch, own=task.losses[0], most=most):
            if len(batch[1]) > most:
                raise torch.OutOfMemoryError
            return own(model, batch)

        train(model, replace(task, losses=(loss,)), settings, progress=said)
        assert len([line for line in said.lines if "does not fit" in line]) == (most < 8)
        found.append(weights(model))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-3, atol=1e-5, msg=name)


def test_a_model_that_can_not_be_captured_is_trained_by_plain_steps(pico_model, targets, monkeypatch) -> None:
    def refuse(_self, _say):
        raise graphs._CaptureFailed("operation not permitted")

    monkeypatch.setattr(graphs._GraphTrainer, "prepare", refuse)
    model = copy.deepcopy(pico_model("bert"))
    said = RecordedProgress()
    result = train(model, task_of(model, targets, monkeypatch), TrainSettings(steps=3), progress=said)
    assert result.steps == 3
    assert len([line for line in said.lines if "operation not permitted" in line]) == 1


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=80),
    batch_size=st.integers(1, 12),
    epoch=st.integers(0, 2),
)
def test_batches_are_full_and_no_text_is_left_out(lengths, batch_size, epoch) -> None:
    if len(lengths) < batch_size:
        return
    order = ByBucket(lengths, batch_size=batch_size)
    numbers = range(epoch * order.per_epoch, (epoch + 1) * order.per_epoch)
    batches = [order.batch(number) for number in numbers]
    assert {len(batch) for batch in batches} == {batch_size}
    assert set(np.concatenate(batches)) == set(range(len(lengths)))
    assert sum(map(len, batches)) - len(lengths) < batch_size
    for number, batch in zip(numbers, batches, strict=True):
        assert max(lengths[text] for text in batch) <= order.width(number)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), most=st.integers(1, 5))
def test_padded_lengths_waste_least(lengths, most) -> None:
    from itertools import combinations

    array = np.array(lengths)

    def padded(widths: Any) -> int:
        return int(np.asarray(widths)[np.searchsorted(widths, array, side="right")].sum())

    found = _padded_lengths(array, most)
    cells = sorted({(length // 8 + 1) * 8 for length in lengths})
    assert len(found) <= most
    if len(cells) <= 9:
        chosen = [[*inner, cells[-1]] for count in range(most) for inner in combinations(cells[:-1], count)]
        assert padded(found) == min(map(padded, chosen))

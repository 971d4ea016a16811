"""Steps of a backbone that is captured, or on a CPU run in the same way, equal plain steps."""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor

import pico
from trundle.data.examples import Example
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.model.encode import fast_forward
from trundle.model.surgery import transformer_of
from trundle.train import captured
from trundle.train.captured import captured_backbone
from trundle.train.loop import TrainSettings, train
from weight_difference import weight_difference, weights_of

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
EXAMPLES = [Example(query=text, positive=text[::-1] * 3, negatives=(f"{text} not",)) for text in pico.TEXTS]


def task_of(model: Any) -> Any:
    options = ContrastOptions(batch_size=4, mini_batch=3)
    return make_contrast_task(model, EXAMPLES, (), options, prompts={"": Prompts()}, captured=True)


def gradients(model: Any, task: Any, *, batches: int = 2) -> dict[str, Tensor]:
    """The gradients of two batches, with the same dropout at each call."""
    model.zero_grad()
    torch.manual_seed(1)
    for number in range(batches):
        batch = send_to_device(task.batches.load(np.arange(number, number + 4)), model.device)
        task.losses[0](model, batch).backward()
    return {
        name: weight.grad.cpu().clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "llama", "gpt2"])
def test_a_captured_backbone_has_the_plain_gradients(
    family: str, keep: bool, device: str, pico_model: Any
) -> None:
    model = copy.deepcopy(pico_model(family)).to(device).eval()
    task, said = task_of(model), list[str]()
    with fast_forward(model):
        plain = gradients(model, task)
        with captured_backbone(transformer_of(model).model, longest=64, say=said.append, keep=keep):
            found = [gradients(model, task) for _ in range(2)]
        found.append(gradients(model, task))
    assert not said
    for one in found:
        assert one.keys() == plain.keys()
        for name, gradient in plain.items():
            torch.testing.assert_close(one[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_captured_backbone_draws_the_same_dropout_in_both_passes(
    keep: bool, device: str, pico_model: Any
) -> None:
    """A step along the gradient changes the loss by its squared length if both have the same dropout."""
    model = copy.deepcopy(pico_model("gpt2")).to(device).double().train()
    task = task_of(model)
    batch = send_to_device(task.batches.load(np.arange(4)), model.device)

    def loss() -> Tensor:
        torch.manual_seed(1)
        found: Tensor = task.losses[0](model, batch)
        return found

    with captured_backbone(transformer_of(model).model, longest=64, say=pytest.fail, keep=keep):
        loss().backward()
        slopes = {weight: weight.grad.clone() for weight in model.parameters() if weight.grad is not None}
        length = sum(float((slope**2).sum()) for slope in slopes.values())
        ends = []
        for way in (1, -1):
            with torch.no_grad():
                for weight, slope in slopes.items():
                    weight += way * 0.01 / length * slope
            ends.append(loss().item())
            with torch.no_grad():
                for weight, slope in slopes.items():
                    weight -= way * 0.01 / length * slope
    assert ends[0] - ends[1] == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_learn_the_same(device: str, pico_model: Any) -> None:
    found = []
    for captures in (False, True):
        student = copy.deepcopy(pico_model("llama")).to(device)
        adapted, task = _add_adapters(student, rank=2, dropout=0.0, seed=0), task_of(student)
        settings = TrainSettings(steps=6, learning_rate=0.01, dropout=False)
        if captures:
            with captured_backbone(transformer_of(student).model, longest=64, say=pytest.fail):
                train(student, task, settings)
        else:
            train(student, task, settings)
        found.append(weights_of(adapted.merge().cpu()))
    assert weight_difference(*found, share=0.99) < 2e-4
    assert weight_difference(found[0], weights_of(pico_model("llama")), share=0.99) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_without_memory_the_backward_pass_recomputes(
    device: str, pico_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it runs out when a batch is in flight already."""
    model = copy.deepcopy(pico_model("bert")).to(device).eval()
    task, slots = task_of(model), list[bool]()
    plain = gradients(model, task)
    left = iter([True, False])
    monkeypatch.setattr(captured, "_has_memory", lambda _: next(left))
    run = captured._Replayed.apply
    monkeypatch.setattr(
        captured._Replayed, "apply", lambda *given: slots.append(given[2].slot is not None) or run(*given)
    )
    with captured_backbone(transformer_of(model).model, longest=64, say=pytest.fail):
        found = gradients(model, task)
    assert slots[0]
    assert not any(slots[1:])
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_without_a_backward_pass_leaves_its_slot(device: str, pico_model: Any) -> None:
    model = copy.deepcopy(pico_model("bert")).to(device).eval()
    task = task_of(model)
    batch = send_to_device(task.batches.load(np.arange(4)), model.device)
    with captured_backbone(transformer_of(model).model, longest=64, say=pytest.fail):
        backbone: Any = transformer_of(model).model.forward
        task.losses[0](model, batch).backward()
        slots = len(backbone._slots)
        for _ in range(3):
            task.losses[0](model, batch)
        assert len(backbone._slots) == slots > 1


def test_more_batches_in_flight_than_slots_are_recomputed(
    pico_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(pico_model("bert")).eval()
    task = task_of(model)
    plain = gradients(model, task)
    monkeypatch.setattr(captured, "_SLOTS", 1)
    with captured_backbone(transformer_of(model).model, longest=64, say=pytest.fail):
        found = gradients(model, task)
        kept = {
            passes.slot is not None
            for passes in cast("Any", transformer_of(model).model.forward)._passes.values()
        }
    assert kept == {True, False}
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_a_second_backward_pass_of_a_captured_batch_is_an_error(pico_model: Any) -> None:
    model = copy.deepcopy(pico_model("bert")).eval()
    task = task_of(model)
    with captured_backbone(transformer_of(model).model, longest=64, say=pytest.fail):
        loss = task.losses[0](model, task.batches.load(np.arange(4)))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one backward pass only"):
            loss.backward()


@pytest.mark.parametrize("error", [captured._CaptureFailed("no"), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("before", [0, 2])
def test_a_failed_capture_is_said_once_and_changes_no_gradient(
    error: Exception, before: int, pico_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was captured before it: the first shape of a step may fit, and the second one not."""
    calls = itertools.count()

    def fail(run: Any, *_words: Any, **_more: Any) -> Any:
        if next(calls) >= before:
            raise error
        return run

    model = copy.deepcopy(pico_model("bert")).eval()
    task, said = task_of(model), list[str]()
    plain = gradients(model, task)
    monkeypatch.setattr(captured, "_capture", fail)
    with captured_backbone(transformer_of(model).model, longest=64, say=said.append):
        found = gradients(model, task)
    assert [line.partition(":")[0] for line in said] == [
        "steps can't be captured as CUDA graphs, so they are slower"
    ]
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_batches_are_padded_to_few_sizes() -> None:
    found = [captured._padded(size) for size in range(1, 513)]
    assert all(0 <= padded - size < max(16, size / 2) for size, padded in enumerate(found, start=1))
    assert len(set(found)) <= 12

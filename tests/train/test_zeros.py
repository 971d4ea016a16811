"""Pruned weights stay zero, whatever method trains the model afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sentence_transformers import SentenceTransformer

import pico
from trundle.data.examples import Example
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.model.heads import copy_of
from trundle.model.matrices import block_weights
from trundle.model.surgery import transformer_of
from trundle.train.blocks import _count_zeros, zeros_kept
from trundle.train.loop import TrainSettings, train

EXAMPLES = [Example(query=text, positive=text[::-1]) for text in pico.TEXTS]


def pruned(model: SentenceTransformer) -> SentenceTransformer:
    small = copy_of(model).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in block_weights(small):
            weight.masked_fill_(torch.rand(weight.shape, generator=rng) < 0.5, 0.0)
    return small


def masks(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: weight.detach() == 0 for name, weight in block_weights(model)}


def learn(model: SentenceTransformer, *, steps: int = 4) -> None:
    task = make_contrast_task(model, EXAMPLES, (), ContrastOptions(batch_size=7), prompts={"": Prompts()})
    train(model, task, TrainSettings(steps=steps, learning_rate=0.01, weight_decay=0.1))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_zeros_stay_and_other_weights_train(
    family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    model = pruned(pico_model(family))
    before, old = masks(model), {name: weight.detach().clone() for name, weight in block_weights(model)}
    with zeros_kept(model):
        learn(model)
    for name, weight in block_weights(model):
        assert torch.equal(weight.detach() == 0, before[name]), name
        assert (weight.detach() != old[name]).any(), name
    assert _count_zeros(model) == sum(int(mask.sum()) for mask in before.values())


def test_zeros_are_trained_without_keep_zeros(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pruned(pico_model("bert"))
    zeros = _count_zeros(model)
    learn(model, steps=1)
    assert _count_zeros(model) < zeros / 100  # a gradient may round to nothing here or there


def with_few_zeros(model: SentenceTransformer) -> SentenceTransformer:
    """As rounding leaves them: one row in ten."""
    rounded = copy_of(model).eval()
    with torch.no_grad():
        for _, weight in block_weights(rounded):
            weight[::10] = 0.0
    return rounded


def test_a_few_zeros_do_not_count_as_pruning_by_default(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    for wanted, left in ((None, False), (True, True)):
        model = with_few_zeros(pico_model("bert"))
        zeros = _count_zeros(model)
        with zeros_kept(model, wanted):
            learn(model, steps=1)
        assert (_count_zeros(model) == zeros) is left


def test_lora_masks_nothing_with_a_few_zeros(pico_model: Callable[[str], SentenceTransformer]) -> None:
    few, many = with_few_zeros(pico_model("bert")), pruned(pico_model("bert"))
    assert _add_adapters(copy_of(few), rank=2, seed=0, keep_zeros=True).after_merge
    assert not _add_adapters(few, rank=2, seed=0).after_merge
    assert _add_adapters(many, rank=2, seed=0).after_merge


def test_zeros_have_no_momentum(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pruned(pico_model("bert"))
    gone = masks(model)
    task = make_contrast_task(model, EXAMPLES, (), ContrastOptions(batch_size=7), prompts={"": Prompts()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with zeros_kept(model):
        for number in range(3):
            task.losses[0](model, task.batches.load(task.batches.order.batch(number))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in block_weights(model):
        state = optimizer.state[weight]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert (state[moment][gone[name]] == 0).all()
            assert (state[moment][~gone[name]] != 0).any()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_lora_keeps_zeros_and_trains_the_merged_weights(
    family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    model = pruned(pico_model(family))
    before = masks(model)
    hooks = [len(module._forward_hooks) for module in transformer_of(model).model.modules()]
    adapted = _add_adapters(model, rank=2, seed=0)
    learn(model)
    model.eval()
    while_training = model.encode(pico.TEXTS)
    plain = adapted.merge()
    for name, mask in masks(plain).items():
        assert torch.equal(mask, before[name]), name
    torch.testing.assert_close(
        torch.tensor(plain.encode(pico.TEXTS)), torch.tensor(while_training), atol=1e-5, rtol=1e-4
    )
    assert [len(module._forward_hooks) for module in transformer_of(plain).model.modules()] == hooks


def test_lora_can_train_zeros(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pruned(pico_model("bert"))
    zeros = _count_zeros(model)
    adapted = _add_adapters(model, rank=2, seed=0, keep_zeros=False)
    learn(model)
    assert _count_zeros(adapted.merge()) < zeros / 100

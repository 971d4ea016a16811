"""Batches of tuples, gradient caching and adapters against plain torch and sentence-transformers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn

import pico
from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import _make_tuple_loader, make_contrast_task, relate
from trundle.methods.training import Prompts
from trundle.model.heads import prompt_tokens
from trundle.model.layout import layout_of
from trundle.model.surgery import transformer_of
from trundle.train.blocks import changed_blocks
from trundle.train.loop import TrainingTask, TrainSettings, train

PicoModel = Callable[[str], SentenceTransformer]
WORDS = sorted(set(" ".join(pico.TEXTS).split()))
PLAIN = {"a": Prompts(), "b": Prompts()}


def some_examples(count: int, negatives: int = 1, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(3, 14)))

    return [
        Example(
            query=text(),
            positive=text(),
            negatives=tuple(text() for _ in range(negatives)),
            source="ab"[i % 2],
        )
        for i in range(count)
    ]


def contrast(model: SentenceTransformer, examples: list[Example], **more: Any) -> TrainingTask[Any]:
    options = ContrastOptions(**{"batch_size": 8} | more)
    return make_contrast_task(model, examples, [], options, prompts=PLAIN, seed=1)


def without_caching(task: TrainingTask[Any]) -> TrainingTask[Any]:
    return replace(task, losses=[replace(task.losses[0], cached=False)])


def gradients(model: SentenceTransformer, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(5)
    found = loss()
    found.backward()  # type: ignore[no-untyped-call]
    return found.detach(), {
        name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
    }


def alike(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, slope in one[1].items():
        near = 1e-6 + 1e-5 * float(slope.abs().max())
        torch.testing.assert_close(slope, other[1][name], rtol=1e-4, atol=near)


def count_saved(loss: Callable[[], Tensor]) -> int:
    """Numbers autograd keeps for the backward pass."""
    sizes = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(sizes)


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("negatives", [0, 2])
def test_gradients_are_those_of_the_library_cached_or_not(pico_model: PicoModel, family: str, negatives: int):
    model, examples = copy.deepcopy(pico_model(family, 2)).eval(), some_examples(8, negatives)
    examples = [
        Example(query=e.query, positive=e.positive, negatives=e.negatives, source="a") for e in examples
    ]
    columns = [[e.query for e in examples], [e.positive for e in examples]]
    columns += [[e.negatives[number] for e in examples] for number in range(negatives)]
    features = [dict(model.preprocess(column)) for column in columns]
    for loss in (
        MultipleNegativesRankingLoss(model),
        CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
    ):
        expected = gradients(model, lambda loss=loss: loss([dict(part) for part in features], None))
        for mini_batch in (None, 3):
            task = contrast(model, examples, mini_batch=mini_batch)
            batch = task.batches.load(np.arange(8))
            alike(gradients(model, lambda task=task, batch=batch: task.losses[0](model, batch)), expected)


@pytest.mark.parametrize("objective", ["infonce", "angle", "cosine"])
def test_caching_changes_no_gradient_even_with_dropout_and_checkpointing(
    pico_model: PicoModel, objective: Any
):
    model, examples = copy.deepcopy(pico_model("gpt2", 2)).train(), some_examples(12, 1)
    task = contrast(model, examples, objective=objective, mini_batch=4)
    # the same chunks, kept in memory: dropout draws the same numbers
    kept = without_caching(task)
    batch = task.batches.load(np.asarray([0, 2, 4, 6, 8, 10]))
    plain = gradients(model, lambda: kept.losses[0](model, batch))
    alike(gradients(model, lambda: task.losses[0](model, batch)), plain)
    with changed_blocks(transformer_of(model).model, recomputed=True):
        alike(gradients(model, lambda: task.losses[0](model, batch)), plain)
        alike(gradients(model, lambda: kept.losses[0](model, batch)), plain)
    alike(gradients(model, lambda: task.losses[0](model, batch)), plain)


@pytest.mark.parametrize("lora", [False, True])
def test_caching_changes_no_gradient_in_half_precision(pico_model: PicoModel, lora: bool):
    model, examples = copy.deepcopy(pico_model("llama", 1)), some_examples(6, 1)
    if lora:
        _add_adapters(model, rank=4, seed=3)
    task = contrast(model, examples, mini_batch=2)
    kept = without_caching(task)
    batch = task.batches.load(np.asarray([0, 2, 4]))

    def loss(way: TrainingTask[Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return way.losses[0](model, batch)

    plain, cached = gradients(model, lambda: loss(kept)), gradients(model, lambda: loss(task))
    assert plain[0] == cached[0]
    assert plain[1].keys() == cached[1].keys()
    for name, slope in plain[1].items():
        torch.testing.assert_close(cached[1][name], slope, rtol=0.02, atol=0.02 * float(slope.abs().max()))


@pytest.mark.parametrize("family", pico.LAYOUTS)
def test_recomputed_blocks_keep_little_and_change_no_gradient(pico_model: PicoModel, family: str):
    model, examples = copy.deepcopy(pico_model(family, 2)), some_examples(12, 1)
    task = contrast(model, examples)
    batch = task.batches.load(np.asarray([0, 2, 4, 6, 8, 10]))
    plain, saved = (
        gradients(model, lambda: task.losses[0](model, batch)),
        count_saved(lambda: task.losses[0](model, batch)),
    )
    with changed_blocks(transformer_of(model).model, recomputed=True):
        alike(gradients(model, lambda: task.losses[0](model, batch)), plain)
        assert count_saved(lambda: task.losses[0](model, batch)) < 0.4 * saved
    assert count_saved(lambda: task.losses[0](model, batch)) == saved


def test_a_cached_step_keeps_one_chunk_in_memory(pico_model: PicoModel):
    model, examples = copy.deepcopy(pico_model("bert")), some_examples(64, 0)

    def saved(mini_batch: int | None) -> int:
        task = contrast(model, examples, mini_batch=mini_batch, batch_size=32)
        batch = task.batches.load(np.arange(0, 64, 2))
        return count_saved(lambda: task.losses[0](model, batch))

    assert saved(4) < 0.1 * saved(None)


def test_texts_are_encoded_once_and_positives_are_no_negatives():
    examples = [
        Example(query="q1", positive="p1", negatives=("n1", "p2")),
        Example(query="q2", positive="p1"),
        Example(query="q1", positive="p2", negatives=("n1", "q1", "n3")),
    ]
    found = relate(examples)
    assert found.queries == ("q1", "q2")
    assert found.documents == ("p1", "p2", "n1", "q1", "n3")
    assert found.query_of.tolist() == [0, 1, 0]
    assert found.answers.tolist() == [0, 0, 1]
    # q1 is answered by p1 and p2, and its own text says nothing about it
    assert found.excluded.tolist() == [
        [False, True, False, True, False],
        [False, False, False, False, False],
        [True, False, False, True, False],
    ]
    # q2 came without a negative and gets one of the others; p2 is no negative of q1, whatever the first row
    # says
    assert sorted(found.wrong) == [(0, 2), (1, 2), (2, 2), (2, 4)]
    assert relate(examples, negatives=0).documents == ("p1", "p2")


def test_a_single_pair_has_no_negatives():
    found = relate([Example(query="q", positive="p")])
    assert found.wrong == ()


@pytest.mark.parametrize("pooling", ["weightedmean", "lasttoken"])
def test_prompts_are_read_and_pooled_as_the_model_does_itself(tmp_path: Path, pooling: Any):
    model = pico.model("llama", str(tmp_path))
    model[1].include_prompt, model[1].pooling_mode = False, pooling
    examples = [Example(query=text, positive=text[::-1], source="a") for text in pico.TEXTS]
    prompts = Prompts(query="ask the index about this:\n", document="a short document:\n")
    load = _make_tuple_loader(model, examples, {"a": prompts}, chunk=3)
    batch = load(np.arange(len(examples)))
    task = contrast(model, examples)
    with torch.no_grad():
        queries, documents = (task.losses[0]._encode(model, of) for of in (batch.queries, batch.documents))
    expected = model.encode([e.query for e in examples], prompt=prompts.query, convert_to_tensor=True)
    torch.testing.assert_close(queries, expected)
    expected = model.encode([e.positive for e in examples], prompt=prompts.document, convert_to_tensor=True)
    torch.testing.assert_close(documents, expected)


@pytest.mark.parametrize(
    ("family", "prompt"), [("llama", "question: "), ("llama", "question:\n"), ("bert", "ask ")]
)
def test_the_first_word_after_a_prompt_is_pooled(pico_model: PicoModel, family: str, prompt: str):
    """A byte-level tokenizer joins a space at the end of the prompt with the word that follows."""
    model = pico_model(family)
    tokens = model.tokenizer(f"{prompt}fox")["input_ids"]
    own = tokens[prompt_tokens(model, prompt) :]
    assert model.tokenizer.decode(own, skip_special_tokens=True).strip() == "fox"


def test_a_text_truncated_to_its_prompt_is_named(tmp_path: Path):
    model = pico.model("llama", str(tmp_path))
    model[1].include_prompt, model.max_seq_length = False, 8
    long = Prompts(query="a prompt that is so long that nothing else fits into eight tokens")
    load = _make_tuple_loader(model, some_examples(4), {"a": long, "b": long}, chunk=3)
    with pytest.raises(BadInput, match="has no tokens to pool after its prompt"):
        load(np.arange(2))


def test_one_tuple_is_rejected(pico_model: PicoModel):
    with pytest.raises(BadInput, match="1 labelled tuple is too few"):
        contrast(pico_model("bert"), some_examples(1))


def test_texts_longer_than_the_models_limit_are_truncated(pico_model: PicoModel):
    examples = [
        Example(query=f"{text} {' '.join(WORDS * 5)}", positive=text, source="a") for text in pico.TEXTS
    ]
    batch = contrast(pico_model("gpt2"), examples).batches.load(np.arange(4))
    assert batch.queries.features[0]["input_ids"].shape == (4, 48)


@pytest.mark.parametrize("family", ["bert", "modernbert", "phi3", "gpt2"])
def test_adapters_are_on_every_linear_layer_and_are_removed_after_merging(pico_model: PicoModel, family: str):
    model = copy.deepcopy(pico_model(family))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    vectors = model.encode(pico.TEXTS)
    adapted = _add_adapters(model, rank=4, seed=3)
    np.testing.assert_array_equal(model.encode(pico.TEXTS), vectors)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    per_layer = {"bert": 6, "modernbert": 4, "phi3": 4, "gpt2": 4}[family]
    assert len(trained) == 2 * per_layer * pico.LAYERS
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in trained:
                weight.normal_(std=0.1, generator=rng)
    moved = model.eval().encode(pico.TEXTS)
    assert np.abs(moved - vectors).max() > 0.01
    merged = adapted.merge()
    np.testing.assert_allclose(merged.encode(pico.TEXTS), moved, atol=1e-5)
    assert dict(merged.named_parameters()).keys() == before.keys()
    layout_of(transformer_of(merged).model)
    assert all(weight.requires_grad for weight in merged.parameters())


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_ends_with_the_same_bits(pico_model: PicoModel, tmp_path: Path, lora: bool):
    settings = TrainSettings(steps=5, learning_rate=1e-3, checkpoint_every=2)

    def run(name: str, stop_at: int | None = None) -> dict[str, Tensor]:
        model = copy.deepcopy(pico_model("bert", 1))
        adapted = _add_adapters(model, rank=4, dropout=0.2, seed=1) if lora else None
        task = contrast(model, some_examples(40), mini_batch=4)

        steps = itertools.count(1)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            if next(steps) == stop_at:
                raise KeyboardInterrupt
            return task.losses[0](model, batch)

        train(model, replace(task, losses=[loss]), settings, folder=tmp_path / name)
        return {
            name: weight.detach()
            for name, weight in (adapted.merge() if adapted else model).named_parameters()
        }

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("broken", stop_at=4)
    resumed = run("broken")
    assert all(torch.equal(weight, resumed[name]) for name, weight in straight.items())
    untouched = dict(pico_model("bert", 1).named_parameters())
    assert any(not torch.equal(weight, untouched[name]) for name, weight in straight.items())

"""A batch that does not fit is processed in parts, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

import pico
from trundle.methods.align.leaf import _make_loss, _make_splitter
from trundle.methods.align.resident import Batch
from trundle.model.tokens import make_tokeniser
from trundle.train.batches import Batches, BatchSplitter, ByLength, Indices
from trundle.train.loop import TrainingTask, TrainSettings, train
from weight_difference import weight_difference, weights_of

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 46.00 MiB")
TEXTS = [" ".join(pico.TEXTS[number % 3].split()[: 1 + number % 7]) for number in range(24)]


def numbers(say: Callable[[str], None] = lambda _: None) -> BatchSplitter[list[int]]:
    return BatchSplitter(
        texts=len, size=sum, halves=lambda one: (one[: len(one) // 2], one[len(one) // 2 :]), say=say
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 60))
def test_parts_cover_the_batch_and_fit(batch: list[int], room: int) -> None:
    divider = numbers()
    divider.limit = room
    parts = divider.parts(batch)
    assert [number for part, _ in parts for number in part] == batch
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert all(sum(part) <= room or len(part) == 1 for part, _ in parts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_the_limit_shrinks_until_each_text_is_alone(batch: list[int]) -> None:
    told: list[str] = []
    divider = numbers(told.append)
    seen = [len(divider.parts(batch))]
    while divider.lower_limit(batch):
        seen.append(len(divider.parts(batch)))
    assert seen == sorted(set(seen))
    assert max(divider.parts(batch), key=lambda part: sum(part[0]))[0] in [[number] for number in batch]
    assert len(told) == (len(batch) > 1)


def trained(
    student: SentenceTransformer, teacher: SentenceTransformer, most: float, told: list[str]
) -> float:
    """Three steps of eight texts in a memory that has room for so many tokens."""
    vectors, tokenise = torch.from_numpy(teacher.encode(TEXTS)), make_tokeniser(student)

    def load(positions: Indices) -> Batch:
        return tokenise([TEXTS[number] for number in positions]), vectors[positions]

    order = ByLength([len(text) for text in TEXTS], batch_size=8)
    batches = Batches(order=order, load=load, splitter=_make_splitter(told.append))
    leaf = _make_loss()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if batch[0]["input_ids"].numel() > most:
            raise FULL
        return leaf(model, batch)

    settings = TrainSettings(steps=3, learning_rate=1e-3, dropout=False)
    return train(student, TrainingTask(losses=[loss], batches=batches), settings).loss


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert", "llama", "gpt2"])
def test_training_in_parts_leads_to_the_same_weights(
    family: str, pico_folders: Callable[[str], Path], pico_model: Callable[[str], SentenceTransformer]
) -> None:
    teacher, told = pico_model(family), []
    found = []
    for most in (float("inf"), 24):
        torch.manual_seed(0)
        student = SentenceTransformer(str(pico_folders(family)), device="cpu")
        with torch.no_grad():
            for weight in student.parameters():
                weight += 0.02 * torch.randn_like(weight)
        loss = trained(student, teacher, most, told)
        found.append((loss, weights_of(student)))
    (whole, one), (parts, other) = found
    assert parts == pytest.approx(whole, rel=1e-4)
    assert weight_difference(one, other, share=0.99) < 1e-5
    assert len(told) == 1


def test_a_single_text_that_does_not_fit_is_an_error(
    pico_folders: Callable[[str], Path], pico_model: Callable[[str], SentenceTransformer]
) -> None:
    student = SentenceTransformer(str(pico_folders("bert")), device="cpu")
    with pytest.raises(torch.OutOfMemoryError):
        trained(student, pico_model("bert"), 1, [])


def test_packed_tokens_cant_be_split() -> None:
    flat = {"input_ids": torch.arange(9), "offsets": torch.tensor([0, 4])}
    divider = _make_splitter(lambda _: None)
    assert not divider.lower_limit((flat, torch.zeros(2, 3)))

"""Compiled blocks learn what plain ones learn, and leave nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from sentence_transformers import SentenceTransformer

import pico
from apart import apart, weights_of
from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.model.heads import copy_of
from trundle.model.surgery import transformer_of
from trundle.train.blocks import compiled_blocks
from trundle.train.loop import TrainSettings, train

EXAMPLES = [Example(query=text, positive=text[::-1]) for text in pico.TEXTS]


def learned(model: SentenceTransformer, *, compiled: bool) -> SentenceTransformer:
    student = copy_of(model)
    adapted = _add_adapters(student, rank=2, dropout=0.0, seed=0)
    task = make_contrast_task(student, EXAMPLES, (), ContrastOptions(batch_size=4), prompts={"": Prompts()})
    settings = TrainSettings(steps=6, learning_rate=0.01, dropout=False)
    if compiled:
        with compiled_blocks(transformer_of(student).model):
            train(student, task, settings)
    else:
        train(student, task, settings)
    return adapted.merge()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on a CPU needs g++")
def test_a_compiled_model_learns_the_same(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("llama")
    plain, compiled = learned(model, compiled=False), learned(model, compiled=True)
    assert apart(weights_of(plain), weights_of(compiled), share=0.99) < 2e-4
    assert apart(weights_of(plain), weights_of(model), share=0.99) > 1e-3, "it has learned something"
    assert all(getattr(part, "_compiled_call_impl", None) is None for part in compiled.modules())


def test_without_a_compiler_it_is_said_at_once(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with (
        pytest.raises(BadInput, match=r"compile needs a C compiler.*leave compile out"),
        compiled_blocks(transformer_of(pico_model("bert")).model),
    ):
        raise AssertionError("it was let in")

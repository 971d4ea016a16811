"""Compiled blocks train like plain ones, and leave nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

import pico
from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.align import AlignOptions, align
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.model.heads import copy_of
from trundle.model.surgery import transformer_of
from trundle.train import blocks
from trundle.train.blocks import compiled_blocks, recomputed_blocks
from trundle.train.loop import TrainSettings, train
from weight_difference import weight_difference, weights_of

EXAMPLES = [Example(query=text, positive=text[::-1]) for text in pico.TEXTS]


def learned(model: SentenceTransformer, *ways: Callable[[Any], Any]) -> SentenceTransformer:
    student = copy_of(model)
    adapted = _add_adapters(student, rank=2, dropout=0.0, seed=0)
    task = make_contrast_task(student, EXAMPLES, (), ContrastOptions(batch_size=4), prompts={"": Prompts()})
    settings = TrainSettings(steps=6, learning_rate=0.01, dropout=False)
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way(transformer_of(student).model))
        train(student, task, settings)
    return adapted.merge()


@pytest.mark.filterwarnings("ignore")  # torch's compiler emits its own warnings
@pytest.mark.parametrize("ways", [(compiled_blocks,), (recomputed_blocks, compiled_blocks)])
def test_a_compiled_model_learns_the_same(
    ways: tuple[Any, ...], pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's tracer and autograd, but without its code generator, which takes a minute."""
    compiled_parts: list[nn.Module] = []
    traced: list[torch.fx.GraphModule] = []

    def compile_eagerly(block: nn.Module, **options: Any) -> None:
        def run(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
            traced.append(graph)
            return graph.forward

        compiled_parts.append(block)
        compile_module(block, backend=run, **options)

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    model = pico_model("llama", 2)
    plain, compiled = learned(model), learned(model, *ways)
    assert weight_difference(weights_of(plain), weights_of(compiled), share=0.99) < 2e-4
    assert weight_difference(weights_of(plain), weights_of(model), share=0.99) > 1e-3, (
        "it has learned something"
    )
    assert len(compiled_parts) == 2
    assert traced
    assert all(getattr(part, "_compiled_call_impl", None) is None for part in compiled.modules())


def test_a_missing_compiler_is_reported_at_once(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with (
        pytest.raises(BadInput, match=r"compile needs a C compiler.*leave compile out"),
        compiled_blocks(transformer_of(pico_model("bert")).model),
    ):
        raise AssertionError("it was let in")


def test_blocks_are_compiled_ahead_in_another_process(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other process runs blocks of this shape; here without torch's code generator."""
    backbone = transformer_of(pico_model("mpnet")).model
    code = (
        "import sys; from torch import nn; from trundle.train import blocks\n"
        "compiled, compile = [], nn.Module.compile\n"
        "def eagerly(block, **_):\n"
        "    compiled.append(block)\n"
        "    compile(block, backend='eager')\n"
        "nn.Module.compile = eagerly\n"
        "blocks.check_compiler, blocks._COMPILED_BATCHES = lambda: None, ((2, 8),)\n"
        "blocks._compile()\n"
        f"open({str(tmp_path / 'compiled')!r}, 'w').write(str(len(compiled)))"
    )
    monkeypatch.setattr(blocks, "_COMPILER", code)
    with blocks.compiling_ahead(backbone, dropout=False, bf16=False) as wait:
        wait()
    assert (tmp_path / "compiled").read_text() == str(backbone.config.num_hidden_layers)


def test_a_process_that_compiles_may_fail(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_COMPILER", "raise SystemExit(1)")
    backbone = transformer_of(pico_model("bert")).model
    with blocks.compiling_ahead(backbone, dropout=False, bf16=False) as wait:
        wait()


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"minutes": 10}, True),
        ({"minutes": 1}, False),
        ({"minutes": 10, "compile": False}, False),
        ({"steps": 0, "compile": True}, False),
        ({"steps": 9, "compile": True}, True),
    ],
)
def test_long_runs_on_a_gpu_compile_ahead(
    settings: dict[str, Any],
    ahead: bool,
    pico_model: Callable[[str], SentenceTransformer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(align, "can_compile", lambda: True)
    monkeypatch.setattr(align, "compiling_ahead", lambda backbone, **_: started.append(backbone))
    align._compiling_ahead(pico_model("bert"), AlignOptions.model_validate({"teacher": "x", **settings}))
    assert bool(started) is ahead

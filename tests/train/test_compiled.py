"""Compiled blocks train like plain ones, and leave nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

import pico
from trundle.data.corpus import read_corpus
from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods import METHODS
from trundle.methods.align import AlignOptions, align
from trundle.methods.contract import Context
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.model.heads import copy_of
from trundle.model.surgery import transformer_of
from trundle.recipe import make_options
from trundle.train import blocks
from trundle.train.blocks import changed_blocks
from trundle.train.loop import TrainSettings, train
from weight_difference import weight_difference, weights_of

EXAMPLES = [Example(query=text, positive=text[::-1]) for text in pico.TEXTS]


def learned(model: SentenceTransformer, **ways: bool) -> SentenceTransformer:
    student = copy_of(model)
    adapted = _add_adapters(student, rank=2, dropout=0.0, seed=0)
    task = make_contrast_task(student, EXAMPLES, (), ContrastOptions(batch_size=4), prompts={"": Prompts()})
    settings = TrainSettings(steps=6, learning_rate=0.01, dropout=False)
    with changed_blocks(transformer_of(student).model, **ways):
        train(student, task, settings)
    return adapted.merge()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.fx.GraphModule, set[int]]]:
    """Compiles with torch's tracer and autograd, but without its code generator, which takes a minute.

    Returns the graphs, and the lengths of the vectors among their inputs.
    """
    found: list[tuple[torch.fx.GraphModule, set[int]]] = []

    def compile_eagerly(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            vectors = (one for one in inputs if isinstance(one, torch.Tensor) and one.dim() == 1)
            found.append((graph, {len(vector) for vector in vectors}))
            return graph.forward

        return compile_forward(forward, backend=run, **options)

    compile_forward: Callable[..., Any] = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return found


def check_learned_the_same(
    model: SentenceTransformer, plain: SentenceTransformer, compiled: SentenceTransformer
) -> None:
    assert weight_difference(weights_of(plain), weights_of(compiled), share=0.99) < 2e-4
    assert weight_difference(weights_of(plain), weights_of(model), share=0.99) > 1e-3, (
        "it has learned something"
    )
    assert not any("forward" in vars(part) for part in compiled.modules())


@pytest.mark.filterwarnings("ignore")  # torch's compiler emits its own warnings
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_compiled_model_learns_the_same(
    recomputed: bool, pico_model: Callable[[str], SentenceTransformer], traced: list[torch.fx.GraphModule]
) -> None:
    model = pico_model("llama", 2)
    check_learned_the_same(model, learned(model), learned(model, compiled=True, recomputed=recomputed))
    assert traced
    targets = [str(node.target) for graph, _ in traced for node in graph.graph.nodes]
    assert not any("checkpoint" in target for target in targets), "torch 2.11 fails on it on a GPU"


@pytest.mark.filterwarnings("ignore")
def test_compiled_sizes_learn_the_same(
    pico_model: Callable[[str], SentenceTransformer],
    traced: list[tuple[torch.fx.GraphModule, set[int]]],
    tmp_path: Path,
) -> None:
    """The blocks of each size are compiled as well."""
    rows = [{"query": example.query, "positive": example.positive} for example in EXAMPLES]
    file = tmp_path / "tuples.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model, width = pico_model("llama", 2), METHODS["width"]
    trained = []
    for compiles in (False, True):
        given = {"widths": "1/2", "steps": 6, "batch_size": 4, "learning_rate": 0.01, "compile": compiles}
        context = Context(original=model, corpus=read_corpus([str(file)], seed=0), cache=tmp_path)
        plan = width.plan(model, make_options(width, {"objective": "contrast", **given}), context)
        trained.append(width.apply(model, plan, context).model)
        assert bool(traced) is compiles
    check_learned_the_same(model, *trained)
    hidden = transformer_of(model).model.config.hidden_size
    assert {hidden, hidden // 2} <= set().union(*(lengths for _, lengths in traced))


def test_a_missing_compiler_is_reported_at_once(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with (
        pytest.raises(BadInput, match=r"compile needs a C compiler.*leave compile out"),
        changed_blocks(transformer_of(pico_model("bert")).model, compiled=True),
    ):
        raise AssertionError("it was let in")


def test_blocks_are_compiled_ahead_in_another_process(
    pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other process runs blocks of this shape; here without torch's code generator."""
    backbone = transformer_of(pico_model("mpnet")).model
    code = (
        "import sys, torch; from trundle.train import blocks\n"
        "compiled, compile = [], torch.compile\n"
        "def eagerly(forward, **_):\n"
        "    compiled.append(forward)\n"
        "    return compile(forward, backend='eager')\n"
        "torch.compile = eagerly\n"
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

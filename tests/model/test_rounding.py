"""Rounding to int4: rounded weights stay, and trained weights are written without loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from torch import nn

import pico
from compressing import compress
from trundle.data.corpus import read_corpus
from trundle.errors import BadInput, BadModel
from trundle.export import int8
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions, Limits
from trundle.methods import METHODS
from trundle.model.cost import cost
from trundle.model.heads import with_linear_head
from trundle.model.load import load
from trundle.model.matrices import (
    BLOCK,
    _is_on_grid,
    _rounded,
    computing_on_grid,
    fits_grid,
    grid_weights,
    on_grid,
    put_on_grid,
)
from trundle.recipe import single
from trundle.runtime.encoder import Encoder

onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra export is not installed")

TEXTS = [f"{text} {number}" for number in range(7) for text in pico.TEXTS]
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
WIDE_GPT2 = {"n_embd": 64, "n_layer": 2}


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 3), st.floats(1e-3, 1e3))
@settings(max_examples=60)
def test_rounding_twice_is_rounding_once(seed: int, rows: int, blocks: int, scale: float) -> None:
    matrix = scale * torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    once = _rounded(matrix)
    assert torch.equal(_rounded(once), once)
    _, steps = on_grid(matrix)
    # The end of the other side has no code of its own, so the largest weights there lie up to a whole step
    # away.
    assert ((once - matrix).abs().reshape(rows, blocks, BLOCK) <= 1.01 * steps.abs()).all()


def test_zeros_stay_zero_and_empty_blocks_work() -> None:
    matrix = torch.randn(4, 2 * BLOCK)
    matrix[:, ::3] = 0
    matrix[2] = 0
    assert ((_rounded(matrix) == 0) >= (matrix == 0)).all()
    assert torch.isfinite(_rounded(matrix)).all()


def test_gradients_of_rounded_weights_update_the_exact_ones(tmp_path: Path) -> None:
    model = pico.model("bert", str(tmp_path / "backbone"), **WIDE)
    weights = [weight for weight, _ in grid_weights(model)]
    exact = [weight.detach().clone() for weight in weights]
    features = model.preprocess(pico.TEXTS)
    model.train(False)
    with computing_on_grid(model):
        inside = [weight.detach().clone() for weight in weights]
        model(dict(features))["sentence_embedding"].sum().backward()
    for weight, before, used in zip(weights, exact, inside, strict=True):
        assert torch.equal(weight, before)
        assert not torch.equal(used, before)
        assert weight.grad is not None
    taken = [weight.grad.clone() for weight in weights if weight.grad is not None]
    model.zero_grad()
    with torch.no_grad():
        for weight, used in zip(weights, inside, strict=True):
            weight.copy_(used)
    model(dict(features))["sentence_embedding"].sum().backward()
    for weight, gradient in zip(weights, taken, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, gradient)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_model_trained_with_rounding_is_written_without_loss(family: str, tmp_path: Path) -> None:
    wide = WIDE_GPT2 if family == "gpt2" else WIDE
    pico.model(family, str(tmp_path / "backbone"), **wide).save_pretrained(str(tmp_path / "teacher"))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = {"steps": 3, "batch_size": 8, "learning_rate": 1e-3, "rounding": "int4"}
    options |= {"teacher": str(tmp_path / "teacher")}
    run = compress(
        str(tmp_path / "teacher"),
        single(METHODS["align"], options),
        output=tmp_path / "small",
        corpus=read_corpus([str(tmp_path / "texts.txt")], seed=0),
    )
    small = load(tmp_path / "small")
    held = grid_weights(small)
    assert len(held) > WIDE["num_hidden_layers"]
    for weight, turned in held:
        seen = weight.T if turned else weight
        assert _is_on_grid(seen)
    exported = export_model(
        str(tmp_path / "small"), to="onnx", precision="int4", options=ExportOptions(calibrate=TEXTS)
    )
    ours = Encoder(tmp_path / "small", graph="int4").encode(TEXTS)
    np.testing.assert_allclose(ours, small.encode(TEXTS, batch_size=1), atol=2e-3)
    whole = sum(weight.numel() for weight in nn.ModuleList([small]).parameters())
    assert exported.file_bytes < 4 * whole
    assert run.after.graph_bytes["int4"] < run.after.graph_bytes["int8"]
    assert cost(small).graph_bytes == run.after.graph_bytes


@pytest.mark.parametrize(("family", "outputs"), [("bert", 64), ("gpt2", 96)])
def test_int8_matmuls_equal_those_of_an_int8_file(
    family: str, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored in four bits is rounded to the very int8 matrices that such a file holds."""
    monkeypatch.setattr(int8, "_OUTLIERS", 0)  # only an int8 file has float matmuls of outliers
    model = pico.model(family, str(tmp_path / "backbone"), **(WIDE_GPT2 if family == "gpt2" else WIDE))
    # A head is a product with a bias, which the quantiser turns; as wide as high, only its numbers tell.
    weight = np.random.default_rng(0).normal(size=(outputs, 64)).astype(np.float32)
    model = with_linear_head(model, weight, np.zeros(outputs, dtype=np.float32), normalise=True)
    put_on_grid(grid_weights(model))
    model.save_pretrained(str(tmp_path / "model"))
    anything = Limits(cosine=2.0, agreement=1.0)
    for size in ("int8", "int4+int8"):
        export_model(
            str(tmp_path / "model"),
            to="onnx",
            precision=size,
            options=ExportOptions(calibrate=TEXTS, limits=anything),
        )
    large, small = (
        onnx.load(tmp_path / "model" / "onnx" / name)
        for name in ("model_quantized.onnx", "model_q4_int8.onnx")
    )
    names, large_names = (
        [node.input[1] for node in graph.graph.node if node.op_type == "MatMulInteger"]
        for graph in (small, large)
    )
    assert len(names) > WIDE["num_hidden_layers"]
    whole = {each.name: onnx.numpy_helper.to_array(each) for each in large.graph.initializer}
    stored = {name: whole[other] for name, other in zip(names, large_names, strict=True)}
    held = {each.name for each in small.graph.initializer} & set(names)
    assert all(not fits_grid(*stored[name].T.shape) for name in held)
    opened = sorted(set(names) - held)
    assert opened
    small.graph.output.extend(onnx.ValueInfoProto(name=name) for name in opened)
    session = onnxruntime.InferenceSession(small.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {each.name: np.ones((1, 3), dtype=np.int64) for each in small.graph.input}
    for name, matrix in zip(opened, session.run(opened, given), strict=True):
        np.testing.assert_array_equal(matrix, stored[name])
    ours = Encoder(tmp_path / "model", graph="int4+int8").encode(TEXTS)
    theirs = model.encode(TEXTS, batch_size=1)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    assert ((ours * theirs).sum(axis=1) / lengths).min() > 0.97


def test_a_static_model_trained_with_rounding_is_written_without_loss(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    pico.model("bert", str(tmp_path / "backbone"), **WIDE).save_pretrained(str(folder))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    corpus = read_corpus([str(tmp_path / "texts.txt")], seed=0)
    compress(str(folder), single(METHODS["depth"], {"keep": 0}), output=tmp_path / "static", corpus=corpus)
    options = {"steps": 3, "batch_size": 8, "rounding": "int4", "teacher": str(folder)}
    run = compress(
        str(tmp_path / "static"), single(METHODS["align"], options), output=tmp_path / "out", corpus=corpus
    )
    learned = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    table = learned[0].embedding.weight.detach()
    assert _is_on_grid(table)
    exported = export_model(
        str(tmp_path / "out"), to="onnx", precision="int4", options=ExportOptions(calibrate=TEXTS)
    )
    np.testing.assert_allclose(
        Encoder(tmp_path / "out").encode(TEXTS), learned.encode(TEXTS, batch_size=1), atol=1e-5
    )
    nodes = exported.file_bytes - run.after.graph_bytes["int4"]
    assert 0 < nodes < 4096


def test_a_model_trained_without_rounding_is_rejected_and_told_how_to_fix_it(tmp_path: Path) -> None:
    pico.model("bert", str(tmp_path / "backbone"), **WIDE).save_pretrained(str(tmp_path / "model"))
    with pytest.raises(BadModel, match="--rounding int4"):
        export_model(
            str(tmp_path / "model"),
            to="onnx",
            precision="int4",
            options=ExportOptions(calibrate=TEXTS, limits=Limits(cosine=1e-6, agreement=0.0)),
        )
    assert not (tmp_path / "model" / "onnx").exists()
    with pytest.raises(BadInput, match="use --to onnx"):
        export_model(
            str(tmp_path / "model"), to="openvino", precision="int4", options=ExportOptions(calibrate=TEXTS)
        )


@pytest.mark.parametrize(
    "how", [{"steps": 0}, {"steps": 2, "round_after": 0.5, "learning_rate": 1e-9}], ids=["at once", "late"]
)
def test_rounding_starts_from_fitted_weights(how: dict[str, float], tmp_path: Path) -> None:
    """Without a step that learns, the student is closer to its teacher than its nearest codes are."""
    folder = tmp_path / "teacher"
    pico.model("bert", str(tmp_path / "backbone"), **WIDE).save_pretrained(str(folder))
    texts = pico.different_texts(240)
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    options = {"rounding": "int4", "teacher": str(folder), "start": "keep", **how}
    compress(
        str(folder),
        single(METHODS["align"], options),
        output=tmp_path / "small",
        corpus=read_corpus([str(tmp_path / "texts.txt")], seed=0),
    )
    teacher = load(folder)
    exact, fitted = (each.encode(pico.TEXTS, batch_size=1) for each in (teacher, load(tmp_path / "small")))
    put_on_grid(grid_weights(teacher))
    nearest = teacher.encode(pico.TEXTS, batch_size=1)
    assert np.linalg.norm(fitted - exact) < 0.8 * np.linalg.norm(nearest - exact)

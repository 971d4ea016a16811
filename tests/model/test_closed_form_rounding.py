"""Rounding to int4 without training, for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import pico
from trundle.errors import BadInput
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions, Limits
from trundle.model.heads import copy_of
from trundle.model.matrices import _is_on_grid, grid_weights, put_on_grid
from trundle.model.rounding import _gptq, _nearest, round_to_int4
from trundle.runtime.encoder import Encoder

TEXTS = pico.different_texts(80)
HELD_OUT = pico.different_texts(100)[80:]
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2}
WIDER = {
    "distilbert": {"dim": 64, "hidden_dim": 128, "n_layers": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2},
    "electra": WIDE | {"embedding_size": 96},
    "t5": T5,
    "mt5": T5,
}


def wide(family: str, folder: Path) -> pico.SentenceTransformer:
    torch.manual_seed(0)
    return pico.model(family, str(folder), **WIDER.get(family, WIDE))


@pytest.mark.parametrize("family", pico.LAYOUTS)
def test_every_layout_loses_less_than_by_rounding_to_nearest(family: str, tmp_path: Path) -> None:
    model = wide(family, tmp_path)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    fitted = round_to_int4(model, TEXTS)
    nearest = copy_of(model)
    put_on_grid(grid_weights(nearest))
    exact, close, closer = (each.encode(HELD_OUT, batch_size=1) for each in (model, nearest, fitted))
    assert np.linalg.norm(closer - exact) < 0.8 * np.linalg.norm(close - exact)
    held = grid_weights(fitted)
    assert len(held) > 2 * WIDE["num_hidden_layers"]
    assert all(_is_on_grid(weight.T if transposed else weight) for weight, transposed in held)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_with_uncorrelated_inputs_columns_are_rounded_to_the_nearest_code() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(_gptq(weight, torch.eye(64)), _nearest(weight), rtol=0, atol=0)


def test_inputs_that_are_always_zero_or_always_equal_are_no_problem() -> None:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(200, 16, generator=draw) @ torch.randn(16, 64, generator=draw)
    inputs[:, 3] = 0
    inputs[:, 8:12] = inputs[:, 8:9]
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    for moments in (inputs.T @ inputs, torch.zeros(64, 64)):
        assert torch.isfinite(_gptq(weight, moments)).all()
    error = (_gptq(weight, inputs.T @ inputs) - weight) @ inputs.T
    assert error.norm() < 0.8 * ((_nearest(weight) - weight) @ inputs.T).norm()


def test_too_few_texts_are_rejected_with_the_number_that_is_needed(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"2 texts with \d+ tokens are too few .* calibrate with \d+"):
        round_to_int4(wide("bert", tmp_path), TEXTS[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_rounded_as_float32_and_rounded_models_stay(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    fitted = round_to_int4(wide("bert", tmp_path).to(dtype), TEXTS)
    assert fitted.dtype == torch.float32
    assert round_to_int4(fitted, TEXTS) is fitted
    assert round_to_int4(fitted.to(dtype), TEXTS) is fitted


@pytest.mark.parametrize("precision", ["int4", "int4+int8"])
def test_the_exported_file_holds_the_rounded_weights(precision: str, tmp_path: Path) -> None:
    model = wide("bert", tmp_path / "backbone")
    model.save_pretrained(str(tmp_path / "model"))
    limits = Limits(cosine=1, agreement=1)
    for folder, fit in (("nearest", False), ("fitted", True)):
        options = ExportOptions(calibrate=TEXTS, limits=limits, fit=fit)
        export_model(
            str(tmp_path / "model"), to="onnx", precision=precision, output=tmp_path / folder, options=options
        )
    exact = model.encode(HELD_OUT, batch_size=1)
    close, closer = (Encoder(tmp_path / folder).encode(HELD_OUT) for folder in ("nearest", "fitted"))
    assert np.linalg.norm(closer - exact) < 0.8 * np.linalg.norm(close - exact)
    files = [next((tmp_path / folder / "onnx").iterdir()) for folder in ("nearest", "fitted")]
    assert files[0].stat().st_size == files[1].stat().st_size

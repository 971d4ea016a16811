"""Least-squares reconstruction of removed neurons: the regression, and models in which nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import pico
from trundle.methods.contract import Context
from trundle.methods.weights.weights import _least_squares, _measure_moments, _reconstruct
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import has_bias, prunable, put_map, weight_of
from trundle.model.surgery import Cut, cut, transformer_of

TEXTS = pico.different_texts(24)


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(1, 5), st.booleans(), st.integers(0, 2**16))
def test_it_is_numpys_least_squares(inputs: int, outputs: int, shifts: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mixed = np.eye(inputs) + 0.3 * rng.normal(size=(inputs, inputs)) / np.sqrt(inputs)
    states = rng.normal(size=(200, inputs)) @ mixed + rng.normal(size=inputs)
    weight = rng.normal(size=(outputs, inputs))
    kept = sorted(rng.choice(inputs, rng.integers(1, inputs + 1), replace=False).tolist())
    with_one = np.hstack([states, np.ones((len(states), 1))])
    moments = torch.from_numpy(with_one.T @ with_one / len(states))
    found, gain = _least_squares(torch.from_numpy(weight), moments, kept, shifts=shifts)
    read = with_one[:, [*kept, inputs] if shifts else kept]
    best = np.linalg.lstsq(read, states @ weight.T, rcond=None)[0]
    ours = read @ np.vstack([found.T, gain[None]] if shifts else [found.T])
    scale = np.abs(states @ weight.T).max()
    np.testing.assert_allclose(ours, read @ best, atol=0.002 * scale)
    assert shifts or not gain.any()


def vectors(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True).cpu()


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama", "gpt2", "phi3"])
def test_a_duplicate_neuron_is_reconstructed_exactly(
    family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    """Its twin then counts twice, and the vectors stay what they were."""
    model = copy_of(pico_model(family))
    backbone = transformer_of(model).model
    layout = layout_of(backbone)
    neurons = layout.sizes["mlp"]
    with torch.no_grad():
        for matrix in prunable(layout):
            for number, axis in enumerate(matrix.rows.split("+")):
                if axis == "mlp":
                    first = number * neurons
                    for part in (weight_of(backbone, matrix), bias_of(backbone, matrix.name)):
                        if part is not None:
                            part[first] = part[first + 1]
    kept = [tuple(range(1, neurons))] * layout.layers
    before, small = vectors(model), cut(model, Cut(mlp=tuple(kept)))
    lost = (vectors(small) - before).norm(dim=1)
    _reconstruct(model, small, kept, TEXTS, Context(original=model))
    left = (vectors(small) - before).norm(dim=1)
    assert left.max() < 0.1 * lost.max()


def bias_of(backbone: torch.nn.Module, name: str) -> torch.Tensor | None:
    bias = getattr(backbone.get_submodule(name), "bias", None)
    return None if bias is None else bias.detach()


def test_padding_is_ignored(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    backbone = transformer_of(model).model
    readers = [matrix.name for matrix in prunable(layout_of(backbone)) if matrix.columns == "mlp"]
    together = dict(_measure_moments(model, ["one", "one two three one two three one two"], readers))
    apart = [
        dict(_measure_moments(model, [text], readers))
        for text in ("one", "one two three one two three one two")
    ]
    counts = [
        len(model.tokenizer(text)["input_ids"]) for text in ("one", "one two three one two three one two")
    ]
    for name in readers:
        mean = sum(count * found[name] for count, found in zip(counts, apart, strict=True)) / sum(counts)
        torch.testing.assert_close(together[name], mean, rtol=1e-4, atol=1e-6)


def test_a_map_is_put_where_it_belongs(pico_model: Callable[[str], SentenceTransformer]) -> None:
    backbone = transformer_of(copy_of(pico_model("gpt2"))).model
    matrix = next(one for one in prunable(layout_of(backbone)) if one.columns == "mlp")
    assert has_bias(backbone, matrix)
    weight, bias = weight_of(backbone, matrix).clone(), backbone.get_parameter(f"{matrix.name}.bias").clone()
    put_map(backbone, matrix, 2 * weight, torch.ones(len(weight)))
    assert torch.equal(weight_of(backbone, matrix), 2 * weight)
    assert torch.equal(backbone.get_parameter(f"{matrix.name}.bias"), bias + 1)

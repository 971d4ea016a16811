"""Closed-form healing of cuts: an uncut model stays as it is, and no cut gets worse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import pico
from trundle.errors import BadInput
from trundle.model.heads import copy_of
from trundle.model.healing import _alignment, heal
from trundle.model.layout import Layout, layout_of
from trundle.model.matrices import prunable, weight_of, with_zeros
from trundle.model.rounding import _Moments
from trundle.model.surgery import Cut, cut, transformer_of

Pico = Callable[..., SentenceTransformer]
TEXTS = pico.different_texts(80)
HELD_OUT = [f"{text} over" for text in pico.TEXTS]


def layout(model: SentenceTransformer) -> Layout:
    return layout_of(transformer_of(model).model)


def half(size: int) -> tuple[int, ...]:
    return tuple(range(size // 2))


CUTS: dict[str, Callable[[Layout], Cut]] = {
    "layers": lambda _: Cut(blocks=(0, 2)),
    "first layers": lambda _: Cut(blocks=(0, 1)),
    "neurons": lambda sizes: Cut(mlp=(half(sizes.sizes["mlp"]),) * sizes.layers),
    "width": lambda sizes: Cut(hidden=half(sizes.sizes["hidden"]), head=half(sizes.sizes["head"])),
    "tokens": lambda sizes: Cut(vocab=tuple(range(sizes.sizes["vocab"] - 40))),
}


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(1, 5), st.booleans(), st.integers(0, 2**16))
def test_it_is_numpys_least_squares(inputs: int, outputs: int, shifts: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(200, inputs)) + rng.normal(size=inputs)
    wanted = rng.normal(size=(200, outputs)) + states[:, :1]
    weights = rng.uniform(0.5, 2.0, size=200)
    moments = _Moments()
    moments.add(*(torch.from_numpy(each) for each in (states, wanted, weights)))
    weight, bias = moments.fit(torch.zeros(outputs, inputs), shifts=shifts, strength=1e-9)
    read, roots = np.hstack([states, np.ones((200, int(shifts)))]), np.sqrt(weights)[:, None]
    best = np.linalg.lstsq(roots * read, roots * wanted, rcond=None)[0]
    np.testing.assert_allclose(states @ weight.numpy().T + bias.numpy(), read @ best, atol=1e-4)
    error = np.square(roots * (read @ best - wanted)).sum() / np.square(roots * wanted).sum()
    assert moments.error(weight, bias) == pytest.approx(error, rel=1e-3)
    assert shifts or not bias.any()


@pytest.mark.parametrize("what", CUTS)
@pytest.mark.parametrize("family", pico.LAYOUTS)
def test_a_cut_comes_closer_to_the_whole_model(family: str, what: str, pico_model: Pico) -> None:
    model = pico_model(family)
    chosen = CUTS[what](layout(model))
    small = cut(model, chosen)
    weights = {name: weight.clone() for name, weight in small.state_dict().items()}
    found = heal(model, small, chosen, TEXTS)
    assert found.after <= found.before
    assert all(torch.equal(weight, weights[name]) for name, weight in small.state_dict().items())
    assert found.after < found.before or torch.equal(
        *(each.encode(TEXTS[:2], convert_to_tensor=True) for each in (small, found.model))
    )


@pytest.mark.parametrize("family", pico.LAYOUTS)
def test_an_uncut_model_stays_as_it_is(family: str, pico_model: Pico) -> None:
    model = pico_model(family, 2)
    found = heal(model, cut(model, Cut()), Cut(), TEXTS)
    assert found.before == pytest.approx(0, abs=1e-8)
    np.testing.assert_allclose(found.model.encode(HELD_OUT), model.encode(HELD_OUT), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama", "gpt2", "phi3"])
def test_a_duplicate_neuron_is_replaced_by_its_twin(family: str, pico_model: Pico) -> None:
    model = copy_of(pico_model(family, 2))
    backbone = transformer_of(model).model
    sizes = layout_of(backbone)
    neurons = sizes.sizes["mlp"]
    with torch.no_grad():
        for matrix in prunable(sizes):
            for number, axis in enumerate(matrix.rows.split("+")):
                if axis == "mlp":
                    bias = getattr(backbone.get_submodule(matrix.name), "bias", None)
                    for part in (weight_of(backbone, matrix), *(() if bias is None else (bias.detach(),))):
                        part[number * neurons] = part[number * neurons + 1]
    what = Cut(mlp=(tuple(range(1, neurons)),) * sizes.layers)
    small = cut(model, what)
    found = heal(model, small, what, TEXTS)
    lost, left = (
        np.linalg.norm(each.encode(HELD_OUT) - model.encode(HELD_OUT), axis=1).max()
        for each in (small, found.model)
    )
    assert left < 0.1 * lost


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_kept(dtype: torch.dtype, pico_model: Pico) -> None:
    model = copy_of(pico_model("bert")).to(dtype)
    what = Cut(blocks=(0, 2))
    found = heal(model, cut(model, what), what, TEXTS)
    assert {weight.dtype for weight in found.model.parameters()} == {dtype}
    assert found.after < 0.5 * found.before


def test_dead_neurons_and_equal_texts_are_solvable(pico_model: Pico) -> None:
    model = copy_of(pico_model("bert"))
    backbone = transformer_of(model).model
    with torch.no_grad():
        for matrix in prunable(layout_of(backbone)):
            if matrix.rows == "mlp":
                weight_of(backbone, matrix)[:40] = 0
                backbone.get_parameter(f"{matrix.name}.bias")[:40] = -100
    what = Cut(blocks=(0, 2))
    found = heal(
        model, cut(model, what), what, [f"{text} " + "the " * n for n in range(20) for text in pico.TEXTS[:1]]
    )
    assert all(weight.isfinite().all() for weight in found.model.parameters())
    assert found.after <= found.before


def test_too_few_texts_are_rejected(pico_model: Pico) -> None:
    model = pico_model("bert")
    what = Cut(blocks=(0, 2))
    with pytest.raises(BadInput, match=r"1 texts with \d+ tokens are too few to heal .* with \d+ such texts"):
        heal(model, cut(model, what), what, ["queries"])


def test_zeros_of_a_pruned_model_are_not_filled(pico_model: Pico) -> None:
    model = copy_of(pico_model("bert"))
    with_zeros(model, {})
    with pytest.raises(BadInput, match="pruned"):
        heal(model, cut(model, Cut(blocks=(0, 2))), Cut(blocks=(0, 2)), TEXTS)


def test_tokens_are_aligned_by_their_characters() -> None:
    """[CLS] reading all [SEP] against [CLS] read ##ing all [SEP], and a text that one of them cuts off."""
    whole = [[(0, 0), (0, 7), (8, 11), (0, 0), (-1, -1)], [(0, 0), (0, 2), (0, 0), (-1, -1), (-1, -1)]]
    small = [[(0, 0), (0, 4), (4, 7), (8, 11), (0, 0)], [(0, 0), (0, 1), (1, 2), (2, 4), (0, 0)]]
    found = _alignment(whole, small)
    assert found[0].argmax(-1).tolist() == [0, 1, 1, 2, 3]
    assert found[1].argmax(-1)[[0, 1, 2, 4]].tolist() == [0, 1, 1, 2]
    assert found.sum(-1).tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]

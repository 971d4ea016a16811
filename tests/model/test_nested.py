"""The nested forward and its gradients against those of the extracted model in plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling

import pico
from trundle.methods.width.importance import _may_reorder_matches, _Orders, _reordered
from trundle.methods.width.narrow import _NarrowModel
from trundle.model.layout import layout_of
from trundle.model.nested import Selection, narrow_cut
from trundle.model.surgery import Cut, cut, transformer_of

FAMILIES = list(pico.CONFIGS)
SCATTERED = Selection(
    select="importance", mlp=True, hidden_order=tuple(np.random.default_rng(5).permutation(32).tolist())
)
SELECTIONS = [
    Selection(select="consecutive"),
    Selection(select="uniform", mlp=True),
    Selection(select="rotary", mlp=True),
    SCATTERED,
]


def cut_for(model: SentenceTransformer, share: Fraction, how: Selection) -> Cut:
    backbone = transformer_of(model).model
    return narrow_cut(layout_of(backbone), backbone.config, share, how)


def vectors(model: Any, features: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model.eval()(dict(features))["sentence_embedding"]
    return found


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(family, how, id=f"{family}-{how.select}")
        for family in FAMILIES
        for how in (SELECTIONS if family in {"bert", "qwen3"} else SELECTIONS[2:])
    ],
)
def test_the_nested_forward_is_the_extracted_model(
    family: str, how: Selection, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    wide = pico_model(family)
    features = wide.preprocess(pico.TEXTS)
    what = cut_for(wide, Fraction(1, 2), how)
    with torch.no_grad():
        nested, extracted = vectors(_NarrowModel(wide, what), features), vectors(cut(wide, what), features)
    torch.testing.assert_close(nested, extracted, atol=1e-5, rtol=0)
    assert not torch.allclose(nested, vectors(wide, features)[:, : nested.shape[1]], atol=1e-2)


@pytest.mark.parametrize("how", [SELECTIONS[2], SCATTERED], ids=lambda how: how.select)
@pytest.mark.parametrize("family", pico.LAYOUTS)
def test_gradients_reach_their_part_of_the_wide_weights_and_nothing_else(
    family: str, how: Selection, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    wide = copy.deepcopy(pico_model(family))
    features, what = wide.preprocess(pico.TEXTS), cut_for(wide, Fraction(1, 2), how)
    extracted = cut(wide, what)
    target = torch.randn(len(pico.TEXTS), 16, generator=torch.Generator().manual_seed(0))
    for model in (_NarrowModel(wide, what), extracted):
        (vectors(model, features) - target).square().sum().backward()
    ours = {name: gradient(weight) for name, weight in transformer_of(wide).model.named_parameters()}
    theirs = {name: gradient(weight) for name, weight in transformer_of(extracted).model.named_parameters()}
    with torch.no_grad():
        for name, weight in transformer_of(wide).model.named_parameters():
            weight.copy_(ours[name])
    for name, part in transformer_of(cut(wide, what)).model.named_parameters():
        torch.testing.assert_close(part.data, theirs[name], atol=1e-4, rtol=1e-4)
        assert float(part.detach().abs().sum()) == pytest.approx(
            float(ours[name].abs().sum()), rel=1e-4, abs=1e-6
        )


def test_gradients_add_to_those_that_are_there(pico_model: Callable[[str], SentenceTransformer]) -> None:
    """In place, and the same as torch's own slices give in one backward pass."""
    wide = copy.deepcopy(pico_model("bert"))
    features, what = wide.preprocess(pico.TEXTS), cut_for(wide, Fraction(1, 2), SCATTERED)
    narrow = _NarrowModel(wide, what)
    alone = []
    for model in (wide, narrow):
        vectors(model, features)[:, 0].sum().backward()
        alone.append({name: gradient(weight).clone() for name, weight in wide.named_parameters()})
        wide.zero_grad()
    for model in (wide, narrow, narrow):
        vectors(model, features)[:, 0].sum().backward()
    for name, weight in wide.named_parameters():
        torch.testing.assert_close(
            gradient(weight), alone[0][name] + 2 * alone[1][name], atol=1e-5, rtol=1e-4
        )


def gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def test_it_has_no_weights_of_its_own(pico_model: Callable[[str], SentenceTransformer]) -> None:
    wide = pico_model("qwen3")
    narrow = _NarrowModel(wide, cut_for(wide, Fraction(1, 2), SELECTIONS[0]))
    assert not list(narrow.parameters())


def test_a_consecutive_part_is_a_view(pico_model: Callable[[str], SentenceTransformer]) -> None:
    wide = pico_model("bert")
    narrow = _NarrowModel(wide, cut_for(wide, Fraction(1, 2), SELECTIONS[0]))
    from trundle.methods.width.narrow import _sliced

    weight, kept = narrow._backbone_parts["embeddings.word_embeddings.weight"]
    assert _sliced(weight, kept).data_ptr() == weight.data_ptr()


def test_modules_after_the_backbone_are_parts_too(tmp_path: Path) -> None:
    base = pico.model("bert", str(tmp_path))
    modules = [
        base[0],
        Pooling(32, pooling_mode=("cls", "mean")),
        LayerNorm(64),
        Dense(64, 10, activation_function=torch.nn.Tanh()),
        Normalize(),
    ]
    wide = SentenceTransformer(modules=modules, device="cpu")
    what = cut_for(wide, Fraction(1, 2), SELECTIONS[0])
    features = wide.preprocess(pico.TEXTS)
    nested = vectors(_NarrowModel(wide, what), features)
    torch.testing.assert_close(nested, vectors(cut(wide, what), features), atol=1e-5, rtol=0)
    nested.square().sum().backward()
    assert modules[3].linear.weight.grad is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reordered_model_gives_the_same_vectors(
    family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    wide = pico_model(family)
    layout = layout_of(transformer_of(wide).model)
    rng = np.random.default_rng(3)

    def shuffled(axis: str) -> tuple[int, ...]:
        return tuple(rng.permutation(layout.sizes[axis]).tolist())

    def heads() -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(shuffled("head") for _ in range(layout.sizes["kv_heads"])) for _ in range(layout.layers)
        )

    orders = _Orders(
        mlp=tuple(shuffled("mlp") for _ in range(layout.layers)),
        values=heads(),
        matches=heads() if _may_reorder_matches(layout) else None,
    )
    other = _reordered(wide, orders)
    np.testing.assert_allclose(other.encode(pico.TEXTS), wide.encode(pico.TEXTS), atol=1e-5)
    weights = dict(other.named_parameters())
    assert any((weights[name] != weight).any() for name, weight in wide.named_parameters())

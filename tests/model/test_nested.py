"""The nested forward against the extracted model in plain transformers, and against the wide model's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

import pico
from trundle.model import cut, layout_of, transformer_of
from trundle.model.nested import NarrowModel
from trundle.model.selection import Selection, narrow_cut

FAMILIES = list(pico.CONFIGS)
SELECTIONS = [
    Selection(select="consecutive"),
    Selection(select="uniform", mlp=True),
    Selection(select="rotary", mlp=True),
    Selection(select="importance", hidden_order=tuple(np.random.default_rng(5).permutation(32).tolist())),
]


def cut_for(model: SentenceTransformer, share: Fraction, how: Selection) -> Any:
    backbone = transformer_of(model).model
    return narrow_cut(layout_of(backbone), backbone.config, share, how)


def vectors(model: Any, features: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model.eval()(dict(features))["sentence_embedding"]
    return found


@pytest.mark.parametrize("how", SELECTIONS, ids=lambda how: how.select)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_nested_forward_is_the_extracted_model(
    family: str, how: Selection, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    wide = pico_model(family)
    features = wide.preprocess(pico.TEXTS)
    what = cut_for(wide, Fraction(1, 2), how)
    with torch.no_grad():
        nested, extracted = vectors(NarrowModel(wide, what), features), vectors(cut(wide, what), features)
    torch.testing.assert_close(nested, extracted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", SELECTIONS, ids=lambda how: how.select)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_the_part_of_the_wide_weights_and_nothing_else(
    family: str, how: Selection, tmp_path: Any
) -> None:
    """What the extracted model's own gradients are, the same part of the wide model's gradients is; the rest is zero."""
    wide = pico.model(family, str(tmp_path))
    features, what = wide.preprocess(pico.TEXTS), cut_for(wide, Fraction(1, 2), how)
    target = torch.randn(len(pico.TEXTS), wide.get_embedding_dimension() // 2, generator=torch.Generator())
    extracted = cut(wide, what)
    (vectors(NarrowModel(wide, what), features) - target).square().sum().backward()
    (vectors(extracted, features) - target).square().sum().backward()
    with_gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in transformer_of(wide).model.named_parameters()
    }
    with torch.no_grad():
        for name, weight in transformer_of(wide).model.named_parameters():
            weight.copy_(with_gradients[name])
    for name, weight in transformer_of(cut(wide, what)).model.named_parameters():
        own = dict(transformer_of(extracted).model.named_parameters())[name].grad
        torch.testing.assert_close(
            weight.data, torch.zeros_like(weight) if own is None else own, atol=1e-4, rtol=1e-4
        )
        assert float(weight.detach().abs().sum()) == pytest.approx(
            float(with_gradients[name].abs().sum()), rel=1e-4, abs=1e-6
        )

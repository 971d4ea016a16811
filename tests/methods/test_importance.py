"""Importance is measured per token and does not depend on how texts are batched."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.methods.width.importance import _Importance, _measure_importance
from trundle.model import encode


@pytest.mark.parametrize("family", sorted(pico.CONFIGS))
def test_scores_do_not_depend_on_batches(
    family: str, pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one there is no padding; together the shortest text is mostly padding."""

    def measured(batch: int) -> _Importance:
        monkeypatch.setattr(encode, "_BATCH", batch)
        return _measure_importance(pico_model(family), ["short", *pico.TEXTS])

    alone, together = measured(1), measured(32)
    for name in ("hidden", "mlp", "values", "matches"):
        one, other = getattr(alone, name), getattr(together, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-4, err_msg=name)


def test_the_model_is_not_changed(pico_model: Callable[[str], SentenceTransformer]) -> None:
    """A SentenceTransformer may be in training mode when none of its modules is; dropout must stay off."""
    model = copy.deepcopy(pico_model("bert")).eval()
    model.training = True
    before = [module.training for module in model.modules()]
    _measure_importance(model, pico.TEXTS)
    assert [module.training for module in model.modules()] == before
    assert sum(before) == 1


@pytest.mark.usefixtures("no_doubles")
def test_a_device_without_float64_works(pico_model: Callable[[str], SentenceTransformer]) -> None:
    assert np.isfinite(_measure_importance(pico_model("bert"), pico.TEXTS).hidden).all()

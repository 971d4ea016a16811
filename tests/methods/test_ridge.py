"""The closed-form map against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from trundle.errors import BadInput
from trundle.methods.align.leaf import _mean_cosine, _strongest_good, fit_ridge

RNG = np.random.default_rng(5)
INPUTS = RNG.normal(size=(300, 12)).astype(np.float32) + 3
TARGETS = (INPUTS @ RNG.normal(size=(12, 20)) + 0.3 * RNG.normal(size=(300, 20)) - 1).astype(np.float32)


@pytest.mark.parametrize("strength", [1e-6, 1e-2, 10.0])
def test_equals_scikit_learn(strength: float) -> None:
    found = fit_ridge(INPUTS, TARGETS, seed=0, strengths=[strength])
    centred = INPUTS - INPUTS.mean(axis=0)
    penalty = strength * np.linalg.eigvalsh(centred.T.astype(np.float64) @ centred).mean()
    theirs = Ridge(alpha=penalty).fit(INPUTS.astype(np.float64), TARGETS.astype(np.float64))
    np.testing.assert_allclose(found.weight, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(found.bias, theirs.intercept_, atol=1e-3)


def test_recovers_an_exact_map_between_spaces() -> None:
    rng = np.random.default_rng(6)
    exact = (INPUTS @ rng.normal(size=(12, 20)) + 2).astype(np.float32)
    found = fit_ridge(INPUTS, exact, seed=0)
    np.testing.assert_allclose(found(INPUTS), exact, atol=1e-2)
    assert found.held_out_cosine > 0.9999


def test_noise_leads_to_a_stronger_penalty() -> None:
    """With fewer rows than it takes to pin the map down, the weakest penalty must not win."""
    rng = np.random.default_rng(7)
    wide = rng.normal(size=(400, 360)).astype(np.float32)
    noisy = (wide @ rng.normal(size=(360, 5)) + 20 * rng.normal(size=(400, 5))).astype(np.float32)
    assert fit_ridge(wide, noisy, seed=0).strength > 1e-2


def test_a_rounding_error_does_not_break_ties() -> None:
    strengths = [1e-6, 1e-3, 1.0, 10.0]
    assert _strongest_good([0.9, 0.9 + 1e-12, 0.9 - 1e-12, 0.5], strengths) == 2
    assert _strongest_good([0.9 + 1e-12, 0.9, 0.9, 0.5], strengths) == 2
    assert _strongest_good([0.95, 0.9, 0.9, 0.5], strengths) == 0


def test_constant_inputs_work() -> None:
    still = np.ones((50, 4), dtype=np.float32)
    found = fit_ridge(still, TARGETS[:50], seed=0)
    assert np.isfinite(found.weight).all()
    np.testing.assert_allclose(found(still)[0], TARGETS[:50].mean(axis=0), atol=1e-4)


def test_too_few_rows() -> None:
    with pytest.raises(BadInput, match="9 texts are too few"):
        fit_ridge(INPUTS[:9], TARGETS[:9], seed=0)


def test_mean_cosine_of_a_zero_row_is_zero() -> None:
    one = np.array([[1.0, 0.0], [0.0, 0.0]])
    assert _mean_cosine(one, np.array([[2.0, 0.0], [1.0, 1.0]])) == pytest.approx(0.5)


def test_nearly_the_same_space_is_left_nearly_unchanged() -> None:
    """The vectors of a slightly changed model: same directions, other lengths, some noise, few texts."""
    rng = np.random.default_rng(3)
    old = rng.normal(size=(200, 64)).astype(np.float32)
    new = (rng.uniform(2, 4, size=(200, 1)) * (old + 0.1 * rng.normal(size=old.shape))).astype(np.float32)
    targets = old / np.linalg.norm(old, axis=1, keepdims=True)
    found, plain = fit_ridge(new, targets, seed=0), fit_ridge(new, targets, seed=0, near_identity=[])
    assert found.identity > 0
    assert found.held_out_cosine > 0.99 > plain.held_out_cosine
    np.testing.assert_allclose(_mean_cosine(found(new), targets), _mean_cosine(new, targets), atol=0.005)


def test_another_space_of_the_same_width_is_mapped_as_any_other() -> None:
    rng = np.random.default_rng(4)
    inputs = rng.normal(size=(300, 16)).astype(np.float32)
    targets = (inputs @ rng.normal(size=(16, 16)) + 0.5 * rng.normal(size=(300, 16))).astype(np.float32)
    found, plain = fit_ridge(inputs, targets, seed=0), fit_ridge(inputs, targets, seed=0, near_identity=[])
    assert found.held_out_cosine >= plain.held_out_cosine
    np.testing.assert_allclose(found.weight, plain.weight, atol=0.2)


def test_the_same_space_is_left_unchanged() -> None:
    inputs = np.random.default_rng(6).normal(size=(50, 8)).astype(np.float32)
    found = fit_ridge(inputs, inputs / np.linalg.norm(inputs, axis=1, keepdims=True), seed=0)
    assert found.strength == np.inf
    assert not found.bias.any()
    np.testing.assert_allclose(found.weight, found.identity * np.eye(8), atol=1e-7)

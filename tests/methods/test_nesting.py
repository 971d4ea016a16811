"""The joint loss of nested sizes, and the sampling of sizes for a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import pico
from trundle.data.examples import Example
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrastive import _angle, _infonce, make_contrast_task
from trundle.methods.training import Prompts
from trundle.methods.width.narrow import _NarrowModel
from trundle.methods.width.nesting import _captured, _drawn_sizes, _Nest, _Nesting
from trundle.model.layout import layout_of
from trundle.model.nested import Selection, narrow_cut
from trundle.model.surgery import transformer_of
from trundle.train.loop import TrainingTask, TrainSettings, train
from weight_difference import weight_difference, weights_of

EXAMPLES = [
    Example(query=f"{text} {n}", positive=f"{n} {text}", negatives=(f"not {n}",), source="a")
    for n in range(4)
    for text in pico.TEXTS
]


def nest_of(model: SentenceTransformer) -> _Nest:
    wide = copy.deepcopy(model)
    backbone = transformer_of(wide).model
    how = Selection(select="consecutive", mlp=True)
    cuts = [
        narrow_cut(layout_of(backbone), backbone.config, Fraction(share), how) for share in ("1/2", "1/4")
    ]
    return _Nest(wide, [_NarrowModel(wide, what) for what in cuts])


def contrast_for(nest: _Nest, **settings: int) -> object:
    return make_contrast_task(
        nest.wide,
        EXAMPLES,
        (),
        ContrastOptions(objective="infonce+angle", batch_size=8, **settings),
        prompts={"a": Prompts()},
    )


def test_the_joint_loss_is_the_paper_s(pico_model: Callable[[str], SentenceTransformer]) -> None:
    """λ·Σ_j L_j + (1 − λ)·L_full with L = 20·L_cl + L_angle, computed here from each model's vectors."""
    nest = nest_of(pico_model("bert")).eval()
    nesting = _Nesting(nest=nest, task=contrast_for(nest), student_weight=0.7)  # type: ignore[arg-type]
    batch = nesting.batches.load(nesting.batches.order.batch(0))
    tuples = batch[0]

    def loss(model: torch.nn.Module) -> torch.Tensor:
        queries, documents = (
            torch.cat([model(dict(one))["sentence_embedding"] for one in chunks.features])[chunks.rows]
            for chunks in (tuples.queries, tuples.documents)
        )
        left, right = queries[tuples.pairs[:, 0]], documents[tuples.pairs[:, 1]]
        ranking = _infonce(queries, documents, tuples.answers, excluded=tuples.excluded)
        return 20 * ranking + _angle(left, right, tuples.labels)

    expected = 0.3 * loss(nest.wide) + 0.7 * sum(loss(model) for model in nest.narrow)
    found = sum(objective(nest, batch) for objective in nesting.objectives)
    torch.testing.assert_close(found, expected)


def test_objectives_one_after_the_other_give_the_gradients_of_their_sum_captured_or_not(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    weights = []
    for together, captures in ((False, False), (True, False), (False, True)):
        nest = nest_of(pico_model("llama"))
        nesting = _Nesting(nest=nest, task=contrast_for(nest), student_weight=0.9)  # type: ignore[arg-type]

        def joint(nest: object, batch: object, nesting: object = nesting) -> torch.Tensor:
            return torch.stack([one(nest, batch) for one in nesting.objectives]).sum()  # type: ignore[attr-defined]

        with _captured(nest, pytest.fail, keep=True) if captures else nullcontext():
            train(
                nest,
                TrainingTask(losses=[joint] if together else nesting.objectives, batches=nesting.batches),
                TrainSettings(steps=3, learning_rate=1e-3, dropout=False),
            )
        weights.append(weights_of(nest.wide))
    assert weight_difference(weights[0], weights[1], share=0.999) < 2e-5
    assert weight_difference(weights[0], weights[2], share=0.999) < 2e-5


def test_a_size_that_is_not_drawn_is_not_computed(pico_model: Callable[[str], SentenceTransformer]) -> None:
    nest = nest_of(pico_model("bert"))
    nesting = _Nesting(nest=nest, task=contrast_for(nest), student_weight=1.0)  # type: ignore[arg-type]
    batch = nesting.batches.load(nesting.batches.order.batch(0))
    whole, half, _ = (objective(nest, batch) for objective in nesting.objectives)
    assert not whole.requires_grad
    assert half.requires_grad


@given(narrow=st.integers(2, 8), data=st.data())
def test_the_narrowest_is_always_drawn_and_the_others_count_as_before_on_average(
    narrow: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(2, narrow))
    drawn = [_drawn_sizes(narrow, count, np.asarray([number]), seed=1) for number in range(50)]
    for one in drawn:
        assert one[-1] == 1.0
        assert sum(weight > 0 for weight in one) == count
        assert sum(one) == pytest.approx(narrow)
    assert _drawn_sizes(narrow, count, np.asarray([7]), seed=1) == drawn[7]

"""The plan and the settings of align."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import pico
from trundle.data.corpus import Corpus
from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.methods import METHODS
from trundle.methods.align import _AlignPlan
from trundle.methods.align.align import _two_parts, schedule_for, settings_for
from trundle.methods.align.leaf import fit_ridge
from trundle.methods.contract import Context
from trundle.model.cost import cost
from trundle.model.encode import embedder
from trundle.model.layout import token_limit
from trundle.model.surgery import transformer_of
from trundle.recipe import make_options
from trundle.teacher.teacher import find_teacher
from trundle.train.trainer import cosine

Models = Callable[[str], SentenceTransformer]


def corpus() -> Corpus:
    texts = [Text(text=text) for text in pico.different_texts(60)]
    return Corpus(
        train=lambda: iter(texts), validation=lambda: iter(()), held_out=lambda: iter(()), facts=lambda: ()
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "training for 3 × 10 epochs"),
        ({"steps": 0}, "in closed form"),
        ({"steps": 100}, "training for 100 steps"),
        ({"minutes": 30}, "training for 30 minutes"),
        ({"minutes": 30, "steps": 100}, "training for 30 minutes, at most 100 steps"),
    ],
)
def test_the_plan_shows_steps_and_minutes(options: dict[str, Any], says: str) -> None:
    asked = make_options(METHODS["align"], options)
    plan = _AlignPlan(options=asked, teacher="large", inputs=8, outputs=16, normalise=True)
    assert str(plan) == f"8 → 16 into the space of large, {says}"


def test_only_a_distance_can_stop_training_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trundle.methods.align.align._SUFFICIENT_LOSS", 0.02)
    options = [make_options(METHODS["align"], {"steps": 5, "loss": loss}) for loss in ("leaf", "distilbert")]
    assert [settings_for(one, 10, 1, 0, normalised=True).sufficient_loss for one in options] == [0.02, None]
    assert settings_for(options[0], 10, 1, 0, normalised=False).sufficient_loss is None, (
        "a distance in unknown units"
    )


def test_a_teacher_with_truncate_dim_has_vectors_of_any_length(pico_model: Models) -> None:
    """The library cuts after it normalises, so a student that normalises would be in another space."""
    teacher, step = copy.deepcopy(pico_model("bert")), METHODS["align"]
    teacher.truncate_dim = 8
    context = Context(original=teacher, corpus=corpus())
    model = pico_model("mpnet")
    student = step.apply(model, step.plan(model, make_options(step, {"steps": 0}), context), context).model
    lengths = np.linalg.norm(student.encode(pico.TEXTS), axis=1)
    assert student.get_embedding_dimension() == 8
    assert np.abs(lengths - 1).max() > 1e-3


def test_a_ridge_start_is_fitted_on_as_many_texts_as_are_asked_for(
    pico_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[int] = []
    plain, step = fit_ridge, METHODS["align"]

    def noted(inputs: Any, *given: Any, **named: Any) -> Any:
        fitted.append(len(inputs))
        return plain(inputs, *given, **named)

    monkeypatch.setattr("trundle.methods.align.align.fit_ridge", noted)
    model = pico_model("mpnet")
    context = Context(original=pico_model("bert"), corpus=corpus())
    for options in ({"steps": 0}, {"steps": 0, "start_texts": 40}):
        step.apply(model, step.plan(model, make_options(step, options), context), context)
    assert fitted == [60, 40]


def test_the_forecast_uses_the_new_pooling(pico_model: Models) -> None:
    """A model that pools in two ways has vectors twice as wide as their mean alone."""
    bert, step = copy.deepcopy(pico_model("bert")), METHODS["align"]
    pooling = Pooling(32, pooling_mode=("cls", "mean"), include_prompt=False)
    model = SentenceTransformer(modules=[bert[0], pooling], device="cpu")
    context = Context(original=pico_model("mpnet"), corpus=corpus())
    plan = step.plan(model, make_options(step, {"steps": 0, "pooling": "mean"}), context)
    made = step.apply(model, plan, context).model
    assert step.forecast(model, plan).as_json() == cost(made).as_json()
    assert not made[1].include_prompt


def test_two_models_of_one_endpoint_are_two_teachers(
    pico_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trundle.teacher.endpoint._endpoint_embedder", lambda _, name: embedder(pico_model(name), name=name)
    )
    context = Context(original=pico_model("bert"), corpus=corpus())
    found = [
        find_teacher(context.original, "http://here", name, context) for name in ("mpnet", "gpt2", "mpnet")
    ]
    assert [teacher.name for teacher in found] == ["mpnet", "gpt2", "mpnet"]
    assert found[0] is found[2], "opened once"


def test_a_truncated_model_does_not_keep_its_head(pico_model: Models) -> None:
    student, step = copy.deepcopy(pico_model("bert")), METHODS["align"]
    teacher = copy.deepcopy(student)
    student.truncate_dim = teacher.truncate_dim = 8
    context = Context(original=teacher, corpus=corpus())
    with pytest.raises(BadInput, match="truncate_dim, which training does not see; use start: ridge"):
        step.plan(student, make_options(step, {"start": "keep"}), context)


def test_rounding_that_begins_late_needs_rounding(pico_model: Models) -> None:
    student, step = pico_model("bert"), METHODS["align"]
    context = Context(original=pico_model("mpnet"), corpus=corpus())
    with pytest.raises(BadInput, match="add rounding: int4"):
        step.plan(student, make_options(step, {"round_after": 0.5}), context)


def test_a_student_takes_as_many_tokens_as_its_teacher(pico_model: Models) -> None:
    teacher, student, step = (*map(copy.deepcopy, map(pico_model, ("bert", "mpnet"))), METHODS["align"])
    context = Context(original=teacher, corpus=corpus())
    teacher.max_seq_length, student.max_seq_length = 40, 24

    def limit(**options: Any) -> int | None:
        plan = step.plan(student, make_options(step, {"steps": 0, **options}), context)
        return step.apply(student, plan, context).model.max_seq_length

    assert (limit(), limit(max_length=30)) == (40, 30)
    teacher.max_seq_length = 500
    assert limit() == token_limit(transformer_of(student).model)
    teacher.max_seq_length = 8
    assert limit() == 24
    with pytest.raises(BadInput, match="positions for"):
        limit(max_length=500)


def test_minutes_end_in_one_cosine_and_epochs_in_cycles() -> None:
    by_time, by_epoch = (make_options(METHODS["align"], options) for options in ({"minutes": 1}, {}))
    assert schedule_for(by_time, 10)(199, 200) == pytest.approx(0.02)
    assert schedule_for(by_epoch, 10)(150, 300) > schedule_for(by_epoch, 10)(99, 300)
    quick = make_options(METHODS["align"], {"minutes": 1, "schedule": "leaf", "last_rate": 0.5})
    assert schedule_for(quick, 10)(299, 300) == pytest.approx(0.5)
    late = make_options(METHODS["align"], {"minutes": 1, "rounding": "int4", "round_after": 0.8})
    assert [schedule_for(late, 10)(at, 200) for at in (0, 159, 199)] == pytest.approx([1.0, 0.05, 0.02])


def test_two_parts_join_at_the_level_of_the_first():
    schedule = _two_parts(cosine(end=0.2), share=0.8, last=0.02)
    shares = [schedule(step, 100) for step in range(100)]
    assert (shares[0], shares[79], shares[99]) == pytest.approx((1.0, 0.2, 0.02))
    assert shares == sorted(shares, reverse=True)
    assert len({round(before - after, 9) for before, after in itertools.pairwise(shares[79:])}) == 1

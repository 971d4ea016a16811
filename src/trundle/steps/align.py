"""align: bring a model into its teacher's vector space with a linear map found in closed form.

Ridge regression of the teacher's vectors on the model's pooled vectors, over a few thousand of the user's texts; no
labels, no training, seconds of work. The map is saved in the model as a Dense layer with identity activation, followed
by normalisation if and only if the teacher normalises. The teacher is the model that came in the door, or another one.

    - align: {texts: 4096}
    - align: {teacher: path/to/large-model}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput
from trundle.steps.contract import Applied, Context, Options, Plan, Step

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost


class AlignOptions(Options):
    """Whose space, and how many texts to find it with."""

    texts: int = Field(4096, ge=10, description="How many of the training texts to fit the map on.")
    teacher: str | None = Field(None, description="Model whose space to enter; default: the model that came in.")


class AlignPlan(Plan):
    """The map to be found."""

    texts: int
    teacher: str | None
    inputs: int
    outputs: int
    normalise: bool

    def __str__(self) -> str:
        whose = self.teacher or "the original model"
        return f"fit a linear map {self.inputs} → {self.outputs} into the space of {whose} on {self.texts:,} texts"


def plan(model: SentenceTransformer, options: AlignOptions, context: Context) -> AlignPlan:
    """Look at both ends of the map."""
    if context.corpus is None:
        raise BadInput("align learns from texts; say where they are with --data")
    teacher = _teacher(model, options.teacher, context)
    return AlignPlan(
        texts=options.texts,
        teacher=options.teacher,
        inputs=body.without_head(model).get_embedding_dimension() or 0,
        outputs=teacher.get_embedding_dimension() or 0,
        normalise=body.normalises(teacher),
    )


def forecast(model: SentenceTransformer, plan: AlignPlan) -> Cost:
    """The model with its linear head in place."""
    return measure.predict(model, dense=(plan.inputs, plan.outputs))


def apply(model: SentenceTransformer, plan: AlignPlan, context: Context) -> Applied:
    """Encode the texts with both models and put the best linear map between them into the model."""
    assert context.corpus is not None
    distinct = data.distinct(context.corpus.train(), key=lambda text: text.text)
    texts = list(data.sample(distinct, plan.texts, seed=context.seed))
    teacher = body.embedder(_teacher(model, plan.teacher, context), name="teacher", progress=context.progress)
    student = body.embedder(body.without_head(model), name="student", progress=context.progress)
    strings, kinds = [text.text for text in texts], [text.kind for text in texts]
    found = train.fit_ridge(
        body.encode_by_kind(student, strings, kinds), body.encode_by_kind(teacher, strings, kinds), seed=context.seed
    )
    aligned = body.with_linear_head(model, found.weight, found.bias, normalise=plan.normalise)
    facts = {
        "texts": len(texts),
        "ridge_strength": found.strength,
        "held_out_cosine": round(found.held_out_cosine, 4),
    }
    return Applied(model=aligned, facts=facts)


def _teacher(model: SentenceTransformer, name: str | None, context: Context) -> SentenceTransformer:
    if name is not None:
        return body.load(name)
    if context.original is model:
        raise BadInput("align needs a teacher other than the model itself; name the large model with --teacher")
    return context.original


STEP = Step(
    name="align",
    help="Bring the model into its teacher's vector space, without labels.",
    options=AlignOptions,
    plans=AlignPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
    needs_texts=True,
)

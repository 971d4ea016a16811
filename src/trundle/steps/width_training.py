"""How the sizes of `width` are trained together: one lesson, one set of weights, one run.

The plan decides; here is what it leads to. What this is not: it chooses no widths and no selection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import trundle.data as data
import trundle.model as body
import trundle.train as train
from trundle.model.limits import LONGEST
from trundle.steps import align, contrast
from trundle.steps.align_options import AlignOptions
from trundle.steps.align_texts import targets_for
from trundle.steps.contract import Applied, Beside, Context
from trundle.steps.file_prompts import prompts_by_file
from trundle.steps.learning import learn
from trundle.steps.teacher import Teacher, original_teacher
from trundle.steps.width_sizes import cut_for, fitted_map, folder_name, made_ready

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.model import Map, NarrowModel, Nested
    from trundle.steps.width import WidthPlan
    from trundle.train import Alignment, Contrast


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """The sizes, what they learn from, and how long."""

    narrow: Sequence[NarrowModel]
    task: Alignment | Contrast | None
    """None where the closed form is all that is done."""
    settings: Any = None
    shape: Any = None
    learned_from: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[Fraction, float] = field(default_factory=dict)
    """How near each size's closed-form start comes to the teacher, as a cosine."""


def nest_together(model: SentenceTransformer, plan: WidthPlan, context: Context) -> Applied:
    """Train the model and its sizes in one run."""
    teacher = original_teacher(context)
    wide, how = made_ready(model, plan.select, plan.widths, context, mlp=plan.mlp)
    wide = body.copy_of(wide).float()
    takes = wide.max_seq_length
    cuts = {width: cut_for(wide, width, how) for width in plan.widths}
    lesson = (
        _align_lesson(wide, cuts, plan, teacher, context)
        if plan.objective == "align"
        else _contrast_lesson(wide, cuts, plan, context)
    )
    facts: dict[str, Any] = dict(lesson.facts)
    sizes: dict[str, dict[str, float]] = {str(width): {} for width in (Fraction(1), *plan.widths)}
    for width, cosine in lesson.starts.items():
        sizes[str(width)]["ridge_cosine"] = round(cosine, 4)
    files: dict[str, str | bytes] = {}
    done: Callable[[], None] = lambda: None  # noqa: E731
    if lesson.task is not None:
        nest = train.Nest(wide, lesson.narrow)
        nesting = train.make_nesting(
            nest,
            lesson.task,
            student_weight=plan.options.student_weight,
            per_step=plan.options.per_step,
            seed=context.seed,
        )
        learned = learn(
            wide,
            nesting.objectives,
            nesting,
            lesson.settings,
            label="width",
            key=[plan.model_dump(mode="json"), body.model_digest(model), lesson.learned_from],
            shape=lesson.shape,
            context=context,
            module=nest,
        )
        wide.max_seq_length = takes
        for size, loss in zip(sizes, nesting.losses(), strict=False):
            sizes[size]["validation"] = round(loss, 5)
        facts |= learned.facts
        files |= learned.files
        done = learned.done
    wide = wide.to(next(model.parameters()).dtype).eval()
    nested = body.Nested(
        selection=how,
        widths=plan.widths,
        maps=_maps(plan, lesson),
        normalise=teacher.normalises,
        weights=body.weights_digest(wide),
    )
    return _applied(wide, nested, plan, context, facts=facts | {"sizes": sizes}, files=files, done=done)


def _applied(
    wide: SentenceTransformer,
    nested: Nested,
    plan: WidthPlan,
    context: Context,
    *,
    facts: Mapping[str, Any],
    files: Mapping[str, str | bytes],
    done: Callable[[], None],
) -> Applied:
    """The size that goes on, and all others beside it; only the whole model carries what the sizes are taken by."""
    made = {
        width: Beside(
            model=body.at_width(wide, width, nested.selection, nested),
            files=dict(files) | ({body.NESTED_FILE: nested.as_bytes()} if width == 1 else {}),
        )
        for width in (Fraction(1), *plan.widths)
    }
    result = made.pop(plan.result)
    return Applied(
        model=result.model,
        teacher=context.original if plan.objective == "align" else None,
        facts=facts,
        done=done,
        files=result.files,
        besides={folder_name(width): beside for width, beside in made.items()},
    )


def _maps(plan: WidthPlan, lesson: Lesson) -> dict[Fraction, Map]:
    """Each size's linear map, as it is now."""
    if plan.objective != "align":
        return {}
    linears: list[Any] = [size.own[0] for size in lesson.narrow]
    return {
        width: body.Map(
            weight=linear.linear.weight.detach().float().cpu().numpy(),
            bias=linear.linear.bias.detach().float().cpu().numpy(),
        )
        for width, linear in zip(plan.widths, linears, strict=True)
    }


def _align_lesson(
    wide: SentenceTransformer,
    cuts: Mapping[Fraction, Any],
    plan: WidthPlan,
    teacher: Teacher,
    context: Context,
) -> Lesson:
    """Imitate the model as it came; each size starts from its linear map in closed form."""
    asked = plan.options
    options = AlignOptions(
        steps=asked.steps,
        minutes=asked.minutes,
        texts=asked.texts,
        augment=asked.augment,
        batch_size=asked.batch_size or 32,
        learning_rate=asked.learning_rate,
        warmup=asked.warmup,
        precision=asked.precision,
    )
    body.with_prompts(wide, teacher.prompts, teacher.default_prompt_name)
    targets, validation = targets_for(teacher, options, context)
    facts = {"texts": len(targets), "validation_texts": 0 if validation is None else len(validation)}
    narrow, starts = [], {}
    headless = body.without_head(wide)
    for width, cut in cuts.items():
        linear, starts[width] = fitted_map(wide, cut, targets, context)
        own = body.linear_head(linear.weight, linear.bias, normalise=teacher.normalises)
        narrow.append(body.NarrowModel(headless, cut, own))
    if options.steps == 0:
        return Lesson(narrow=narrow, task=None, facts=facts, starts=starts)
    task = train.make_alignment(
        wide,
        targets,
        validation,
        batch_size=options.batch_size,
        seed=context.seed,
        progress=context.progress,
    )
    looks = 0 if task.validation is None else task.validation.order.per_epoch
    per_epoch = task.batches.order.per_epoch
    return Lesson(
        narrow=narrow,
        task=task,
        settings=align.settings_for(options, per_epoch, looks, context.seed, normalised=targets.normalised),
        shape=train.leaf_cycles(per_epoch, epochs=align.EPOCHS, cycles=align.CYCLES, end=align.LAST_RATE),
        learned_from=[part.folder.name for part in (targets, validation) if part is not None],
        facts=facts,
        starts=starts,
    )


def _contrast_lesson(
    wide: SentenceTransformer, cuts: Mapping[Fraction, Any], plan: WidthPlan, context: Context
) -> Lesson:
    """Learn from labelled tuples: ranking in the batch, and the order of right and wrong pairs."""
    asked = plan.options
    options = contrast.ContrastOptions(
        objective="infonce+angle",
        train="full",
        steps=asked.steps,
        minutes=asked.minutes,
        tuples=asked.texts,
        batch_size=asked.batch_size or 64,
        mini_batch=asked.mini_batch,
        learning_rate=asked.learning_rate,
        warmup=asked.warmup,
        precision=asked.precision,
    )
    examples, validation = contrast.examples_for(options, context)
    longest = asked.max_length or LONGEST
    wide.max_seq_length = min(wide.max_seq_length or longest, longest)
    narrow = [body.NarrowModel(wide, cut) for cut in cuts.values()]
    task = train.make_contrast(
        wide,
        examples,
        validation,
        prompts=prompts_by_file(wide, {}, [*examples, *validation]),
        objective=options.objective,
        batch_size=options.batch_size,
        mini_batch=options.mini_batch,
        seed=context.seed,
    )
    return Lesson(
        narrow=narrow,
        task=task,
        settings=contrast.settings_for(options, context.seed),
        shape=train.linear(),
        learned_from=data.fingerprint([*examples, "validation", *validation]),
        facts={"tuples": len(examples), "validation_tuples": len(validation)},
    )

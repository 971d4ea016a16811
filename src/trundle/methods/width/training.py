"""How the sizes of `width` are trained together: one lesson, one set of weights, one run.

The plan decides; here is what it leads to. What this is not: it chooses no widths and no selection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from accelerate.utils import send_to_device
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.data.sampling import fingerprint
from trundle.methods.align import CYCLES, EPOCHS, AlignOptions
from trundle.methods.align.align import LAST_RATE, settings_for
from trundle.methods.align.leaf import make_align_task
from trundle.methods.align.teacher_vectors import targets_for
from trundle.methods.contract import LONGEST, Applied, Beside, Context
from trundle.methods.contrast import ContrastOptions, contrast
from trundle.methods.contrast.contrast import examples_for
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import prompts_by_file, run_training
from trundle.methods.width import _folder_name
from trundle.methods.width.narrow import _NarrowModel
from trundle.methods.width.sizes import _cut_for, _fitted_map, _made_ready
from trundle.model.heads import copy_of, linear_head, with_prompts, without_head
from trundle.model.nested import NESTED_FILE, Map, Nested, at_width
from trundle.model.save import model_digest, weights_digest
from trundle.teacher.teacher import Teacher, original_teacher
from trundle.train.batches import Batches, Indices
from trundle.train.loop import TrainingTask
from trundle.train.trainer import leaf_cycles, linear

if TYPE_CHECKING:
    from trundle.methods.width import WidthPlan

_B = TypeVar("_B")
_Weighed = tuple[_B, tuple[float, ...]]
"""A batch and what each model's loss on it counts, the wide one's first."""


_MEASURED_BATCHES = 32


class _Nest(nn.Module):
    """One set of weights, and all the models in it, the wide one first."""

    def __init__(self, wide: SentenceTransformer, narrow: Sequence[_NarrowModel]) -> None:
        super().__init__()
        self.wide = wide
        self.narrow = nn.ModuleList(narrow)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The wide model and the narrow ones, widest first."""
        return (self.wide, *self.narrow)


@dataclass(frozen=True, kw_only=True)
class _Nesting(Generic[_B]):
    """A nest and how it is fed and judged."""

    nest: _Nest
    loss: Callable[[nn.Module, _B], Tensor]
    batches: Batches[_Weighed[_B]]
    validation: Batches[_Weighed[_B]] | None

    @property
    def objectives(self) -> tuple[Callable[[nn.Module, _Weighed[_B]], Tensor], ...]:
        """One for each model, in the order of `nest.models`."""
        return tuple(partial(self._objective, number) for number in range(len(self.nest.models)))

    def _objective(self, number: int, _nest: nn.Module, batch: _Weighed[_B]) -> Tensor:
        inner, weights = batch
        if not weights[number]:
            return torch.zeros((), device=self.nest.wide.device)
        return weights[number] * self.loss(self.nest.models[number], inner)

    @torch.no_grad()
    def losses(self) -> tuple[float, ...]:
        """Each model's own loss, over some validation batches."""
        if self.validation is None:
            return ()
        order, totals, texts = self.validation.order, np.zeros(len(self.nest.models)), 0
        self.nest.eval()
        for indices in map(order.batch, range(min(order.per_epoch, _MEASURED_BATCHES))):
            inner, _ = send_to_device(self.validation.load(indices), self.nest.wide.device)
            totals += len(indices) * np.asarray(
                [float(self.loss(model, inner)) for model in self.nest.models]
            )
            texts += len(indices)
        return tuple((totals / texts).tolist())


def _make_nesting(
    nest: _Nest,
    task: TrainingTask[Any],
    *,
    student_weight: float,
    per_step: int | None = None,
    seed: int = 0,
) -> _Nesting[Any]:
    """Give every model of a nest the task that the wide one was given."""
    narrow = len(nest.narrow)

    def weighed(batches: Batches[Any], count: int | None) -> Batches[_Weighed[Any]]:
        def load(indices: Indices) -> _Weighed[Any]:
            drawn = (1.0,) * narrow if count is None else _drawn_sizes(narrow, count, indices, seed=seed)
            return batches.load(indices), (1 - student_weight, *(student_weight * one for one in drawn))

        return Batches(order=batches.order, load=load)

    return _Nesting(
        nest=nest,
        loss=task.losses[0],
        batches=weighed(task.batches, per_step),
        validation=None if task.validation is None else weighed(task.validation, None),
    )


def _drawn_sizes(narrow: int, count: int, batch: Indices, *, seed: int) -> tuple[float, ...]:
    """How often each narrow model counts for a batch: the last always once, `count` − 1 of the others in the others' stead."""
    others = narrow - 1
    chosen = min(count - 1, others)
    dice = np.random.default_rng([seed, *np.asarray(batch[:8]).tolist()])
    drawn = set(dice.permutation(others)[:chosen].tolist())
    return (*(others / chosen if number in drawn else 0.0 for number in range(others)), 1.0)


@dataclass(frozen=True, kw_only=True)
class _Lesson:
    """The sizes, what they learn from, and how long."""

    narrow: Sequence[_NarrowModel]
    task: TrainingTask[Any] | None
    """None where the closed form is all that is done."""
    settings: Any = None
    shape: Any = None
    learned_from: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[Fraction, float] = field(default_factory=dict)
    """How near each size's closed-form start comes to the teacher, as a cosine."""


def _nest_together(model: SentenceTransformer, plan: WidthPlan, context: Context) -> Applied:
    """Train the model and its sizes in one run."""
    teacher = original_teacher(context)
    wide, how = _made_ready(model, plan.select, plan.widths, context, mlp=plan.mlp)
    wide = copy_of(wide).float()
    takes = wide.max_seq_length
    cuts = {width: _cut_for(wide, width, how) for width in plan.widths}
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
    done: Callable[[], None] = lambda: None
    if lesson.task is not None:
        nest = _Nest(wide, lesson.narrow)
        nesting = _make_nesting(
            nest,
            lesson.task,
            student_weight=plan.options.student_weight,
            per_step=plan.options.per_step,
            seed=context.seed,
        )
        learned = run_training(
            wide,
            TrainingTask(
                name="width",
                losses=nesting.objectives,
                batches=nesting.batches,
                validation=nesting.validation,
            ),
            lesson.settings,
            key=[plan.model_dump(mode="json"), model_digest(model), lesson.learned_from],
            schedule=lesson.shape,
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
    nested = Nested(
        selection=how,
        widths=plan.widths,
        maps=_maps(plan, lesson),
        normalise=teacher.normalises,
        weights=weights_digest(wide),
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
            model=at_width(wide, width, nested.selection, nested),
            files=dict(files) | ({NESTED_FILE: nested.as_bytes()} if width == 1 else {}),
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
        besides={_folder_name(width): beside for width, beside in made.items()},
    )


def _maps(plan: WidthPlan, lesson: _Lesson) -> dict[Fraction, Map]:
    """Each size's linear map, as it is now."""
    if plan.objective != "align":
        return {}
    linears: list[Any] = [size.own[0] for size in lesson.narrow]
    return {
        width: Map(
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
) -> _Lesson:
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
    with_prompts(wide, teacher.prompts, teacher.default_prompt_name)
    targets, validation = targets_for(teacher, options, context)
    facts = {"texts": len(targets), "validation_texts": 0 if validation is None else len(validation)}
    narrow, starts = [], {}
    headless = without_head(wide)
    for width, cut in cuts.items():
        linear, starts[width] = _fitted_map(wide, cut, targets, context)
        own = linear_head(linear.weight, linear.bias, normalise=teacher.normalises)
        narrow.append(_NarrowModel(headless, cut, own))
    if options.steps == 0:
        return _Lesson(narrow=narrow, task=None, facts=facts, starts=starts)
    task = make_align_task(
        wide,
        targets,
        validation,
        batch_size=options.batch_size,
        seed=context.seed,
        progress=context.progress,
    )
    looks = 0 if task.validation is None else task.validation.order.per_epoch
    per_epoch = task.batches.order.per_epoch
    return _Lesson(
        narrow=narrow,
        task=task,
        settings=settings_for(options, per_epoch, looks, context.seed, normalised=targets.normalised),
        shape=leaf_cycles(per_epoch, epochs=EPOCHS, cycles=CYCLES, end=LAST_RATE),
        learned_from=[part.folder.name for part in (targets, validation) if part is not None],
        facts=facts,
        starts=starts,
    )


def _contrast_lesson(
    wide: SentenceTransformer, cuts: Mapping[Fraction, Any], plan: WidthPlan, context: Context
) -> _Lesson:
    """Learn from labelled tuples: ranking in the batch, and the order of right and wrong pairs."""
    asked = plan.options
    options = ContrastOptions(
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
    examples, validation = examples_for(options, context)
    longest = asked.max_length or LONGEST
    wide.max_seq_length = min(wide.max_seq_length or longest, longest)
    narrow = [_NarrowModel(wide, cut) for cut in cuts.values()]
    task = make_contrast_task(
        wide,
        examples,
        validation,
        options,
        prompts=prompts_by_file(wide, {}, [*examples, *validation]),
        seed=context.seed,
    )
    return _Lesson(
        narrow=narrow,
        task=task,
        settings=contrast.settings_for(options, context.seed),
        shape=linear(),
        learned_from=fingerprint([*examples, "validation", *validation]),
        facts={"tuples": len(examples), "validation_tuples": len(validation)},
    )

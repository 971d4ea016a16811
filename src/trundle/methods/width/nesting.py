"""Trains the sizes of `width` together: one set of weights, one task, one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.data.sampling import fingerprint, sample
from trundle.embedder import LONGEST
from trundle.methods.align import AlignOptions
from trundle.methods.align.align import schedule_for, settings_for
from trundle.methods.align.leaf import fit_ridge, make_align_task
from trundle.methods.align.teacher_vectors import RIDGE_TEXTS, targets_for
from trundle.methods.contract import AdditionalModel, Applied, Context
from trundle.methods.contrast import ContrastOptions, contrast
from trundle.methods.contrast.contrast import examples_for
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import prompts_by_file, run_training
from trundle.methods.width import _folder_name, _WidthPlan
from trundle.methods.width.importance import _cut_for, _prepare
from trundle.methods.width.narrow import _NarrowModel
from trundle.model import surgery
from trundle.model.encode import embedder
from trundle.model.heads import copy_of, linear_head, with_prompts, without_head
from trundle.model.nested import NESTED_FILE, Map, Nested, at_width
from trundle.model.save import model_digest, weights_digest
from trundle.model.surgery import Cut
from trundle.teacher.labelling import encode_by_role
from trundle.teacher.targets import Targets
from trundle.teacher.teacher import Teacher, original_teacher
from trundle.train.batches import Batches, Indices
from trundle.train.blocks import changed_blocks
from trundle.train.captured import captured_backbone
from trundle.train.loop import TrainingTask
from trundle.train.trainer import linear

_Weighted = tuple[Any, tuple[float, ...]]
"""A batch and the weight of each model's loss on it, the wide model's first."""
_Cuts = Mapping[Fraction, Cut]
_MEASURED_BATCHES = 32
_SHARED = ("steps", "minutes", "accumulate", "learning_rate", "warmup", "precision")
"""Options that are passed to `align` or `contrast` unchanged."""


class _Nest(nn.Module):
    """One set of weights and all the models in it."""

    def __init__(self, wide: SentenceTransformer, narrow: Sequence[_NarrowModel]) -> None:
        super().__init__()
        self.wide = wide
        self.narrow = nn.ModuleList(narrow)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return (self.wide, *self.narrow)

    @property
    def backbones(self) -> list[Any]:
        narrow: Any = self.narrow
        bodies = (self.wide, *(size.body for size in narrow))
        return [surgery.transformer_of(body).model for body in bodies]


@contextmanager
def _captured(nest: _Nest, say: Callable[[str], None], *, keep: bool) -> Iterator[None]:
    """Inside this context, all sizes make their passes as CUDA graphs."""
    wide, longest = nest.backbones[0], nest.wide.max_seq_length or LONGEST
    with ExitStack() as graphs:
        for backbone in nest.backbones:
            graphs.enter_context(captured_backbone(backbone, of=wide, longest=longest, say=say, keep=keep))
        yield


@dataclass(frozen=True, kw_only=True)
class _Nesting:
    """Gives every model of a nest the task of the wide model."""

    nest: _Nest
    task: TrainingTask[Any]
    student_weight: float
    per_step: int | None = None
    seed: int = 0

    @property
    def batches(self) -> Batches[_Weighted]:
        return self._weighted(self.task.batches, self.per_step)

    @property
    def validation(self) -> Batches[_Weighted] | None:
        return None if self.task.validation is None else self._weighted(self.task.validation, None)

    def _weighted(self, batches: Batches[Any], count: int | None) -> Batches[_Weighted]:
        narrow, share = len(self.nest.narrow), self.student_weight

        def load(indices: Indices) -> _Weighted:
            drawn = (1.0,) * narrow if count is None else _drawn_sizes(narrow, count, indices, seed=self.seed)
            return batches.load(indices), (1 - share, *(share * one for one in drawn))

        return Batches(order=batches.order, load=load)

    @property
    def objectives(self) -> tuple[Callable[[nn.Module, _Weighted], Tensor], ...]:
        return tuple(partial(self._objective, number) for number in range(len(self.nest.models)))

    def _objective(self, number: int, _nest: nn.Module, batch: _Weighted) -> Tensor:
        inner, weights = batch
        if not weights[number]:
            return torch.zeros((), device=self.nest.wide.device)
        return weights[number] * self.task.losses[0](self.nest.models[number], inner)

    @torch.no_grad()
    def losses(self) -> tuple[float, ...]:
        """Each model's own loss on some validation batches."""
        batches = self.task.validation
        if batches is None:
            return ()
        order, totals, texts = batches.order, np.zeros(len(self.nest.models)), 0
        self.nest.eval()
        for indices in map(order.batch, range(min(order.per_epoch, _MEASURED_BATCHES))):
            batch = send_to_device(batches.load(indices), self.nest.wide.device)
            losses = [float(self.task.losses[0](model, batch)) for model in self.nest.models]
            totals += len(indices) * np.asarray(losses)
            texts += len(indices)
        return tuple((totals / texts).tolist())


def _drawn_sizes(narrow: int, count: int, batch: Indices, *, seed: int) -> tuple[float, ...]:
    """Loss weights for a batch: 1 for the narrowest model; `count` − 1 others stand for the rest."""
    others = narrow - 1
    chosen = min(count - 1, others)
    rng = np.random.default_rng([seed, *np.asarray(batch[:8]).tolist()])
    drawn = set(rng.permutation(others)[:chosen].tolist())
    return (*(others / chosen if number in drawn else 0.0 for number in range(others)), 1.0)


@dataclass(frozen=True, kw_only=True)
class _NestedTraining:
    """The narrow models, their task, and how long it runs."""

    narrow: Sequence[_NarrowModel]
    task: TrainingTask[Any] | None
    """None if only the closed form is computed."""
    settings: Any = None
    shape: Any = None
    learned_from: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[Fraction, float] = field(default_factory=dict)
    """The cosine between each size's closed-form start and the teacher."""


def _nest_together(model: SentenceTransformer, plan: _WidthPlan, context: Context) -> Applied:
    teacher = original_teacher(context)
    wide, how = _prepare(model, plan.select, plan.widths, context, mlp=plan.mlp)
    wide = copy_of(wide).float()
    longest = wide.max_seq_length
    cuts = {width: _cut_for(wide, width, how) for width in plan.widths}
    if plan.objective == "align":
        training = _align_training(wide, cuts, plan, teacher, context)
    else:
        training = _contrast_training(wide, cuts, plan, context)
    widths = (Fraction(1), *plan.widths)
    sizes: dict[str, dict[str, float]] = {str(width): {} for width in widths}
    for width, cosine in training.starts.items():
        sizes[str(width)]["ridge_cosine"] = round(cosine, 4)
    learned = None
    if training.task is not None:
        nest = _Nest(wide, training.narrow)
        nesting = _Nesting(
            nest=nest,
            task=training.task,
            student_weight=plan.options.student_weight,
            per_step=plan.options.per_step,
            seed=context.seed,
        )
        task = TrainingTask(
            name="width", losses=nesting.objectives, batches=nesting.batches, validation=nesting.validation
        )
        backbones, captures = nest.backbones, torch.cuda.is_available()
        with (
            changed_blocks(*backbones, compiled=plan.options.compile),
            _captured(nest, context.progress.say, keep=plan.options.mini_batch is None)
            if captures
            else nullcontext(),
        ):
            learned = run_training(
                wide,
                task,
                training.settings,
                key=[plan.model_dump(mode="json"), model_digest(model), training.learned_from],
                schedule=training.shape,
                context=context,
                module=nest,
            )
        wide.max_seq_length = longest
        for size, loss in zip(sizes, nesting.losses(), strict=False):
            sizes[size]["validation"] = round(loss, 5)
    wide = wide.to(next(model.parameters()).dtype).eval()
    sized = zip(plan.widths, training.narrow, strict=True)
    nested = Nested(
        selection=how,
        widths=plan.widths,
        maps={width: _map_of(size) for width, size in sized if size.own},
        normalise=teacher.normalises,
        weights=weights_digest(wide),
    )
    files = {} if learned is None else dict(learned.files)
    made = {
        width: AdditionalModel(
            model=at_width(wide, width, how, nested),
            # Only the full model carries the file by which its sizes are extracted.
            files=files | ({NESTED_FILE: nested.as_bytes()} if width == 1 else {}),
        )
        for width in widths
    }
    result = made.pop(plan.result)
    return Applied(
        model=result.model,
        teacher=context.original if plan.objective == "align" else None,
        facts={**training.facts, **({} if learned is None else learned.facts), "sizes": sizes},
        done=(lambda: None) if learned is None else learned.done,
        files=result.files,
        additional={_folder_name(width): other for width, other in made.items()},
    )


def _map_of(size: _NarrowModel) -> Map:
    head: Any = size.own[0]
    weight, bias = (part.detach().float().cpu().numpy() for part in (head.linear.weight, head.linear.bias))
    return Map(weight=weight, bias=bias)


def _fitted_map(small: SentenceTransformer, targets: Targets, context: Context) -> tuple[Map, float]:
    """A size's linear map into the targets' space in closed form, and its mean cosine on held-out texts."""
    positions = sample(range(len(targets)), RIDGE_TEXTS, seed=context.seed)
    pooled = embedder(small, name=f"width {small.get_embedding_dimension()}", progress=context.progress)
    inputs = encode_by_role(pooled, targets.chosen(positions))
    found = fit_ridge(inputs, targets.vectors(positions), seed=context.seed)
    return Map(weight=found.weight, bias=found.bias), found.held_out_cosine


def _align_training(
    wide: SentenceTransformer, cuts: _Cuts, plan: _WidthPlan, teacher: Teacher, context: Context
) -> _NestedTraining:
    """Imitate the original model; each size starts from its linear map in closed form."""
    shared = plan.options.model_dump(include={*_SHARED, "texts", "augment"})
    options = AlignOptions(**shared, batch_size=plan.options.batch_size or 32)
    with_prompts(wide, teacher.prompts, teacher.default_prompt_name)
    targets, validation = targets_for(teacher, options, context)
    facts = {"texts": len(targets), "validation_texts": 0 if validation is None else len(validation)}
    narrow, starts = [], {}
    headless = without_head(wide)
    for width, cut in cuts.items():
        linear, starts[width] = _fitted_map(surgery.cut(headless, cut), targets, context)
        own = linear_head(linear.weight, linear.bias, normalise=teacher.normalises)
        narrow.append(_NarrowModel(headless, cut, own))
    if options.steps == 0:
        return _NestedTraining(narrow=narrow, task=None, facts=facts, starts=starts)
    task = make_align_task(wide, targets, validation, batch_size=options.batch_size, context=context)
    validation_steps = 0 if task.validation is None else task.validation.order.per_epoch
    per_epoch, unit = -(-task.batches.order.per_epoch // options.accumulate), targets.normalised
    return _NestedTraining(
        narrow=narrow,
        task=task,
        settings=settings_for(options, per_epoch, validation_steps, context.seed, normalised=unit),
        shape=schedule_for(options, per_epoch),
        learned_from=[part.folder.name for part in (targets, validation) if part is not None],
        facts=facts,
        starts=starts,
    )


def _contrast_training(
    wide: SentenceTransformer, cuts: _Cuts, plan: _WidthPlan, context: Context
) -> _NestedTraining:
    """Train on labelled tuples: in-batch ranking, and the order of correct and incorrect pairs."""
    given = plan.options
    options = ContrastOptions(
        **given.model_dump(include={*_SHARED, "mini_batch"}),
        objective="infonce+angle",
        train="full",
        tuples=given.texts,
        batch_size=given.batch_size or 64,
    )
    examples, validation = examples_for(options, context)
    longest = given.max_length or LONGEST
    wide.max_seq_length = min(wide.max_seq_length or longest, longest)
    prompts = prompts_by_file(wide, {}, [*examples, *validation])
    return _NestedTraining(
        narrow=[_NarrowModel(wide, cut) for cut in cuts.values()],
        task=make_contrast_task(
            wide,
            examples,
            validation,
            options,
            prompts=prompts,
            seed=context.seed,
            captured=torch.cuda.is_available(),
        ),
        settings=contrast.settings_for(options, context.seed),
        shape=linear(),
        learned_from=fingerprint([*examples, "validation", *validation]),
        facts={"tuples": len(examples), "validation_tuples": len(validation)},
    )

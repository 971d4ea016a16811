"""Plans and applies `contrast`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from sentence_transformers import SentenceTransformer
from torch import nn

from trundle.data.examples import Example
from trundle.data.sampling import distinct, fingerprint, sample
from trundle.embedder import LONGEST
from trundle.errors import BadInput
from trundle.methods.contract import Applied, Context
from trundle.methods.contrast import _FULL_RATE, _LORA_RATE, ContrastOptions, _ContrastPlan, _steps
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import (
    NOT_VALIDATED,
    VALIDATIONS,
    check_prompted,
    check_same_tokens,
    prompts_by_file,
    run_training,
    validation_size,
)
from trundle.model.cost import Cost, cost
from trundle.model.heads import (
    check_first_words_are_pooled,
    copy_of,
    with_bidirectional_attention,
    with_pooling,
)
from trundle.model.layout import layout_of
from trundle.model.matrices import prunable
from trundle.model.save import model_digest
from trundle.model.surgery import transformer_of
from trundle.progress import process_count
from trundle.teacher.teacher import find_teacher
from trundle.train.blocks import (
    check_compiler,
    compiled_blocks,
    keep_zeros_in_adapter,
    keeps_zeros,
    recomputed_blocks,
)
from trundle.train.loop import TrainSettings
from trundle.train.trainer import linear, precision_for

_ADAPTER = "default"


def plan(model: SentenceTransformer, options: ContrastOptions, context: Context) -> _ContrastPlan:
    """Checks the model, the options and the first tuples; `apply` reads the rest."""
    if process_count() > 1:
        raise BadInput("contrast runs in one process only; start it without torchrun or accelerate launch")
    if context.corpus is None:
        raise BadInput("contrast trains on labelled tuples; pass them with --data")
    if next(context.corpus.examples(), None) is None:
        raise BadInput("there are no labelled tuples; pass a file with a query and a positive column")
    limit = model.max_seq_length or LONGEST
    if options.max_length is not None and options.max_length > limit:
        raise BadInput(f"the model takes at most {limit} tokens; pass a max_length up to that")
    if "angle" in options.objective and (width := model.get_embedding_dimension() or 0) % 2:
        raise BadInput(f"the angle objective halves vectors, and {width} is odd; use infonce or cosine")
    if options.compile:
        check_compiler()
    _teacher(model, options, context)
    _prepared(model, options)
    layout = layout_of(transformer_of(model).model)
    of = sum(weight.numel() for weight in model.parameters())
    adapters = sum(
        options.rank * sum(layout.shape(parameter))
        for parameter in layout.parameters
        if parameter.block is not None and parameter.multiplies
    )
    return _ContrastPlan(
        options=options,
        max_length=options.max_length or min(limit, LONGEST),
        trained=adapters if options.train == "lora" else of,
        of=of,
    )


def forecast(model: SentenceTransformer, _plan: _ContrastPlan) -> Cost:
    """Returns the present cost: training changes no size, and adapters are merged."""
    return cost(model)


def apply(model: SentenceTransformer, plan: _ContrastPlan, context: Context) -> Applied:
    """Reads the tuples, trains, and merges the adapters."""
    options = plan.options
    assert context.corpus is not None
    check_prompted(options.prompts, context.corpus)
    student = copy_of(_prepared(model, options)).float()
    given = {"query": options.query_prompt, "document": options.document_prompt}
    student.prompts = {**student.prompts, **{role: text for role, text in given.items() if text is not None}}
    check_first_words_are_pooled(student)
    examples, validation = examples_for(options, context)
    prompts = prompts_by_file(student, options.prompts, [*examples, *validation])
    original_length, student.max_seq_length = student.max_seq_length, plan.max_length
    adapted, keep_zeros = None, options.keep_zeros
    if options.train == "lora":
        adapted = _add_adapters(
            student, rank=options.rank, dropout=options.lora_dropout, seed=context.seed, keep_zeros=keep_zeros
        )
        keep_zeros = False  # the adapters keep them
    teacher = _teacher(model, options, context)
    task = make_contrast_task(
        student, examples, validation, options, prompts=prompts, teacher=teacher, seed=context.seed
    )
    backbone = transformer_of(student).model
    with (
        recomputed_blocks(backbone) if options.gradient_checkpointing else nullcontext(),
        compiled_blocks(backbone) if options.compile else nullcontext(),
    ):
        trained = run_training(
            student,
            task,
            settings_for(options, context.seed),
            key=[
                plan.model_dump(mode="json"),
                model_digest(model),
                None if teacher is None else model_digest(teacher),
                fingerprint([*examples, "validation", *validation]),
            ],
            schedule=linear(),
            context=context,
            keep_zeros=keep_zeros,
        )
    if adapted is not None:
        student = adapted.merge()
    student.max_seq_length = original_length
    facts = {
        "tuples": len(examples),
        "validation_tuples": len(validation),
        "sources": sorted({Path(example.source).name for example in examples}),
        "hard_negatives": sum(len(example.negatives[: options.negatives]) for example in examples),
    }
    return Applied(
        model=student.to(next(model.parameters()).dtype),
        facts=facts | trained.facts,
        done=trained.done,
        files=trained.files,
    )


def _prepared(model: SentenceTransformer, options: ContrastOptions) -> SentenceTransformer:
    if options.attention == "bidirectional":
        model = with_bidirectional_attention(model)
    if options.pooling == "keep" and options.pool_prompts is None:
        return model
    mode = None if options.pooling == "keep" else options.pooling
    return with_pooling(model, mode, include_prompt=options.pool_prompts)


def _teacher(
    model: SentenceTransformer, options: ContrastOptions, context: Context
) -> SentenceTransformer | None:
    if options.objective != "distil":
        if options.teacher is not None:
            raise BadInput("only the objective distil uses a teacher; leave teacher out, or use distil")
        return None
    found = find_teacher(model, options.teacher, None, context).model
    if found is None:
        raise BadInput(f"distil needs a teacher that is a model, not {options.teacher}; pass a folder")
    check_same_tokens(model, found, "distil", "use the method align")
    return found


def examples_for(options: ContrastOptions, context: Context) -> tuple[list[Example], list[Example]]:
    """Returns the training tuples, no more than the run can use, and the validation tuples."""
    assert context.corpus is not None
    steps = _steps(options)
    limits = [limit for limit in (options.tuples, steps and steps * options.batch_size) if limit]
    chosen = distinct(
        context.corpus.examples(),
        key=lambda example: json.dumps([example.query, example.positive, *example.negatives]),
    )
    examples = sample(chosen, min(limits), seed=context.seed) if limits else list(chosen)
    most = validation_size(_validate_every(options), options.batch_size)
    validation = sample(context.corpus.validation_examples(), most, seed=context.seed)
    if not validation:
        context.progress.say(NOT_VALIDATED.format("tuples"))
    return examples, validation


def _validate_every(options: ContrastOptions) -> int:
    steps = _steps(options)
    return 100 if steps is None else max(1, steps // VALIDATIONS)


def settings_for(options: ContrastOptions, seed: int) -> TrainSettings:
    """Returns the training settings of these options."""
    return TrainSettings(
        steps=_steps(options),
        minutes=options.minutes,
        learning_rate=options.learning_rate or (_LORA_RATE if options.train == "lora" else _FULL_RATE),
        warmup=options.warmup,
        precision=precision_for(options.precision),
        validate_every=_validate_every(options),
        checkpoint_every=_validate_every(options),
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class _Adapted:
    """A frozen model with trainable LoRA adapters."""

    model: SentenceTransformer
    tuner: LoraModel
    after_merge: tuple[Callable[[], None], ...] = ()
    """Set pruned weights to zero again."""

    def merge(self) -> SentenceTransformer:
        """Adds the adapters to their weights; the model has the same parts and names as before."""
        transformer_of(self.model).model = self.tuner.merge_and_unload()
        for finish in self.after_merge:
            finish()
        return self.model.requires_grad_(True)


def _add_adapters(
    model: SentenceTransformer,
    *,
    rank: int = 16,
    dropout: float = 0.05,
    seed: int,
    keep_zeros: bool | None = None,
) -> _Adapted:
    """Freezes the model and adds LoRA adapters, initially zero, to every linear layer of attention and MLP.

    With `keep_zeros`, adapters of a matrix with pruned weights change none of these, and have no dropout.
    This is slow, so by default it is done only for pruned models.
    """
    keep_zeros = keeps_zeros(model, keep_zeros)
    model.requires_grad_(False)
    backbone = transformer_of(model).model
    matrices = prunable(layout_of(backbone), attention=True)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=[matrix.name for matrix in matrices],
        fan_in_fan_out=matrices[0].transposed,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuner = LoraModel(backbone, config, _ADAPTER)
    finish = []
    if keep_zeros:
        for matrix in matrices:
            layer: Any = backbone.get_submodule(matrix.name)
            if bool((layer.get_base_layer().weight == 0).any()):
                layer.lora_dropout[_ADAPTER] = nn.Identity()
                finish.append(keep_zeros_in_adapter(layer, _ADAPTER, transposed=matrix.transposed))
    return _Adapted(model=model, tuner=tuner, after_merge=tuple(finish))

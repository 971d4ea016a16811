"""Plans and applies `contrast`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, LoraModel
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.data.examples import Example
from trundle.data.sampling import distinct, fingerprint, sample
from trundle.embedder import LONGEST
from trundle.errors import BadInput
from trundle.methods import training
from trundle.methods.contract import Applied, Context, Given
from trundle.methods.contrast import _FULL_RATE, _LORA_RATE, ContrastOptions, _ContrastPlan, _steps
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.model.cost import Cost, cost
from trundle.model.heads import (
    chat_start,
    check_first_words_are_pooled,
    copy_of,
    prompts_by_role,
    with_bidirectional_attention,
    with_pooling,
)
from trundle.model.layout import layout_of
from trundle.model.matrices import prunable
from trundle.model.save import model_digest
from trundle.model.surgery import transformer_of, with_modules
from trundle.teacher.teacher import find_teacher
from trundle.train.blocks import changed_blocks, check_compiler, keep_zeros_in_adapter, keeps_zeros
from trundle.train.captured import captured_backbone
from trundle.train.loop import TrainSettings
from trundle.train.trainer import linear, precision_for

_ADAPTER = "default"


def plan(model: SentenceTransformer, options: ContrastOptions, context: Context) -> _ContrastPlan:
    """Checks the model, the options and the first tuples; `apply` reads the rest."""
    limit = model.max_seq_length or LONGEST
    if options.max_length is not None and options.max_length > limit:
        raise BadInput(f"the model takes at most {limit} tokens; pass a max_length up to that")
    if "angle" in options.objective and (width := model.get_embedding_dimension() or 0) % 2:
        raise BadInput(f"the angle objective halves vectors, and {width} is odd; use infonce or cosine")
    if options.compile:
        check_compiler()
    _teacher(model, options, context)
    prepared(model, options)
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
    training.check_prompted(options.prompts, context.corpus)
    whole, adapts = prepared(model, options), options.train == "lora"
    precision = precision_for(options.precision)
    student = _frozen_copy(whole, precision) if adapts else copy_of(whole).float()
    examples, validation = examples_for(options, context)
    prompts = training.prompts_by_file(student, _file_prompts(model, options), [*examples, *validation])
    original_length, student.max_seq_length = student.max_seq_length, plan.max_length
    adapted, keep_zeros = None, options.keep_zeros
    if adapts:
        adapted = _add_adapters(
            student, rank=options.rank, dropout=options.lora_dropout, seed=context.seed, keep_zeros=keep_zeros
        )
        adapted = replace(adapted, weights=tuple(whole.parameters()))
        keep_zeros = False  # the adapters keep them
    teacher = _teacher(model, options, context)
    # Recomputing blocks one by one takes less memory than a graph of all of them.
    captures = torch.cuda.is_available() and not options.gradient_checkpointing
    task = make_contrast_task(
        student,
        examples,
        validation,
        options,
        prompts=prompts,
        teacher=teacher,
        seed=context.seed,
        captured=captures,
    )
    backbone, say = transformer_of(student).model, context.progress.say
    with (
        changed_blocks(backbone, compiled=options.compile, recomputed=options.gradient_checkpointing),
        captured_backbone(backbone, longest=plan.max_length, say=say, keep=options.mini_batch is None)
        if captures
        else nullcontext(),
    ):
        trained = training.run_training(
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


def prepared(model: SentenceTransformer, options: ContrastOptions) -> SentenceTransformer:
    """Returns the model with the attention, pooling and prompts it is trained with, sharing its weights."""
    if options.attention == "bidirectional":
        model = with_bidirectional_attention(model)
    if options.pooling != "keep" or options.pool_prompts is not None:
        mode = None if options.pooling == "keep" else options.pooling
        model = with_pooling(model, mode, include_prompt=options.pool_prompts)
    found = with_modules(model, list(model))
    given = {"query": options.query_prompt, "document": options.document_prompt}
    found.prompts = {**model.prompts, **{role: text for role, text in given.items() if text is not None}}
    if start := _chat(model, options):
        own = prompts_by_role(found)
        found.prompts |= {role: start + own[role].removeprefix(start) for role in ("query", "document")}
        found.default_prompt_name = found.default_prompt_name or "document"
    check_first_words_are_pooled(found)
    return found


def _file_prompts(model: SentenceTransformer, options: ContrastOptions) -> dict[str, Given]:
    """Returns the prompts given for data files, as they are put before texts."""
    start = _chat(model, options)

    def whole(given: Given) -> Given:
        return start + given if isinstance(given, str) else {role: start + own for role, own in given.items()}

    return {file: whole(given) for file, given in options.prompts.items()}


def _chat(model: SentenceTransformer, options: ContrastOptions) -> str:
    return chat_start(model) if options.chat else ""


def _teacher(
    model: SentenceTransformer, options: ContrastOptions, context: Context
) -> SentenceTransformer | None:
    if options.objective != "distil":
        return None
    found = find_teacher(model, options.teacher, None, context).model
    if found is None:
        raise BadInput(f"distil needs a teacher that is a model, not {options.teacher}; pass a folder")
    training.check_same_tokens(model, found, "distil", "use the method align")
    return found


def examples_for(options: ContrastOptions, context: Context) -> tuple[list[Example], list[Example]]:
    """Returns the training tuples, no more than the run can use, and the validation tuples."""
    assert context.corpus is not None
    steps = _steps(options)
    each = options.accumulate * options.batch_size
    limits = [limit for limit in (options.tuples, steps and steps * each) if limit]
    chosen = distinct(
        context.corpus.examples(),
        key=lambda example: json.dumps([example.query, example.positive, *example.negatives]),
    )
    examples = sample(chosen, min(limits), seed=context.seed) if limits else list(chosen)
    most = training.validation_size(_validate_every(options), options.batch_size)
    validation = sample(context.corpus.validation_examples(), most, seed=context.seed)
    if not validation:
        context.progress.say(training.NOT_VALIDATED.format("tuples"))
    return examples, validation


def _validate_every(options: ContrastOptions) -> int:
    steps = _steps(options)
    return 100 if steps is None else max(1, steps // training.VALIDATIONS)


def settings_for(options: ContrastOptions, seed: int) -> TrainSettings:
    """Returns the training settings of these options."""
    return TrainSettings(
        steps=_steps(options),
        minutes=options.minutes,
        accumulate=options.accumulate,
        learning_rate=options.learning_rate or (_LORA_RATE if options.train == "lora" else _FULL_RATE),
        warmup=options.warmup,
        precision=precision_for(options.precision),
        validate_every=_validate_every(options),
        seed=seed,
    )


def _frozen_copy(model: SentenceTransformer, precision: Literal["fp32", "bf16"]) -> SentenceTransformer:
    """Copies a model, with weights that can't be trained, in the precision of the training.

    Weights that have this precision already are shared, so that a large model is in memory once. Buffers stay
    as they are: half precision is too coarse for the frequencies of rotary positions.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    weights = {
        id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, dict[int, Any](weights))


@dataclass(frozen=True, kw_only=True)
class _Adapted:
    """A frozen model with trainable LoRA adapters."""

    model: SentenceTransformer
    tuner: LoraModel
    layers: tuple[Any, ...]
    """The adapted layers."""
    weights: tuple[Tensor, ...] = ()
    """The model's weights as they were before they were converted, if they were."""
    after_merge: tuple[Callable[[], None], ...] = ()
    """Set pruned weights to zero again."""

    def merge(self) -> SentenceTransformer:
        """Adds the adapters to the weights as they were; the model has the same parts and names as before."""
        frozen = [weight for weight in self.model.parameters() if not weight.requires_grad]
        for weight, original in zip(frozen, self.weights, strict=bool(self.weights)):
            weight.data = original.detach()
        with torch.no_grad():
            for layer in self.layers:
                weight = layer.get_base_layer().weight
                added = layer.get_delta_weight(_ADAPTER).float()
                weight.data = (weight.float() + added.to(weight.device)).to(weight.dtype)
        transformer_of(self.model).model = self.tuner.unload()
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
    for weight in tuner.parameters():
        if weight.requires_grad:  # peft gives adapters the precision of their matrix
            weight.data = weight.data.float()
    layers: list[Any] = [backbone.get_submodule(matrix.name) for matrix in matrices]
    for layer in layers:
        layer.cast_input_dtype_enabled = False  # autocast converts what a matrix reads, not all that it keeps
    finish = []
    if keep_zeros:
        for matrix, layer in zip(matrices, layers, strict=True):
            if bool((layer.get_base_layer().weight == 0).any()):
                layer.lora_dropout[_ADAPTER] = nn.Identity()
                finish.append(keep_zeros_in_adapter(layer, _ADAPTER, transposed=matrix.transposed))
    return _Adapted(model=model, tuner=tuner, layers=tuple(layers), after_merge=tuple(finish))

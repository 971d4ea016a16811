"""The teacher's vectors that a student trains on: of which texts, from which source, in which process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from trundle.cache import cache_entry, cache_key
from trundle.data.sampling import augmented, sample
from trundle.evaluate import fidelity
from trundle.evaluate.shortening import measure_ranges
from trundle.methods.align import _augmentations
from trundle.methods.align.resident import _keep_teachers_tokens
from trundle.methods.contract import Context
from trundle.methods.training import NOT_VALIDATED
from trundle.model.encode import embedder
from trundle.progress import is_first, own_rank, process_count
from trundle.records import CALIBRATION_FILE
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest
from trundle.teacher.targets import find_targets, open_share, wait_for_targets
from trundle.train.batches import gather_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    from trundle.data.texts import Text
    from trundle.embedder import Tokens
    from trundle.methods.align import AlignOptions
    from trundle.teacher.targets import Targets
    from trundle.teacher.teacher import Teacher

RIDGE_TEXTS = 8192
"""Texts for the closed-form start; with `steps: 0` the teacher encodes no others."""
_DRAWN = "by hash"
"""How augmentations draw: vectors of pieces that were drawn in another way are not used again."""
_VALIDATION_TEXTS = 128 * 32
_FEWEST_VALIDATED, _VALIDATED_SHARE = 512, 8
_CALIBRATION_TEXTS = 8192
_MARGIN_TEXTS = 2048
_ALONE_BY_RANK = (
    "this is the only process, so --by-rank loads all vectors; start several with torchrun "
    "(accelerate launch starts several on GPUs only)"
)


def targets_for(teacher: Teacher, options: AlignOptions, context: Context) -> tuple[Targets, Targets | None]:
    """Returns the teacher's vectors of the training and validation texts; each is computed at most once."""
    sharded = options.by_rank and process_count() > 1
    if options.by_rank and not sharded:
        context.progress.say(_ALONE_BY_RANK)
    if teacher.brings_texts:
        if sharded and teacher.store is not None:
            stored = _open_shard(teacher.store)
        else:
            stored = teacher.stored(cache=context.cache, progress=context.progress)
        return _split_stored(stored, options, context.seed)
    assert context.corpus is not None
    corpus, names = context.corpus, _augmentations(options.augment)
    most = RIDGE_TEXTS if options.texts is None and options.steps == 0 else options.texts

    def training_texts() -> Iterator[Text]:
        chosen = corpus.distinct_train(most, context.seed)
        return augmented(chosen, names, seed=context.seed, allowed=corpus.may_train_on)

    content = cache_key(corpus.facts(), most, names and (*names, _DRAWN), context.seed)
    targets = _build(f"train {content}", training_texts, teacher, context)
    if sharded:
        targets = _open_shard(targets.folder)
    if options.steps == 0:
        return targets, None
    held_out_texts = sample(corpus.validation(), validation_count(options.texts), seed=context.seed)
    if not held_out_texts:
        context.progress.say(NOT_VALIDATED.format("texts"))
        return targets, None
    return targets, _build(f"validation {content}", lambda: held_out_texts, teacher, context)


def _split_stored(stored: Targets, options: AlignOptions, seed: int) -> tuple[Targets, Targets | None]:
    """Splits the vectors of a table or store, or `texts` of them, for training and validation."""
    count = min(stored.manifest.count, options.texts or stored.manifest.count)
    if count < stored.manifest.count:
        stored = stored.part(_sampled(stored, count, seed))
    if options.steps == 0:
        return stored, None
    held_out = _VALIDATION_TEXTS
    if stored.is_share:  # the same number in every process, however much their shards differ
        held_out = min(_VALIDATION_TEXTS, count // 10) // process_count()
    return stored.split(held_out, seed=seed)


def _build(label: str, texts: Callable[[], Iterable[Text]], teacher: Teacher, context: Context) -> Targets:
    """Reads the texts only if some of their vectors are missing; the label identifies the texts."""
    assert teacher.embedder is not None
    folder = _store(context, label, teacher)
    if not is_first():
        return wait_for_targets(folder)
    if (found := find_targets(folder)) is not None:
        return found
    wanted = Manifest(teacher=teacher.identity(), prompts=teacher.used_prompts)
    tokens: list[Tokens] = []
    targets = build_targets(
        texts(), teacher.embedder, wanted, folder, keep_tokens=tokens.append, progress=context.progress
    )
    if tokens and teacher.model is not None:
        _keep_teachers_tokens(teacher.model, targets, tokens, context.cache)
    return targets


def _open_shard(folder: Path) -> Targets:
    return open_share(folder, rank=own_rank(), processes=process_count())


def _sampled(targets: Targets, most: int, seed: int) -> list[int]:
    """Positions of at most `most` texts, over all processes if the targets are sharded."""
    return sample(range(len(targets)), most // process_count() if targets.is_share else most, seed=seed)


def _joined(targets: Targets, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Adds the rows of other processes if the targets are sharded: one shard may hold only one kind."""
    return gather_rows(rows) if targets.is_share else rows


def _counts(targets: Targets, validation: Targets | None) -> dict[str, int]:
    """The number of training and validation texts over all processes."""

    def total(part: Targets | None) -> int:
        count = 0 if part is None else len(part)
        return sum(gather_object([count])) if part is not None and part.is_share else count

    return {"texts": total(targets), "validation_texts": total(validation)}


def validation_count(texts: int | None) -> int:
    """Returns the number of validation texts: LEAF's 128 batches, or fewer with few training texts."""
    if texts is None:
        return _VALIDATION_TEXTS
    return min(_VALIDATION_TEXTS, max(min(_FEWEST_VALIDATED, texts // 4), texts // _VALIDATED_SHARE))


def _store(context: Context, label: str, teacher: Teacher) -> Path:
    return cache_entry("targets", label, teacher.identity(), dict(teacher.prompts), root=context.cache)


def _calibration(targets: Targets, teacher: str, seed: int) -> dict[str, str]:
    """The file with the ranges of the teacher's dimensions, for storing vectors as int8."""
    positions = _sampled(targets, _CALIBRATION_TEXTS, seed)
    ranges = measure_ranges([_joined(targets, targets.vectors(positions))], teacher)
    return {CALIBRATION_FILE: ranges.as_text()}


def _watch_margin(
    student: SentenceTransformer, validation: Targets | None, context: Context
) -> Callable[[int, float], dict[str, float]] | None:
    """What `on_validation` measures with `margin`; None if there are too few texts for it."""
    if validation is None:
        return None
    positions = sample(range(len(validation)), _MARGIN_TEXTS, seed=context.seed)
    watch = fidelity.watch_margin(
        embedder(student, name="student"), validation.chosen(positions), validation.vectors(positions)
    )
    if watch is None:
        context.progress.say("too few validation texts to measure the margin; pass more with --data")
    return watch

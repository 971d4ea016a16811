"""The teacher's vectors a student learns from: of which texts, from where, and which part of them in which process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trundle.data.augment import augmented
from trundle.data.sampling import distinct, sample
from trundle.evaluate import fidelity
from trundle.evaluate.shortening import measure_ranges
from trundle.methods.contract import Context
from trundle.methods.training import NOT_VALIDATED
from trundle.model.encode import embedder
from trundle.progress import is_first, own_rank, process_count
from trundle.records import CALIBRATION_FILE
from trundle.teacher.labelling import build_targets
from trundle.teacher.targets import find_targets, open_share, open_targets, wait_for_targets
from trundle.train.alignment import rows_of_all_processes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    from trundle.data.texts import Text
    from trundle.methods.align import AlignOptions
    from trundle.teacher.targets import Targets
    from trundle.teacher.teacher import Teacher

RIDGE_TEXTS = 8192
"""What a closed form is fitted on; where it is all that is done, no other texts are asked for."""
_VALIDATION_TEXTS = 128 * 32
_FEWEST_VALIDATED, _VALIDATED_SHARE = 512, 8
_ALONE_BY_RANK = (
    "this process is alone, so --by-rank opens all vectors; start several with torchrun "
    "(accelerate launch starts several on GPUs only)"
)


def targets_for(teacher: Teacher, options: AlignOptions, context: Context) -> tuple[Targets, Targets | None]:
    """The teacher's vectors for the training and the validation texts, computed at most once."""
    if options.by_rank and process_count() == 1:
        context.progress.say(_ALONE_BY_RANK)
    if teacher.store is not None:
        opened = _opened(teacher.store, options)
        if options.steps == 0:
            return opened, None
        held_out = _VALIDATION_TEXTS
        if opened.is_share:  # as many in every process, however unlike their shares are
            smallest = opened.manifest.count // process_count()
            held_out = min(_VALIDATION_TEXTS // process_count(), smallest // 10)
        return opened.split(held_out, seed=context.seed)
    if teacher.table is not None:
        folder = _store(context, "table", teacher)
        everything = (
            teacher.table.targets(folder, progress=context.progress)
            if is_first()
            else wait_for_targets(folder)
        )
        if options.steps == 0:
            return everything, None
        return everything.split(_VALIDATION_TEXTS, seed=context.seed)
    assert context.corpus is not None
    assert teacher.embedder is not None
    names = _augmentations(options.augment)
    prompts = {role: prompt for role, prompt in teacher.prompts.items() if prompt}

    def build(label: str, texts: Callable[[], Iterable[Text]]) -> Targets:
        """The texts are read only if their vectors are not all there: what the label says stands for them."""
        assert teacher.embedder is not None
        folder = _store(context, label, teacher)
        if not is_first():
            return wait_for_targets(folder)
        return find_targets(folder) or build_targets(
            texts(),
            teacher.embedder,
            teacher_id=teacher.identity(),
            folder=folder,
            prompts=prompts,
            progress=context.progress,
        )

    corpus = context.corpus
    most = RIDGE_TEXTS if options.texts is None and options.steps == 0 else options.texts

    def training_texts() -> Iterator[Text]:
        chosen = distinct(corpus.train(), key=lambda text: f"{text.kind}\0{text.text}")
        if most is not None:
            chosen = iter(sample(chosen, most, seed=context.seed))
        return augmented(chosen, names, seed=context.seed, allowed=corpus.may_train_on)

    content = _key(corpus.facts(), most, names, context.seed)
    targets = build(f"train {content}", training_texts)
    if options.by_rank and process_count() > 1:
        targets = _opened(targets.folder, options)
    if options.steps == 0:
        return targets, None
    kept = sample(corpus.validation(), validation_count(options.texts), seed=context.seed)
    if not kept:
        context.progress.say(NOT_VALIDATED.format("texts"))
        return targets, None
    return targets, build(f"validation {content}", lambda: kept)


def _opened(folder: Path, options: AlignOptions) -> Targets:
    """All of a store, or what falls to this process."""
    if options.by_rank and process_count() > 1:
        return open_share(folder, rank=own_rank(), processes=process_count())
    return open_targets(folder)


def _sampled(targets: Targets, most: int, seed: int) -> list[int]:
    """Texts to compute something small from: processes that hold a part each take as many together as one alone."""
    return sample(range(len(targets)), most // process_count() if targets.is_share else most, seed=seed)


def _joined(targets: Targets, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """With the rows of the other processes, where each has texts of its own: one part may hold texts of one kind only."""
    return rows_of_all_processes(rows) if targets.is_share else rows


def _counts(targets: Targets, validation: Targets | None) -> dict[str, int]:
    """How many texts all processes together learn from and validate by."""
    validated = 0 if validation is None else len(validation)
    if validation is not None and validation.is_share:
        validated *= process_count()
    learned = len(targets)
    if targets.is_share:
        beside = validated if validation is not None and validation.is_share else 0
        learned = targets.manifest.count - beside
    return {"texts": learned, "validation_texts": validated}


def validation_count(texts: int | None) -> int:
    """How many texts are validated on: LEAF's 128 batches, or fewer where few are learned from."""
    return (
        _VALIDATION_TEXTS
        if texts is None
        else min(_VALIDATION_TEXTS, max(min(_FEWEST_VALIDATED, texts // 4), texts // _VALIDATED_SHARE))
    )


def _augmentations(augment: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(name.strip() for name in augment.split(",") if name.strip())


def _store(context: Context, label: str, teacher: Teacher) -> Path:
    return context.cache / "targets" / _key(label, teacher.identity(), dict(teacher.prompts))


def _key(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=12).hexdigest()


_CALIBRATION_TEXTS = 8192
_MARGIN_TEXTS = 2048


def _calibration(targets: Targets, teacher: str, seed: int) -> dict[str, str]:
    """The file with the ranges of the teacher's dimensions, for whoever keeps its vectors or the student's as bytes."""
    positions = _sampled(targets, _CALIBRATION_TEXTS, seed)
    ranges = measure_ranges([_joined(targets, targets.vectors(positions))], teacher)
    return {CALIBRATION_FILE: ranges.as_text()}


def _watch_margin(
    student: SentenceTransformer, validation: Targets | None, context: Context
) -> Callable[[int, float], dict[str, float]] | None:
    """What is measured beside the validation loss; None where there are too few texts for it."""
    if validation is None:
        return None
    positions = sample(range(len(validation)), _MARGIN_TEXTS, seed=context.seed)
    watch = fidelity.watch_margin(
        embedder(student, name="student"), validation.chosen(positions), validation.vectors(positions)
    )
    if watch is None:
        context.progress.say("too few validation texts to measure the margin; give more with --data")
    return watch

"""One training, whichever step it is of: what its checkpoints are kept under, how zeros fare, what it leaves behind.

A step makes a student, a task and settings; `learn` runs them. A training that was stopped is found again by its key: all that
decides how it goes. What this is not: it knows nothing of texts, teachers or losses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from filelock import FileLock, Timeout

import trundle.model as body
import trundle.train as train
from trundle.data.sampling import fingerprint
from trundle.errors import BadInput
from trundle.processes import is_first, process_count

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn

    from trundle.steps.contract import Context

LESS_MEMORY = (
    "give a smaller --batch-size (contrast and width also take --mini-batch, which changes nothing else)"
)
NOT_VALIDATED = "no {} are kept back for validation; the last weights are taken, not the best"


class Task(Protocol):
    """What a training is fed with."""

    @property
    def batches(self) -> Any:
        """What is learned from."""

    @property
    def validation(self) -> Any:
        """What the best weights are chosen by, or None."""


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a training leaves besides its weights."""

    facts: dict[str, Any]
    files: Mapping[str, str | bytes]
    done: Callable[[], None]
    """Called when the result is safe: the checkpoints may go."""


def learn(
    student: SentenceTransformer,
    objective: Any,
    task: Task,
    settings: Any,
    *,
    label: str,
    key: Sequence[Any],
    shape: Any,
    context: Context,
    module: nn.Module | None = None,
    keep_zeros: bool | None = None,
    on_validation: Any = None,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Learned:
    """Train the student, or the `module` it is a part of, in place; go on from a checkpoint where there is one.

    `keep_zeros`: whether what is pruned stays so; None where the model itself shall tell.
    """
    name = fingerprint([label, *key, str(settings)])
    with (
        _own_folder(context.cache / "runs" / name, context) as folder,
        train.zeros_kept(student, keep_zeros),
        body.memory_told(label, LESS_MEMORY),
    ):
        result = train.train(
            student if module is None else module,
            objective,
            task.batches,
            settings,
            shape=shape,
            validation=task.validation,
            folder=folder,
            resume=True,
            on_validation=on_validation,
            computing=computing,
            progress=context.progress,
            label=label,
        )
        metrics = (folder / train.METRICS_FILE).read_text(encoding="utf-8") if is_first() else ""
    return Learned(
        facts={
            "steps": result.steps,
            "loss": result.loss if result.steps else None,
            "validation": result.validation,
            "best_step": result.best_step,
        },
        files={f"{label}.jsonl": metrics} if is_first() else {},
        done=lambda: _forget(folder),
    )


@contextmanager
def _own_folder(folder: Path, context: Context) -> Iterator[Path]:
    """Where the checkpoints are kept, while this process trains: the same training may be under way in another one."""
    claim = _claim_of(folder)
    if is_first():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            claim.acquire(timeout=0)
        except Timeout:
            if process_count() > 1:
                raise BadInput(
                    "the same training is under way in another process; wait for its end, or stop it"
                ) from None
            context.progress.say(
                "the same training is under way in another process; this one starts by itself"
            )
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
            claim = _claim_of(folder)
            claim.acquire()
        if context.fresh:
            shutil.rmtree(folder, ignore_errors=True)
    if train.has_checkpoint(folder):
        context.progress.say("going on from the checkpoint of an earlier run of the same command")
    try:
        yield folder
    finally:
        claim.release()


def _claim_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def _forget(folder: Path) -> None:
    """Drop the checkpoints, unless another process goes on from them just now."""
    try:
        with (claim := _claim_of(folder)).acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
            Path(claim.lock_file).unlink(
                missing_ok=True
            )  # while it is held: who opened it by then looks again
    except Timeout:
        return

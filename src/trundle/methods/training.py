"""One training, whichever step it is of: what its checkpoints are kept under, how zeros fare, what it leaves behind.

A step makes a student, a task and settings; `learn` runs them. A training that was stopped is found again by its key: all that
decides how it goes. What this is not: it knows nothing of texts, teachers or losses.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trundle.cache import cache_entry, locked, remove_entry
from trundle.errors import BadInput
from trundle.methods.contract import Given
from trundle.model.encode import explain_out_of_memory
from trundle.model.heads import prompts_by_role
from trundle.progress import is_first, process_count
from trundle.records import TRAINING_LOG_FILE, training_log_file
from trundle.train import loop
from trundle.train.blocks import zeros_kept
from trundle.train.checkpoint import has_checkpoint
from trundle.train.tuples import Prompts

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import nn

    from trundle.data.corpus import Corpus
    from trundle.data.examples import Example
    from trundle.methods.contract import Context

_LESS_MEMORY = (
    "give a smaller --batch-size (contrast and width also take --mini-batch, which changes nothing else)"
)
NOT_VALIDATED = "no {} are kept back for validation; the last weights are taken, not the best"


class _Task(Protocol):
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
    task: _Task,
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
    with (
        _own_folder(cache_entry("runs", label, *key, str(settings), root=context.cache), context) as folder,
        zeros_kept(student, keep_zeros),
        explain_out_of_memory(label, _LESS_MEMORY),
    ):
        result = loop.train(
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
        metrics = (folder / TRAINING_LOG_FILE).read_text(encoding="utf-8") if is_first() else ""
    return Learned(
        facts={
            "steps": result.steps,
            "loss": result.loss if result.steps else None,
            "validation": result.validation,
            "best_step": result.best_step,
        },
        files={training_log_file(label): metrics} if is_first() else {},
        done=lambda: remove_entry(folder),
    )


@contextmanager
def _own_folder(folder: Path, context: Context) -> Iterator[Path]:
    """Where the checkpoints are kept, while this process trains: the same training may be under way in another one."""

    def if_taken() -> None:
        if process_count() > 1:
            raise BadInput("the same training is under way in another process; wait for its end, or stop it")
        context.progress.say("the same training is under way in another process; this one starts by itself")

    with locked(folder, if_taken=if_taken) if is_first() else nullcontext(folder) as own:
        if is_first() and context.fresh:
            shutil.rmtree(own, ignore_errors=True)
        if has_checkpoint(own):
            context.progress.say("going on from the checkpoint of an earlier run of the same command")
        yield own


def check_prompted(given: Mapping[str, Given], corpus: Corpus) -> None:
    """Refuse a prompt for a file that is not there. All tuples are looked at: of a small file none may be drawn."""
    unmet, files = list(given), set[str]()
    for example in chain(corpus.examples(), corpus.validation_examples(), corpus.held_out_examples()):
        if not unmet:
            return
        file = Path(example.source).name
        if file not in files:
            files.add(file)
            unmet = [name for name in unmet if not _is_called(file, name)]
    if unmet:
        raise BadInput(
            f"there is no data file {unmet[0]!r} to prompt; name one of {', '.join(sorted(files))}"
        )


def prompts_by_file(
    model: SentenceTransformer, given: Mapping[str, Given], examples: Sequence[Example]
) -> dict[str, Prompts]:
    """The prompts of each source of these examples: those given for it, or the model's own."""
    own = prompts_by_role(model)
    files = {source: Path(source).name for source in dict.fromkeys(example.source for example in examples)}
    found = {}
    for source, file in files.items():
        meant = next((prompt for name, prompt in given.items() if _is_called(file, name)), {})
        roles = own | ({"query": meant} if isinstance(meant, str) else dict(meant))
        found[source] = Prompts(query=roles["query"], document=roles["document"])
    for example in examples:
        prompt = found[example.source]
        if (
            example.query.strip() == prompt.query.strip()
            or example.positive.strip() == prompt.document.strip()
        ):
            raise BadInput(f"{example.source} has a text that is nothing but its prompt; leave the row out")
    return found


def _is_called(file: str, name: str) -> bool:
    return name in (file, file.split(".")[0], Path(file).stem)

"""What methods that learn from texts have in common: checkpoints, checks, prompts by data file, healing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from torch import nn

from trundle.cache import cache_entry, locked, remove_entry
from trundle.data.corpus import Corpus
from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.methods.contract import Context, Given, Heal, Healing
from trundle.model.encode import explain_out_of_memory
from trundle.model.heads import prompts_by_role
from trundle.model.healing import heal
from trundle.model.save import tokenizer_text
from trundle.model.surgery import Cut
from trundle.progress import is_first, process_count
from trundle.records import TRAINING_LOG_FILE, training_log_file
from trundle.train.blocks import zeros_kept
from trundle.train.loop import TrainingTask, TrainSettings, train
from trundle.train.trainer import Schedule, has_checkpoint

_LESS_MEMORY = "pass a smaller --batch-size (for contrast or width, a smaller --mini-batch is enough)"
NOT_VALIDATED = "no {} are held out for validation; the last weights are used, not the best"
HEALING_TEXTS = 4096
"""The most texts that a cut is healed on."""
VALIDATIONS = 10
"""Validations in a run of known length, for methods that train on labels."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a training, except its weights."""

    facts: dict[str, Any]
    files: Mapping[str, str | bytes]
    done: Callable[[], None]
    """Deletes the checkpoints; called when the result is on disk."""


def run_training(
    student: SentenceTransformer,
    task: TrainingTask[Any],
    settings: TrainSettings,
    *,
    key: Sequence[Any],
    schedule: Schedule,
    context: Context,
    module: nn.Module | None = None,
    keep_zeros: bool | None = None,
) -> Trained:
    """Trains the student, or the `module` it is a part of, in place; resumes from a checkpoint if possible.

    `key` is all that the training depends on besides its settings: it identifies the checkpoints.
    `keep_zeros` keeps pruned weights at zero; None decides by the model.
    """
    folder = cache_entry("runs", task.name, *key, str(settings), root=context.cache)
    with (
        _locked(folder, context) as own,
        zeros_kept(student, keep_zeros),
        explain_out_of_memory(task.name, _LESS_MEMORY),
    ):
        result = train(
            student if module is None else module,
            task,
            settings,
            schedule=schedule,
            folder=own,
            deadline=context.deadline,
            progress=context.progress,
        )
        metrics = (own / TRAINING_LOG_FILE).read_text(encoding="utf-8") if is_first() else ""
    return Trained(
        facts={
            "steps": result.steps,
            "loss": result.loss if result.steps else None,
            "validation": result.validation,
            "best_step": result.best_step,
        },
        files={training_log_file(task.name): metrics} if is_first() else {},
        done=lambda: remove_entry(own),
    )


def validation_size(interval: int, batch_size: int) -> int:
    """Returns the size of a validation: a quarter of the training in an interval of steps, within limits."""
    return min(2048, max(interval * batch_size // 4, 2 * batch_size))


@contextmanager
def _locked(folder: Path, context: Context) -> Iterator[Path]:
    def if_taken() -> None:
        if process_count() > 1:
            raise BadInput("another process runs the same training; wait for its end, or stop it")
        context.progress.say("another process runs the same training; this one starts separately")

    with locked(folder, if_taken=if_taken) if is_first() else nullcontext(folder) as own:
        if is_first() and context.fresh:
            shutil.rmtree(own, ignore_errors=True)
        if has_checkpoint(own):
            context.progress.say("resuming from the checkpoint of an earlier run of the same command")
        yield own


def plan_healing(wanted: Heal | None, context: Context) -> Healing:
    """Returns whether a cut will be healed; the default is to heal if there are texts."""
    if wanted == "closed-form" and context.corpus is None:
        raise BadInput("a cut is healed on texts; pass them with --data, or leave heal out")
    return "none" if context.corpus is None else wanted or "if possible"


def healed(
    whole: SentenceTransformer,
    small: SentenceTransformer,
    what: Cut,
    healing: Healing,
    context: Context,
    *,
    texts: Sequence[str] | None = None,
) -> tuple[SentenceTransformer, dict[str, Any]]:
    """Returns `small`, which `what` has cut out of `whole`, after healing, and the facts about it.

    `texts` default to those of --data.
    """
    if healing == "none" or context.dry_run:
        return small, {}
    if texts is None:
        if context.corpus is None:
            raise BadInput("this plan heals the cut on texts; pass them with --data")
        texts = [text.text for text in context.corpus.sample_train(HEALING_TEXTS, context.seed)]
    try:
        found = heal(whole, small, what, texts, progress=context.progress)
    except BadInput as error:
        if healing == "closed-form":
            raise
        context.progress.say(f"not healed: {error}")
        return small, {}
    errors = {"error_unhealed": round(found.before, 5), "error_healed": round(found.after, 5)}
    return found.model, {"healed_on": len(texts), **errors}


def check_same_tokens(
    student: SentenceTransformer, teacher: SentenceTransformer, what: str, instead: str
) -> None:
    """Rejects two models with different tokenizers."""
    if tokenizer_text(student) != tokenizer_text(teacher):
        raise BadInput(f"{what} needs the same tokens in both models, but their tokenizers differ; {instead}")


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of the queries and documents of one data file."""

    query: str = ""
    document: str = ""


def check_prompted(given: Mapping[str, Given], corpus: Corpus) -> None:
    """Rejects a prompt for a missing file. Reads all tuples: a sample may have none of a small file."""
    unmet, files = list(given), set[str]()
    for example in chain(corpus.examples(), corpus.validation_examples(), corpus.held_out_examples()):
        if not unmet:
            return
        file = Path(example.source).name
        if file not in files:
            files.add(file)
            unmet = [name for name in unmet if not _is_called(file, name)]
    if unmet:
        found = ", ".join(sorted(files))
        raise BadInput(f"there is no data file {unmet[0]!r} to prompt; name one of {found}")


def prompts_by_file(
    model: SentenceTransformer, given: Mapping[str, Given], examples: Sequence[Example]
) -> dict[str, Prompts]:
    """Returns the prompts of each source of the examples: those given for it, or the model's own."""
    own = prompts_by_role(model)
    found = {}
    for source in dict.fromkeys(example.source for example in examples):
        file = Path(source).name
        meant = next((prompt for name, prompt in given.items() if _is_called(file, name)), {})
        roles = own | ({"query": meant} if isinstance(meant, str) else dict(meant))
        found[source] = Prompts(query=roles["query"], document=roles["document"])
    for example in examples:
        prompt = found[example.source]
        pairs = ((example.query, prompt.query), (example.positive, prompt.document))
        if any(text.strip() == before.strip() for text, before in pairs):
            raise BadInput(f"{example.source} has a text that is nothing but its prompt; leave the row out")
    return found


def _is_called(file: str, name: str) -> bool:
    return name in (file, file.split(".")[0], Path(file).stem)

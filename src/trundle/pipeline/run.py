"""What a run is asked for, what it returns, and how it resumes.

The cache keeps the result of each finished method until the run is saved, and the same command skips the
methods whose results it finds. Results that took seconds are not kept; a training that was interrupted
resumes from its own checkpoint. Several runs may start with the same methods, so an entry may appear or
vanish at any moment; that costs time and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.cache import cache_entry, file_state
from trundle.data.corpus import Corpus
from trundle.embedder import Embedder
from trundle.evaluate.fidelity import MEASURED_TEXTS, Fidelity
from trundle.folders import atomic_folder, remove_folder
from trundle.methods.contract import AdditionalModel, Applied, Context, Options, Plan
from trundle.model.cost import Cost
from trundle.model.load import load
from trundle.model.save import model_digest
from trundle.progress import SILENT, Progress
from trundle.recipe import Call, Recipe
from trundle.records import MethodRecord, versions
from trundle.teacher.teacher import Teacher

_IN_MEMORY = "model"
_KEPT_AFTER = 5.0
"""A result that took fewer seconds is not kept."""
_RECORD, _MODEL, _FILES, _ADDITIONAL = "record.json", "model", "files", "besides"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compress, and how to run it."""

    source: str | SentenceTransformer
    """A model folder, a hub name, or a model in memory."""
    output: str | Path | None = None
    """Folder for the result; None keeps the result in memory."""
    corpus: Corpus | None = None
    seed: int = 0
    dry_run: bool = False
    """Plan every method and predict what it saves. Cuts are made in memory; nothing is trained."""
    replace: bool = False
    """Replace the output folder if it exists."""
    pair: bool = False
    """Also write the result and its teacher as one model, in a folder next to the output."""
    trust_remote_code: bool = False
    fresh: bool = False
    """Start over instead of resuming an interrupted run."""
    progress: Progress = SILENT
    compare: bool = True
    """Compare the result with the original on held-out texts."""
    measured_texts: int = MEASURED_TEXTS
    """How many held-out texts to compare on, at most."""
    measured_seconds: float = 30.0
    """How long the comparison may take; a slow model is compared on fewer texts."""
    continues: bool = False
    """The source is an intermediate result: the new lineage continues the source's own."""
    hold: bool = False
    """Keep intermediate results in the cache until `Run.settle` is called."""
    opened: Mapping[str, SentenceTransformer] = field(default_factory=dict)
    """Models that are loaded already, by the names the source and the recipe use for them."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Expensive objects that several runs of a search share, such as the teacher's vectors on a GPU."""
    deadline: float = math.inf
    """The time (`time.monotonic`) at which trainings with `minutes` must end."""

    @property
    def name(self) -> str:
        """What the lineage calls the source."""
        return self.source if isinstance(self.source, str) else _IN_MEMORY

    @property
    def target(self) -> Path | None:
        """The folder to write, or None if this run writes nothing."""
        return None if self.output is None or self.dry_run else Path(self.output)

    def model(self) -> SentenceTransformer:
        """Returns the source model, loaded if it is not in memory."""
        if not isinstance(self.source, str):
            return self.source
        return self.opened.get(self.source) or load(self.source, trust_remote_code=self.trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class _MethodRun:
    call: Call
    says: str
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]
    after: Cost
    applied: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Returns the row of the lineage: what leads to the same model again, so no times."""
        name, options = self.call.method.name, self.call.options.model_dump(mode="json")
        record = MethodRecord(step=name, options=options, plan=self.plan, says=self.says, facts=self.facts)
        return dict(vars(record))


@dataclass(frozen=True, kw_only=True)
class _Sibling:
    """An additional model, written to a folder next to the output."""

    output: Path
    after: Cost
    fidelity: Fidelity | None

    def as_json(self) -> dict[str, Any]:
        fidelity = None if self.fidelity is None else self.fidelity.as_json()
        return {"output": str(self.output), "after": self.after.as_json(), "fidelity": fidelity}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a recipe: the model, what was done, and what was measured."""

    source: str
    recipe: Recipe
    model: SentenceTransformer
    before: Cost
    after: Cost
    steps: tuple[_MethodRun, ...]
    fidelity: Fidelity | None
    judged: Mapping[str, tuple[float, float]]
    """Scores of the original and of the result that a method asked for."""
    output: Path | None
    pair: Path | None
    additional: tuple[_Sibling, ...]
    teacher: Teacher
    """The teacher of the result, or the original, by its name in the request or the recipe."""
    original: Embedder
    result: Embedder
    """The teacher and the result as texts → vectors; each text is encoded once."""
    needs_trundle: bool
    """Whether the result has a trundle module, which sentence-transformers loads with trust_remote_code."""
    settle: Callable[[], None]
    """Deletes the intermediate results that `Request.hold` kept."""

    @property
    def only_cut(self) -> bool:
        """Whether the model was cut without any training since."""
        cut = any(not step.says.endswith("nothing to cut") for step in self.steps)
        learned = any("steps" in step.facts for step in self.steps)
        aligned = any(call.method.enters_space(call.options) for call in self.recipe.calls)
        return cut and not learned and not aligned

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "source": self.source,
            "recipe": self.recipe.as_json(),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "steps": [
                step.as_json() | {"seconds": round(step.seconds, 2), "applied": step.applied}
                for step in self.steps
            ],
            "fidelity": None if self.fidelity is None else self.fidelity.as_json(),
            "judged": {name: {"before": old, "after": new} for name, (old, new) in self.judged.items()},
            "output": None if self.output is None else str(self.output),
            "pair": None if self.pair is None else str(self.pair),
            "besides": [sibling.as_json() for sibling in self.additional],
        }


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The cache entry of one method's result."""

    folder: Path
    call: Call
    context: Context

    def find(self) -> tuple[Plan, Applied] | None:
        if self.context.fresh:
            self.forget()
        try:
            return self._reopened() if self._is_there() else None
        except Exception:
            if self._is_there():
                raise
            return None  # another run was saved meanwhile and has deleted it

    def _is_there(self) -> bool:
        return (self.folder / _RECORD).is_file()

    def _reopened(self) -> tuple[Plan, Applied]:
        record = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        plan: Plan = self.call.method.plans.model_validate(record["plan"])
        places = {name: self.folder / _ADDITIONAL / name for name in record["besides"]}
        additional = {
            name: AdditionalModel(model=self._open(place / _MODEL), files=_files(place / _FILES))
            for name, place in places.items()
        }
        applied = Applied(
            model=self._open(self.folder / _MODEL),
            facts=record["facts"],
            files=_files(self.folder / _FILES),
            additional=additional,
            done=self.forget,
        )
        self.context.progress.say(f"{self.call.method.name}: resumed from an interrupted run")
        return plan, self.call.method.reopen(applied, plan, self.context)

    def keep(self, plan: Plan, applied: Applied, *, seconds: float) -> Applied:
        """Stores a result that took long to make, and deletes the method's own checkpoints."""
        if seconds < _KEPT_AFTER:
            return applied
        with atomic_folder(self.folder, replace=True, marks=(_RECORD,)) as scratch:
            _write(AdditionalModel(model=applied.model, files=applied.files), scratch)
            for name, extra in applied.additional.items():
                _write(extra, scratch / _ADDITIONAL / name)
            record: dict[str, Any] = {
                "plan": plan.model_dump(mode="json"),
                "facts": dict(applied.facts),
                "besides": list(applied.additional),
            }
            (scratch / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        applied.done()
        return replace(applied, done=self.forget)

    def forget(self) -> None:
        remove_folder(self.folder)

    def _open(self, folder: Path) -> Any:
        return load(str(folder), trust_remote_code=self.context.trust_remote_code)


def _stages(calls: tuple[Call, ...], context: Context) -> list[_Stage]:
    """The key of an entry is the model, the texts, the methods up to this one, and the files they read."""
    facts = () if context.corpus is None else context.corpus.facts()
    led: list[Any] = [model_digest(context.original), str(facts), context.seed, context.pair, str(versions())]
    found = []
    for number, call in enumerate(calls):
        read = [file_state(name) for name in call.method.reads(call.options)]
        later = [options.model_dump(mode="json") for options in _options_after(calls, number)]
        led = [*led, call.method.name, call.options.model_dump(mode="json"), read, *later]
        folder = cache_entry("steps", *led, root=context.cache)
        found.append(_Stage(folder=folder, call=call, context=context))
    return found


def _options_after(calls: tuple[Call, ...], number: int) -> tuple[Options, ...]:
    """The options of the calls after this one, if its method looks ahead."""
    call = calls[number]
    if not call.method.looks_ahead(call.options):
        return ()
    return tuple(after.options for after in calls[number + 1 :])


def _write(made: AdditionalModel, folder: Path) -> None:
    made.model.save_pretrained(str(folder / _MODEL), create_model_card=False)
    (folder / _FILES).mkdir()
    for name, content in made.files.items():
        (folder / _FILES / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _files(folder: Path) -> dict[str, str | bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}

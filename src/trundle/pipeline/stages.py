"""What a stopped run has finished: the model each step left, in a folder of the cache named by all that led to it.

The same command, given again, goes on behind the last of them. What was made in no time is not kept, it is made again; a training
that was under way goes on from its own checkpoint. All of it goes when the result is safe. Other runs may begin with the same steps at
the same time: the place is theirs, too, so it may be filled or emptied at any moment, which costs one of them its time and no more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trundle.data.sampling import fingerprint
from trundle.folders import remove_folder, whole_folder
from trundle.methods.contract import AdditionalModel, Applied, Context, Plan
from trundle.model.load import load
from trundle.model.save import model_digest
from trundle.recipe import Call
from trundle.records import versions

_KEPT_AFTER = 5.0
"""Seconds a step must have taken for its result to be worth writing."""
_RECORD, _MODEL, _FILES, _ADDITIONAL = "record.json", "model", "files", "besides"


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The place of one step's result."""

    folder: Path
    call: Call
    context: Context

    def find(self) -> tuple[Plan, Applied] | None:
        """What the step decided and made when it was last taken, or None."""
        if self.context.fresh:
            self.forget()
        try:
            return self._reopened() if self._is_there() else None
        except Exception:
            if self._is_there():
                raise
            return None  # another run is safe and has forgotten it while it was read

    def _is_there(self) -> bool:
        return (self.folder / _RECORD).is_file()

    def _reopened(self) -> tuple[Plan, Applied]:
        record = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        plan: Plan = self.call.step.plans.model_validate(record["plan"])
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
        self.context.progress.say(f"{self.call.step.name}: taken over from a run that was stopped")
        return plan, self.call.step.reopen(applied, plan, self.context)

    def keep(self, plan: Plan, applied: Applied, *, seconds: float) -> Applied:
        """Write a result down if it took long to make; it is forgotten when the end result is safe.

        What the step itself had kept in case of a failure is not needed from then on.
        """
        if seconds < _KEPT_AFTER:
            return applied
        with whole_folder(self.folder, replace=True, marks=(_RECORD,)) as scratch:
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
        """Leave nothing."""
        remove_folder(self.folder)

    def _open(self, folder: Path) -> Any:
        return load(str(folder), trust_remote_code=self.context.trust_remote_code)


def _stages(calls: tuple[Call, ...], context: Context) -> list[_Stage]:
    """A place for each step's result, told from the model, the texts, every step before it and all it reads."""
    facts = () if context.corpus is None else context.corpus.facts()
    led: list[Any] = [model_digest(context.original), str(facts), context.seed, context.pair, str(versions())]
    found = []
    for call in calls:
        read = [_as_it_is(name) for name in call.step.reads(call.options)]
        led = [*led, call.step.name, call.options.model_dump(mode="json"), read]
        folder = context.cache / "steps" / fingerprint(led)
        found.append(_Stage(folder=folder, call=call, context=context))
    return found


def _as_it_is(name: str) -> list[Any]:
    """What tells a file or folder from itself after a change; a name that is neither stands for itself."""
    path = Path(name)
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    seen = [(str(file), file.stat()) for file in files if file.is_file()]
    return [name, [(file, found.st_size, found.st_mtime_ns) for file, found in seen]]


def _write(made: AdditionalModel, folder: Path) -> None:
    made.model.save_pretrained(str(folder / _MODEL), create_model_card=False)
    (folder / _FILES).mkdir()
    for name, content in made.files.items():
        (folder / _FILES / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _files(folder: Path) -> dict[str, str | bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}

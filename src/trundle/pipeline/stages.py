"""Resuming an interrupted run: the cache keeps the result of each finished method until the run is saved.

The same command skips the methods whose results it finds. Results that took seconds are not kept; a training
that was interrupted resumes from its own checkpoint. Several runs may start with the same methods, so an
entry may appear or vanish at any moment; that costs time and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trundle.cache import cache_entry, file_state
from trundle.folders import atomic_folder, remove_folder
from trundle.methods.contract import AdditionalModel, Applied, Context, Options, Plan
from trundle.model.load import load
from trundle.model.save import model_digest
from trundle.recipe import Call
from trundle.records import versions

_KEPT_AFTER = 5.0
"""A result that took fewer seconds is not kept."""
_RECORD, _MODEL, _FILES, _ADDITIONAL = "record.json", "model", "files", "besides"


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

"""Read a run from its folder, without loading its model: lineage, training logs, planning record, files."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from trundle import records
from trundle.bench.workload import short_names
from trundle.errors import BadInput
from trundle.precision import FORMATS, preference
from trundle.records import LINEAGE_FILE, THE_ORIGINAL, QualityScores
from trundle.report import contents
from trundle.report.contents import _Form, _Point, _Quality, _RunRecord, _Training
from trundle.runtime.description import FILE as GRAPHS_FILE
from trundle.runtime.description import installed, read_description
from trundle.runtime.engines import faster_engine

_POINTS = 400
"""The most points of a curve; more can't be seen."""
_TRUNDLE_MODULE = '"trundle.'
"""In modules.json of a folder that sentence-transformers can't load without trundle."""
_TRAININGS = ("contrast", "align")
_TORCH = "torch"

_T = TypeVar("_T")


def _read_runs(folders: Sequence[str | Path]) -> tuple[_RunRecord, ...]:
    """Read all runs; each gets a name that differs from the others."""
    if not folders:
        raise BadInput("there is no run to report on; name at least one folder that trundle wrote")
    places = [Path(folder).expanduser() for folder in folders]
    runs = []
    for folder, name in zip(places, short_names([str(place) for place in places]), strict=True):
        if not folder.is_dir():
            raise BadInput(f"there is no folder {str(folder)!r}; name a model folder that trundle wrote")
        lineage = records.read_lineage(folder)
        if lineage is None:
            raise BadInput(f"{folder} has no {LINEAGE_FILE}; name a folder that trundle wrote")
        try:
            runs.append(_run(folder, name, lineage))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            damage = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadInput(f"{folder} can't be read as a run ({damage}); make the folder again") from error
    return tuple(runs)


def _run(folder: Path, name: str, lineage: Mapping[str, Any]) -> _RunRecord:
    ages = list(_generations(lineage))
    after: Mapping[str, Any] = next((age["after"] for age in ages[::-1] if age["after"]), {})
    rows = [(age["source"], row) for age in ages for row in age["steps"]]
    steps = [
        _parsed(
            contents._StepTaken,
            row,
            begins_from=Path(source).name or source,
            options={key: value for key, value in row["options"].items() if value not in (None, "")},
        )
        for source, row in rows
    ]

    def last_plan(step: str, key: str) -> Any:
        plans = [row["plan"] for _, row in rows if row["step"] == step]
        return next((plan for plan in plans[::-1] if plan.get(key) not in (None, [])), None)

    losses, cut = last_plan("depth", "losses"), last_plan("vocabulary", "coverage")
    forms = _forms(folder, after)
    modules = folder / "modules.json"
    weights = records.read_weight_map(folder)
    return _RunRecord(
        name=name,
        folder=str(folder),
        source=str(ages[0]["source"]),
        teacher=_teacher_of(lineage),
        parameters=int(after.get("parameters", 0)),
        layers=int(after.get("layers", 0)),
        width=int(after.get("width", 0)),
        parts={part: int(cost["parameters"]) for part, cost in after.get("parts", {}).items()},
        origin=ages[0]["before"],
        forms=forms,
        form=_fastest(forms),
        needs_trundle=modules.is_file() and _TRUNDLE_MODULE in modules.read_text(encoding="utf-8"),
        pair=any(step.step == "pair" for step in steps),
        quality=_stored_quality(lineage["scores"]),
        scores={
            key: float(value) for key, value in lineage["scores"].items() if isinstance(value, int | float)
        },
        steps=tuple(steps),
        data=tuple(lineage["data"]),
        seed=int(lineage["seed"]),
        versions=lineage["versions"],
        trainings=tuple(found for step in _TRAININGS if (found := _read_training(folder, step)) is not None),
        layer_losses=losses and _parsed(contents._LayerLosses, losses, kept=len(losses["blocks"])),
        coverage=cut and _parsed(contents._Coverage, cut, kept=_count_ids(cut["kept"])),
        pruned=weights.matrices if weights else (),
        alignment=weights.alignment if weights else None,
        planning=records.read_planning(folder),
    )


def _parsed(kind: type[_T], row: Mapping[str, Any], **changes: Any) -> _T:
    """Make a record of a JSON object, which may have other fields as well."""
    return TypeAdapter(kind).validate_python({**row, **changes})


def _generations(lineage: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield a lineage and those of the models it was made from, the oldest first."""
    if lineage is not None:
        yield from _generations(lineage.get("parent"))
        yield lineage


def _teacher_of(lineage: Mapping[str, Any]) -> str:
    """Return the model whose vector space this one is in: the one it was aligned to, or else its source."""
    space, parent = lineage["space"], lineage.get("parent")
    if space is None and parent is not None:
        return _teacher_of(parent)
    return str(lineage["source"] if space in (None, THE_ORIGINAL) else space)


def _forms(folder: Path, after: Mapping[str, Any]) -> tuple[_Form, ...]:
    """Return the torch weights, if they are there, and each exported graph."""
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    forms = [_Form(engine=_TORCH, bytes=weights)] if weights else []
    if (folder / GRAPHS_FILE).is_file():
        for graph in read_description(folder).graphs:
            path = folder / graph.path
            files = [file for file in path.parent.glob("*") if file.name.split(".")[0] == path.stem]
            if installed(graph.engine) and files:
                size = sum(file.stat().st_size for file in files)
                forms.append(_Form(engine=f"{graph.engine}-{graph.precision}", bytes=size))
    return tuple(forms) or (_Form(engine=_TORCH, bytes=int(after.get("bytes", 0))),)


def _fastest(forms: Sequence[_Form]) -> _Form:
    """Return the form the runtime would choose: a graph before torch, low precision before high."""
    first = faster_engine(platform.machine())

    def rank(form: _Form) -> tuple[int, bool]:
        engine, _, precision = form.engine.partition("-")
        return (preference(precision) if precision else len(FORMATS)), engine != first

    return min(forms, key=rank)


def _weigh(folder: Path) -> tuple[int, int]:
    size = parameters = 0
    for file in folder.rglob("*.safetensors"):
        size += file.stat().st_size
        try:
            with safe_open(str(file), framework="np") as weights:
                tensors = [weights.get_slice(name) for name in list(weights.keys())]
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{file} is truncated or damaged ({error}); make the folder again") from error
        parameters += sum(math.prod(each.get_shape()) for each in tensors if "F" in each.get_dtype())
    return size, parameters


def _stored_quality(scores: Mapping[str, Any]) -> _Quality | None:
    found = QualityScores.from_scores(scores)
    measured = "texts that were held out when the run was made"
    return None if found is None else _Quality(measured=measured, **asdict(found))


def _read_training(folder: Path, method: str) -> _Training | None:
    log = records.read_training_log(folder, method)

    def points(values: Sequence[float | None]) -> tuple[_Point, ...]:
        found = zip((float(record.step) for record in log), values, strict=True)
        return tuple((step, value) for step, value in found if value is not None and math.isfinite(value))

    loss, validation = points([record.loss for record in log]), points([record.validation for record in log])
    if not loss and not validation:
        return None
    names = sorted({name for record in log for name in record.measures})
    return _Training(
        step=method,
        loss=_thinned(loss, _POINTS),
        validation=validation,
        watched={name: points([record.measures.get(name) for record in log]) for name in names},
    )


def _thinned(points: Sequence[_T], most: int) -> tuple[_T, ...]:
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(place * (len(points) - 1) / (most - 1))] for place in range(most))


def _count_ids(ranges: str) -> int:
    """Count the ids in a list of ranges such as 0-4,7."""
    ends = [part.partition("-") for part in ranges.split(",") if part]
    return sum(int(high or low) - int(low) + 1 for low, _, high in ends)

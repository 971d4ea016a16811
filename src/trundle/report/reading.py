"""What a run's folder tells without its model being opened: its lineage, its trainings, its plans, its files."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from trundle.errors import BadInput
from trundle.records import (
    LINEAGE_FILE,
    THE_ORIGINAL,
    MethodRecord,
    QualityScores,
    read_lineage,
    read_planning,
    read_training_log,
    read_weight_map,
)
from trundle.report.records import (
    _Coverage,
    _Form,
    _LayerLosses,
    _Point,
    _Quality,
    _Run,
    _StepTaken,
    _Training,
)
from trundle.runtime.description import FILE as GRAPHS_FILE
from trundle.runtime.description import installed, read_description
from trundle.runtime.engines import SMALLEST_FIRST, faster_engine

_POINTS = 400
"""A curve is thinned to so many points: more can't be seen."""

_T = TypeVar("_T")


def _read_training(folder: Path, method: str) -> _Training | None:
    """The curves of a method's training log; None if there is no log."""
    log = read_training_log(folder, method)

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
    """Evenly spaced ones, the first and the last among them."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(place * (len(points) - 1) / (most - 1))] for place in range(most))


def _weigh(folder: Path) -> tuple[int, int]:
    """Bytes and parameters of a model's safetensors, by their headers alone."""
    size = parameters = 0
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        size += file.stat().st_size
        parameters += sum(
            math.prod(tensor["shape"])
            for name, tensor in header.items()
            if name != "__metadata__" and "F" in tensor["dtype"]
        )
    return size, parameters


_OWN_MODULE = '"trundle.'
"""In the list of modules of a folder that plain sentence-transformers can't open alone."""
_TRAININGS = ("contrast", "align")
"""Steps that leave a file of metrics, in the order in which they are usually taken."""
_TORCH = "torch"


def _read_runs(folders: Sequence[str | Path]) -> tuple[_Run, ...]:
    """All runs, each with a name that tells it from the others."""
    if not folders:
        raise BadInput("there is no run to report on; name at least one folder that trundle wrote")
    places = [Path(folder).expanduser() for folder in folders]
    return tuple(
        _read_run(place, name)
        for place, name in zip(places, short_names([str(place) for place in places]), strict=True)
    )


def _read_run(folder: Path, name: str) -> _Run:
    """One folder that a step, a recipe or a budget has left."""
    if not folder.is_dir():
        raise BadInput(f"there is no folder {str(folder)!r}; name a model folder that trundle wrote")
    lineage = read_lineage(folder)
    if lineage is None:
        raise BadInput(
            f"{folder} has no {LINEAGE_FILE}, so it is no run of trundle's; name a folder that a step or compress wrote"
        )
    try:
        return _run(folder, name, lineage)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(
            f"{folder} can't be read as a run ({type(error).__name__}: {error}); make the folder again"
        ) from error


def _run(folder: Path, name: str, lineage: Mapping[str, Any]) -> _Run:
    ages = list(_generations(lineage))
    after: Mapping[str, Any] = lineage["after"] or next(
        (age["after"] for age in ages[::-1] if age["after"]), {}
    )
    forms = _forms(folder, after)
    taken = [(age["source"], MethodRecord.from_json(row)) for age in ages for row in age["steps"]]
    steps = tuple(
        _StepTaken(
            begins_from=_name(source),
            step=method.step,
            says=method.says,
            options={key: value for key, value in method.options.items() if value not in (None, "")},
            facts=method.facts,
        )
        for source, method in taken
    )
    plans = [(method.step, method.plan) for _, method in taken]
    weights = read_weight_map(folder)
    return _Run(
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
        needs_trundle=_needs_trundle(folder),
        pair=any(step.step == "pair" for step in steps),
        quality=_kept_quality(lineage["scores"]),
        scores={
            key: float(value) for key, value in lineage["scores"].items() if isinstance(value, int | float)
        },
        steps=steps,
        data=tuple(lineage["data"]),
        seed=int(lineage["seed"]),
        versions=lineage["versions"],
        trainings=tuple(found for step in _TRAININGS if (found := _read_training(folder, step)) is not None),
        layer_losses=_layer_losses(plans),
        coverage=_coverage(plans),
        pruned=weights.matrices if weights else (),
        alignment=weights.alignment if weights else None,
        planning=read_planning(folder),
    )


def _generations(lineage: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A lineage and those of the models it was made from, the oldest first."""
    if lineage is not None:
        yield from _generations(lineage.get("parent"))
        yield lineage


def _teacher_of(lineage: Mapping[str, Any]) -> str:
    """The model whose vector space this one is in: the one it was aligned to, or else the one it was cut from."""
    space, parent = lineage["space"], lineage.get("parent")
    if space is None and parent is not None:
        return _teacher_of(parent)
    return str(lineage["source"] if space in (None, THE_ORIGINAL) else space)


def short_names(paths: Sequence[str]) -> list[str]:
    """The end of each path, as long as it must be to differ from the others."""
    parts = [Path(path).resolve().parts for path in paths]
    shown = []
    for own in parts:
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in set(parts)) > 1:
            length += 1
        shown.append("/".join(own[-length:]))
    return [
        f"{name} ({shown[:place].count(name) + 1})" if name in shown[:place] else name
        for place, name in enumerate(shown)
    ]


def _name(path: str) -> str:
    return Path(path).name or path


def _forms(folder: Path, after: Mapping[str, Any]) -> tuple[_Form, ...]:
    """The torch weights, if they are there, and each exported graph."""
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    forms = [_Form(engine=_TORCH, bytes=weights)] if weights else []
    if (folder / GRAPHS_FILE).is_file():
        for graph in read_description(folder).graphs:
            path = folder / graph.path
            same = [file for file in path.parent.glob("*") if file.name.split(".")[0] == path.stem]
            if installed(graph.engine) and same:
                size = sum(file.stat().st_size for file in same)
                forms.append(_Form(engine=f"{graph.engine}-{graph.precision}", bytes=size))
    return tuple(forms) or (_Form(engine=_TORCH, bytes=int(after.get("bytes", 0))),)


def _fastest(forms: Sequence[_Form]) -> _Form:
    """The form the runtime would choose: a graph before torch, small numbers before large ones."""
    first = faster_engine(platform.machine())

    def rank(form: _Form) -> tuple[int, bool]:
        engine, _, precision = form.engine.partition("-")
        return (SMALLEST_FIRST.index(precision) if precision else len(SMALLEST_FIRST)), engine != first

    return min(forms, key=rank)


def _needs_trundle(folder: Path) -> bool:
    path = folder / "modules.json"
    return path.is_file() and _OWN_MODULE in path.read_text(encoding="utf-8")


def _kept_quality(scores: Mapping[str, Any]) -> _Quality | None:
    """The scores of a lineage that compare the model with its teacher."""
    found = QualityScores.from_scores(scores)
    if found is None:
        return None
    return _Quality(measured="texts that were held out when the run was made", **asdict(found))


_Plans = Sequence[tuple[str, Mapping[str, Any]]]


def _layer_losses(plans: _Plans) -> _LayerLosses | None:
    for step, plan in reversed(plans):
        if step == "depth" and plan.get("losses"):
            losses = tuple(float(loss) for loss in plan["losses"])
            return _LayerLosses(losses=losses, kept=len(plan["blocks"]), pick=str(plan["pick"]))
    return None


def _coverage(plans: _Plans) -> _Coverage | None:
    for step, plan in reversed(plans):
        if step == "vocabulary" and plan.get("coverage") is not None:
            return _Coverage(
                kept=_count_ids(plan["kept"]),
                of=int(plan["of"]),
                coverage=float(plan["coverage"]),
                lost=tuple(plan["lost"]),
            )
    return None


def _count_ids(ranges: str) -> int:
    """How many ids a list such as 0-4,7 stands for."""
    ends = [part.partition("-") for part in ranges.split(",") if part]
    return sum(int(high or low) - int(low) + 1 for low, _, high in ends)

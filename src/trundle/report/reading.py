"""What a run's folder tells without its model being opened: its lineage, its trainings, its plans, its files."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trundle.artifact import LINEAGE_FILE, THE_ORIGINAL, read_lineage
from trundle.errors import BadInput
from trundle.report.records import Coverage, Form, LayerLosses, Quality, Run, StepTaken
from trundle.report.side_files import read_alignment, read_planning, read_pruned, read_training
from trundle.runtime.describe import FILE as GRAPHS_FILE
from trundle.runtime.describe import installed, read_description
from trundle.runtime.engines import SMALLEST_FIRST, faster_engine

OWN_MODULE = '"trundle.'
"""In the list of modules of a folder that plain sentence-transformers can't open alone."""
TRAININGS = ("contrast", "align")
"""Steps that leave a file of metrics, in the order in which they are usually taken."""
TORCH = "torch"


def read_runs(folders: Sequence[str | Path]) -> tuple[Run, ...]:
    """All runs, each with a name that tells it from the others."""
    if not folders:
        raise BadInput("there is no run to report on; name at least one folder that trundle wrote")
    places = [Path(folder).expanduser() for folder in folders]
    return tuple(
        read_run(place, name)
        for place, name in zip(places, short_names([str(place) for place in places]), strict=True)
    )


def read_run(folder: Path, name: str) -> Run:
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


def _run(folder: Path, name: str, lineage: Mapping[str, Any]) -> Run:
    ages = list(generations(lineage))
    after: Mapping[str, Any] = lineage["after"] or next(
        (age["after"] for age in ages[::-1] if age["after"]), {}
    )
    forms = _forms(folder, after)
    steps = tuple(
        StepTaken(
            begins_from=_name(age["source"]),
            step=step["step"],
            says=step["says"],
            options={key: value for key, value in step["options"].items() if value not in (None, "")},
            facts=step["facts"],
        )
        for age in ages
        for step in age["steps"]
    )
    plans = [(step["step"], step["plan"]) for age in ages for step in age["steps"]]
    return Run(
        name=name,
        folder=str(folder),
        source=str(ages[0]["source"]),
        teacher=teacher_of(lineage),
        parameters=int(after.get("parameters", 0)),
        layers=int(after.get("layers", 0)),
        width=int(after.get("width", 0)),
        parts={part: int(cost["parameters"]) for part, cost in after.get("parts", {}).items()},
        origin=ages[0]["before"],
        forms=forms,
        form=_fastest(forms),
        needs_trundle=_needs_trundle(folder),
        pair=any(step.step == "pair" for step in steps),
        quality=kept_quality(lineage["scores"]),
        scores={
            key: float(value) for key, value in lineage["scores"].items() if isinstance(value, int | float)
        },
        steps=steps,
        data=tuple(lineage["data"]),
        seed=int(lineage["seed"]),
        versions=lineage["versions"],
        trainings=tuple(found for step in TRAININGS if (found := read_training(folder, step)) is not None),
        layer_losses=_layer_losses(plans),
        coverage=_coverage(plans),
        pruned=read_pruned(folder),
        alignment=read_alignment(folder),
        planning=read_planning(folder),
    )


def generations(lineage: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A lineage and those of the models it was made from, the oldest first."""
    if lineage is not None:
        yield from generations(lineage.get("parent"))
        yield lineage


def teacher_of(lineage: Mapping[str, Any]) -> str:
    """The model whose vector space this one is in: the one it was aligned to, or else the one it was cut from."""
    space, parent = lineage["space"], lineage.get("parent")
    if space is None and parent is not None:
        return teacher_of(parent)
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


def _forms(folder: Path, after: Mapping[str, Any]) -> tuple[Form, ...]:
    """The torch weights, if they are there, and each exported graph."""
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    forms = [Form(engine=TORCH, bytes=weights)] if weights else []
    if (folder / GRAPHS_FILE).is_file():
        for graph in read_description(folder).graphs:
            path = folder / graph.path
            same = [file for file in path.parent.glob("*") if file.name.split(".")[0] == path.stem]
            if installed(graph.engine) and same:
                size = sum(file.stat().st_size for file in same)
                forms.append(Form(engine=f"{graph.engine}-{graph.precision}", bytes=size))
    return tuple(forms) or (Form(engine=TORCH, bytes=int(after.get("bytes", 0))),)


def _fastest(forms: Sequence[Form]) -> Form:
    """The form the runtime would choose: a graph before torch, small numbers before large ones."""
    first = faster_engine(platform.machine())

    def rank(form: Form) -> tuple[int, bool]:
        engine, _, precision = form.engine.partition("-")
        return (SMALLEST_FIRST.index(precision) if precision else len(SMALLEST_FIRST)), engine != first

    return min(forms, key=rank)


def _needs_trundle(folder: Path) -> bool:
    path = folder / "modules.json"
    return path.is_file() and OWN_MODULE in path.read_text(encoding="utf-8")


def kept_quality(scores: Mapping[str, Any]) -> Quality | None:
    """The figures of a lineage's scores that tell how near a model is to its teacher."""
    found: dict[str, float] = {}
    k = 10
    for name, value in scores.items():
        if match := re.match(r"agreement@(\d+), (searching the index|own index)", name):
            k = int(match[1])
            found["agreement_standard" if match[2] == "own index" else "agreement_asymmetric"] = float(value)
        elif name.startswith("cosine to "):
            found["cosine"] = float(value)
        elif name.startswith("l2 distance to "):
            found["distance"] = float(value)
    return Quality(measured="texts that were held out when the run was made", k=k, **found) if found else None


Plans = Sequence[tuple[str, Mapping[str, Any]]]


def _layer_losses(plans: Plans) -> LayerLosses | None:
    for step, plan in reversed(plans):
        if step == "depth" and plan.get("losses"):
            losses = tuple(float(loss) for loss in plan["losses"])
            return LayerLosses(losses=losses, kept=len(plan["blocks"]), pick=str(plan["pick"]))
    return None


def _coverage(plans: Plans) -> Coverage | None:
    for step, plan in reversed(plans):
        if step == "vocabulary" and plan.get("coverage") is not None:
            return Coverage(
                kept=count_ids(plan["kept"]),
                of=int(plan["of"]),
                coverage=float(plan["coverage"]),
                lost=tuple(plan["lost"]),
            )
    return None


def count_ids(ranges: str) -> int:
    """How many ids a list such as 0-4,7 stands for."""
    ends = [part.partition("-") for part in ranges.split(",") if part]
    return sum(int(high or low) - int(low) + 1 for low, _, high in ends)

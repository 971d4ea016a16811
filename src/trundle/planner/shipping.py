"""The last turn: the graph that is shipped, weighed and timed. Whatever comes of it, the trained model stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trundle.data.corpus import Corpus
from trundle.errors import UserError
from trundle.model import weight_bytes
from trundle.planner.budget import Budget
from trundle.planner.candidates import Candidate, Precision
from trundle.planner.speed import Speed, export_graph, time_queries
from trundle.progress import Progress

CALIBRATION_TEXTS = 400
INSTEAD: Mapping[Precision, tuple[Precision, ...]] = {
    "float32": (),
    "int8": ("float32",),
    "int4": ("float32",),
    "int4+int8": ("int4", "float32"),
}
"""Graphs that multiply in float, for where one of this precision loses too much."""


def ship(
    candidate: Candidate,
    output: Path,
    corpus: Corpus,
    *,
    limits: Budget,
    speeds: Mapping[tuple[str, Precision], Speed],
    progress: Progress,
) -> dict[str, Any]:
    """What an outcome says of the file that is shipped, in its real size and speed; the weights where no graph can be made.

    A graph that loses too much is not forced: one that multiplies in float takes its place where that fits, or none does.
    """
    if not speeds:
        return {"bytes": weight_bytes(output)}
    texts = calibration_texts(corpus)
    try:
        return _graph(output, candidate.precision, texts, progress)
    except UserError as error:
        refused = f"there is no {candidate.precision} graph: {cause(error)}"
    for precision in INSTEAD[candidate.precision]:
        other = replace(candidate, precision=precision)
        fits = limits.allows(
            file_bytes=other.bytes,
            parameters=other.cost.parameters,
            milliseconds=speeds[candidate.base, "float32"].milliseconds(candidate.cost),
        )
        if fits:
            try:
                made = _graph(output, precision, texts, progress)
                return made | {
                    "no_graph": f"{refused}; the {precision} graph fits as well and is there instead"
                }
            except UserError as error:
                refused = f"{refused}; there is no {precision} graph: {cause(error)}"
    left = "the weights are there without it; allow a larger --budget or more --minutes"
    return {"bytes": weight_bytes(output), "no_graph": f"{refused}; {left}"}


def _graph(output: Path, precision: Precision, texts: list[str], progress: Progress) -> dict[str, Any]:
    weight = export_graph(output, precision, calibrate=texts, progress=progress)
    return {"bytes": weight, "milliseconds": time_queries([output])[0].milliseconds}


def calibration_texts(corpus: Corpus) -> list[str]:
    """Of the validation texts, or of those learned from where they are few."""
    texts = [text.text for text in islice(corpus.validation(), CALIBRATION_TEXTS)]
    if len(texts) == CALIBRATION_TEXTS:
        return texts
    return [text.text for text in islice(corpus.train(), CALIBRATION_TEXTS)]


def cause(error: UserError) -> str:
    """What is wrong, without the mend behind the semicolon: that is a flag of `export`, and nobody called it."""
    return (str(error).rpartition("; ")[0] or str(error)).removesuffix(", so nothing was written")

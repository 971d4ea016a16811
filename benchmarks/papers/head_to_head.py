"""Head to head at equal bytes: every method alone, methods combined, and the alternatives, with the figure.

New rows are added with `page.py --take head_to_head teacher=teacher/result.json "KIND: NAME=FILE@BYTES" …`.
FILE is a result of `benchmarks/students.py` or of `trundle evaluate -o`; `FILE#-1-4` picks the size 1/4 of a
nested run. BYTES is the size of the file, or `half` for two bytes per parameter. Where a result is lost,
percentages from LOG.md replace FILE: own index, teacher's index, and number of sets, such as
`98.0/96.0/27@92572416`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from html import escape
from pathlib import Path

from evidence import Figures, Row, merge

from trundle.report.markup import _around_log, _Axis, _Plot, _svg

LEVELS = (2, 4, 8, 16, 32)
SEARCHES = 6
FEW = {2: "2 sets of STS"}
"""How a mean over fewer sets is marked, if not by their number."""
LOWEST = 0.8
WIDE, HIGH, KEY = 480, 610, 310
"""Sizes of the plot and of the key next to it."""
DOT, APART, LINE = 4.5, 10, 17.5
LEGEND = {
    "alone": "one method alone",
    "together": "several together",
    "today": "what one would take instead",
    "today hollow": "can't search the teacher's index",
}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#444}.name{font-weight:600}"
    "svg svg .name{stroke:#fff;stroke-width:3;paint-order:stroke}"
    ".ground{fill:#fff}.rule,.stub{stroke:#e4e4e4}.base,.whole{stroke:#888}.whole{stroke-dasharray:3 5}"
    ".alone{fill:#1f6fb2}.together{fill:#c2410c}.today{fill:#666}circle.hollow{fill:#fff;stroke:#666;stroke-width:2}"
    "@media (prefers-color-scheme:dark){text{fill:#c8c8c8}svg svg .name{stroke:#0d1117}"
    ".ground{fill:#0d1117}.rule,.stub{stroke:#30363d}"
    ".alone{fill:#6db1f5}.together{fill:#ff9d66}.today{fill:#aaa}circle.hollow{fill:#0d1117;stroke:#aaa}}"
)
HEADLINE = {
    "`compress --budget 50MB --minutes 10`, int4": "`compress --budget 50MB --minutes 10`, int4",
    "`compress --budget 25MB --minutes 10`, int4": "`compress --budget 25MB --minutes 10`, int4",
    "`compress --budget 12MB --student all-MiniLM-L6-v2 --minutes 20`, as shipped": "**the ready model: "
    "`compress --budget 12MB --student all-MiniLM-L6-v2 --minutes 20`, int4**",
    "depth, no layers: a static model, aligned": "static, trained into its space, half precision",
    "all-MiniLM-L6-v2 as it is, half precision": "all-MiniLM-L6-v2 as it is, half precision",
}
"""The rows of README's table, and what it calls them."""
Scores = dict[tuple[str, str], float]


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add the teacher's scores, which come first, or a row."""
    if what == "teacher":
        options.teacher = _scores(place)[1]
        return
    kind, name = what.split(": ", 1)
    file, form = place.rsplit("@", 1)
    row: Row = {"kind": kind, "name": name}
    if file.partition("#")[0].endswith(".json"):
        parameters, scores = _scores(file)
        mode = "standard" if scores == options.teacher else "asymmetric"
        there = {key: score for key, score in scores[mode].items() if key[0] == "retrieval"}
        row["bytes"] = 2 * parameters if form == "half" else int(form)
        row["own"] = _share(scores["standard"], options.teacher["standard"])
        row["across"] = _share(there, options.teacher["standard"]) if there else None
        row |= {"sets": len(scores["standard"]), "searches": len(there) or SEARCHES}
    else:
        own, across, sets = file.split("/")
        row |= {"bytes": int(form), "own": float(own) / 100, "across": float(across) / 100, "sets": int(sets)}
    merge(figures["rows"], [row | {"smaller": figures["bytes"] / row["bytes"]}], ("name",))
    figures["rows"].sort(key=lambda one: -one["bytes"])


def _scores(file: str) -> tuple[int, dict[str, Scores]]:
    """Read the parameters of a model and its scores by mode, kind and task."""
    place, _, size = file.partition("#")
    content = json.loads(Path(place).read_text())
    model = next((one for one in content.get("models", []) if one["size"] == size), content)
    found: dict[str, Scores] = {"standard": {}, "asymmetric": {}}
    for one in model.get("scores") or content["results"]:
        found[one["mode"]][one["kind"], one["task"]] = one["score"]
    return int(model.get("parameters", 0)), found


def _share(scores: Scores, whole: Scores) -> float:
    return statistics.fmean(scores.values()) / statistics.fmean(whole[key] for key in scores)


def groups(rows: list[Row]) -> list[list[Row]]:
    """Group rows by how many times smaller they are; the best search of the teacher's index comes first."""
    found = []
    for level in LEVELS:
        above = 2 * level if level != LEVELS[-1] else float("inf")
        here = [row for row in rows if level - 0.05 <= row["smaller"] < above - 0.05]
        found.append(sorted(here, key=lambda row: -(row["across"] or 0)))
    return found


def contenders(figures: Figures) -> str:
    """Render the table; a row has the number it has in the figure."""
    lines = ["| | smaller by | | file | own index | teacher's index |", "|---:|---|---|---:|---:|---:|"]
    for group in groups(figures["rows"]):
        able = [row for row in group if row["across"] is not None]
        full = [row for row in able if row.get("searches", SEARCHES) == SEARCHES]
        for row in group:
            name = f"**{row['name']}**" if len(full) > 1 and row is full[0] else row["name"]
            sets = FEW.get(row["sets"], f"{row['sets']} sets")
            few = "" if row["sets"] == figures["sets"] else f" ({sets})"
            searches = row.get("searches", SEARCHES)
            searched = "can't search it" if row["across"] is None else f"{100 * row['across']:.1f}%"
            searched += "" if searches == SEARCHES else f" ({searches} sets)"
            lines.append(
                f"| {len(lines) - 1} | {row['smaller']:.1f}× | {name} | {row['bytes'] / 1e6:.0f} MB "
                f"| {100 * row['own']:.1f}%{few} | {searched} |"
            )
    return "\n".join(lines)


def headline(figures: Figures) -> str:
    """Render README's table: the model itself and the rows of HEADLINE."""
    lines = ["| model | file | own index | its index |", "|---|---:|---:|---:|"]
    lines.append(f"| all-mpnet-base-v2 | {figures['bytes'] / 1e6:.0f} MB | 100% | 100% |")
    rows = {row["name"]: row for row in figures["rows"]}
    for name, label in HEADLINE.items():
        row = rows[name]
        across = "can't search it" if row["across"] is None else f"{100 * row['across']:.1f}%"
        lines.append(f"| {label} | {row['bytes'] / 1e6:.0f} MB | {100 * row['own']:.1f}% | {across} |")
    return "\n".join(lines)


def figure(figures: Figures) -> str:
    """Draw the share that is kept on the teacher's index against bytes, with a numbered key.

    Rows below the lowest percentage, and those that can't search that index, are in lanes of their own.
    """
    rows = [row for group in groups(figures["rows"]) for row in group]
    low, high = _around_log([row["bytes"] for row in rows])
    lanes = {LOWEST - 0.02: "lower", LOWEST - 0.04: "can't"}
    percentages = tuple(round(LOWEST + 0.05 * number, 2) for number in range(5))
    plot = _Plot(
        title="What is kept of all-mpnet-base-v2's search against the size of the file",
        height=HIGH,
        across=_Axis(
            label="size of the weights (log scale)",
            low=low,
            high=high,
            log=True,
            write=lambda v: f"{v / 1e6:g} MB",
        ),
        up=_Axis(
            label="kept of its retrieval when searching its index",
            low=LOWEST - 0.055,
            high=1.015,
            at=(*lanes, *percentages),
            write=lambda v: lanes.get(v) or f"{100 * v:.0f}%",
        ),
    )
    plot.level(1.0, "whole")
    below, none = lanes
    places: list[tuple[float, float]] = []
    entries: list[tuple[str, str, str]] = []
    for number, row in enumerate(rows, start=1):
        across = row["across"]
        up = none if across is None else across if across >= LOWEST else below
        x = float(row["bytes"])
        while any(
            abs(plot.x(x) - plot.x(other)) < APART and abs(plot.y(up) - plot.y(height)) < APART
            for other, height in places
        ):
            x *= 1.01
        places.append((x, up))
        label = str(row.get("label") or row["name"]) + (
            f" ({100 * across:.1f}%)" if across and up == below else ""
        )
        kind = f"{row['kind']} hollow" if across is None else row["kind"]
        plot.dot((x, up), kind, size=DOT, stop=False, says=f"{label}: {row['bytes'] / 1e6:.0f} MB")
        entries.append((row["kind"], f"{number}", label))
    for place, (kind, number_text, _) in zip(places, entries, strict=True):
        plot.name(place, number_text, kind, size=DOT)
    parts = ['<rect class="ground" width="100%" height="100%"/>']
    parts.append(plot.svg().replace("<svg ", f'<svg width="{WIDE}" height="{HIGH}" ', 1))
    drawn = _svg(WIDE + KEY, HIGH, plot.title, [f"<style>{STYLE}</style>", *parts, *_key(entries)])
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _key(entries: list[tuple[str, str, str]]) -> list[str]:
    """Draw what colours mean, then the number and label of every row."""
    parts = []
    for line, (kind, says) in enumerate(LEGEND.items(), start=1):
        parts.append(f'<circle class="{kind}" cx="{WIDE + 14}" cy="{LINE * line - 4.5:g}" r="{DOT}"/>')
        parts.append(f'<text x="{WIDE + 28}" y="{LINE * line:g}">{says}</text>')
    for line, (kind, number, says) in enumerate(entries, start=len(LEGEND) + 2):
        y = f'y="{LINE * line:g}"'
        parts.append(f'<text class="name {kind}" text-anchor="end" x="{WIDE + 20}" {y}>{number}</text>')
        parts.append(f'<text x="{WIDE + 28}" {y}>{escape(says)}</text>')
    return parts

"""Head to head at equal bytes: every method alone, together, and what one would take instead.

    python benchmarks/papers/head_to_head.py --teacher teacher/result.json --hardware "one H200" --versions torch=2.11.0 \
        "alone: depth, 6 layers=range/6/result.json@half" "together: int4=q4/result.json@11585891" "today: …"

A row is a kind, a name, a file with scores (of `benchmarks/leaf.py`, `depth_range.py`, `heal.py`, `width.py` or `trundle evaluate -o`), and
what it weighs: `half` is two bytes a parameter, a number is that of a file. `width.py`'s files hold several sizes: FILE#-1-4 is that of 1/4. Scores
were taken in half precision on a GPU, or with the graph of that file. Where the file is gone, LOG's per cents stand in its place, own index and
teacher's index, and over how many sets: `98.0/96.0/27@92572416`. `kept/head_to_head.json` is what the page, README's table and the figure are
made of; with `--add` its other rows stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from claims import KEPT, add_origin

from trundle.report.plot import _around_log, _Axis, _Plot, _svg

FILE = KEPT / "head_to_head.json"
KINDS = ("alone", "together", "today")
LEVELS = (2, 4, 8, 16, 32)
SEARCHES = 6
FEW = {12: "12 sets", 2: "2 sets of STS"}
"""What a mean over fewer sets is told as."""
LOWEST = 0.8
WIDE, HIGH, KEY = 480, 560, 310
"""The plot, and the room beside it for what its numbers stand for."""
DOT, APART, LINE = 4.5, 10, 17.5
LEGEND = {
    "alone": "one method alone",
    "together": "several together",
    "today": "what one would take instead",
    "today hollow": "can't search the teacher's index",
}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#444}.name{font-weight:600}svg svg .name{stroke:#fff;stroke-width:3;paint-order:stroke}"
    ".ground{fill:#fff}.rule,.stub{stroke:#e4e4e4}.base,.whole{stroke:#888}.whole{stroke-dasharray:3 5}"
    ".alone{fill:#1f6fb2}.together{fill:#c2410c}.today{fill:#666}circle.hollow{fill:#fff;stroke:#666;stroke-width:2}"
    "@media (prefers-color-scheme:dark){text{fill:#c8c8c8}svg svg .name{stroke:#0d1117}.ground{fill:#0d1117}.rule,.stub{stroke:#30363d}"
    ".alone{fill:#6db1f5}.together{fill:#ff9d66}.today{fill:#aaa}circle.hollow{fill:#0d1117;stroke:#aaa}}"
)
COMMAND = 'python benchmarks/papers/head_to_head.py --teacher main/teacher/result.json "alone: …=range/6/result.json@half" …'


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to a smaller model."""

    kind: str
    name: str
    bytes: int
    smaller: float
    own: float
    """Share of the teacher's mean on its own index."""
    across: float | None
    """Share of the teacher's retrieval on the teacher's index, where it lives in that space."""
    sets: int
    searches: int = SEARCHES
    """How many sets the teacher's index was searched in."""


def read_scores(file: str) -> tuple[int, list[dict[str, Any]]]:
    """Parameters, where they are told, and scores."""
    place, _, size = file.partition("#")
    content = json.loads(Path(place).read_text())
    if "models" in content:
        content = next(one for one in content["models"] if one["size"] == size)
    return int(content.get("parameters", 0)), content.get("scores") or content["results"]


def share(scores: dict[tuple[str, str], float], whole: dict[tuple[str, str], float]) -> float:
    """Of the teacher's mean over the same sets."""
    return statistics.fmean(scores.values()) / statistics.fmean(whole[key] for key in scores)


def contender(row: str, teacher: list[dict[str, Any]], whole_bytes: int) -> Contender:
    kind, rest = row.split(": ", 1)
    name, place = rest.rsplit("=", 1)
    file, form = place.rsplit("@", 1)
    if not file.partition("#")[0].endswith(".json"):
        own, across, sets = file.split("/")
        return Contender(
            kind=kind,
            name=name,
            bytes=int(form),
            smaller=whole_bytes / int(form),
            own=float(own) / 100,
            across=float(across) / 100,
            sets=int(sets),
        )
    parameters, scores = read_scores(file)
    weight = 2 * parameters if form == "half" else int(form)
    whole = {(one["kind"], one["task"]): one["score"] for one in teacher if one["mode"] == "standard"}
    alone = {(one["kind"], one["task"]): one["score"] for one in scores if one["mode"] == "standard"}
    mode = "standard" if scores == teacher else "asymmetric"
    searches = [one for one in scores if (one["kind"], one["mode"]) == ("retrieval", mode)]
    there = {(one["kind"], one["task"]): one["score"] for one in searches}
    return Contender(
        kind=kind,
        name=name,
        bytes=weight,
        smaller=whole_bytes / weight,
        own=share(alone, whole),
        across=share(there, whole) if there else None,
        sets=len(alone),
        searches=len(there) or SEARCHES,
    )


def read_kept() -> dict[str, Any]:
    """What was kept, with contenders by size."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    content["contenders"] = [Contender(**one) for one in content["contenders"]]
    return content


def groups(contenders: list[Contender]) -> list[list[Contender]]:
    """By level: at least so many times smaller, but not twice that; the best search first."""
    found = []
    for level in LEVELS:
        above = 2 * level if level != LEVELS[-1] else float("inf")
        here = [one for one in contenders if level - 0.05 <= one.smaller < above - 0.05]
        found.append(sorted(here, key=lambda one: -(one.across or 0)))
    return found


def table(contenders: list[Contender], sets: int) -> list[str]:
    """A row for each, with the number it has in the figure."""
    lines = ["| | smaller by | | file | own index | teacher's index |", "|---:|---|---|---:|---:|---:|"]
    for group in groups(contenders):
        searching = [one for one in group if one.across is not None and one.searches == SEARCHES]
        for one in group:
            name = f"**{one.name}**" if len(searching) > 1 and one == searching[0] else one.name
            few = "" if one.sets == sets else f" ({FEW[one.sets]})"
            searched = "can't search it" if one.across is None else f"{100 * one.across:.1f}%"
            searched += "" if one.searches == SEARCHES else f" ({one.searches} sets)"
            lines.append(
                f"| {len(lines) - 1} | {one.smaller:.1f}× | {name} | {one.bytes / 1e6:.0f} MB | {100 * one.own:.1f}%{few} | {searched} |"
            )
    return lines


def markdown(content: dict[str, Any]) -> str:
    """The section of the page."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        "## Head to head at equal bytes",
        "",
        content["says"],
        "",
        "![size of the file against what is kept of the search](head-to-head.svg)",
        "",
    ]
    lines += table(content["contenders"], content["sets"])
    lines += ["", *(f"- {note}" for note in content["notes"]), ""]
    lines += [
        f"{content['hardware']}; {versions}. The rows come from the scripts named in [LOG](../LOG.md); put together with:",
        "",
        "```bash",
    ]
    return "\n".join([*lines, COMMAND, "```"])


def figure(content: dict[str, Any]) -> str:
    """The share kept on the teacher's index against bytes, every dot with the number of its row, and beside it what the numbers stand for.

    Rows under the lowest per cent, and those that can't search that index, lie in lanes of their own.
    """
    contenders = [one for group in groups(content["contenders"]) for one in group]
    low, high = _around_log([one.bytes for one in contenders])
    lanes = {LOWEST - 0.02: "lower", LOWEST - 0.04: "can't"}
    per_cents = tuple(round(LOWEST + 0.05 * number, 2) for number in range(5))
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
            at=(*lanes, *per_cents),
            write=lambda v: lanes.get(v) or f"{100 * v:.0f}%",
        ),
    )
    plot.level(1.0, "whole")
    below, none = lanes
    places: list[tuple[float, float]] = []
    told: list[tuple[str, str, str]] = []
    for number, one in enumerate(contenders, start=1):
        up = none if one.across is None else one.across if one.across >= LOWEST else below
        x = float(one.bytes)
        while any(
            abs(plot.x(x) - plot.x(other)) < APART and abs(plot.y(up) - plot.y(height)) < APART
            for other, height in places
        ):
            x *= 1.01
        places.append((x, up))
        says = f"{content['named'][one.name]}{f' ({100 * one.across:.1f}%)' if one.across and up == below else ''}"
        kind = f"{one.kind} hollow" if one.across is None else one.kind
        plot.dot((x, up), kind, size=DOT, stop=False, says=f"{says}: {one.bytes / 1e6:.0f} MB")
        told.append((one.kind, f"{number}", says))
    for place, (kind, label, _) in zip(places, told, strict=True):
        plot.name(place, label, kind, size=DOT)
    parts = ['<rect class="ground" width="100%" height="100%"/>']
    parts.append(plot.svg().replace("<svg ", f'<svg width="{WIDE}" height="{HIGH}" ', 1))
    drawn = _svg(WIDE + KEY, HIGH, plot.title, [f"<style>{STYLE}</style>", *parts, *key(told)])
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def key(told: list[tuple[str, str, str]]) -> list[str]:
    """What colours mean, then kind, number and name of every row."""
    parts = []
    for line, (kind, says) in enumerate(LEGEND.items(), start=1):
        parts.append(f'<circle class="{kind}" cx="{WIDE + 14}" cy="{LINE * line - 4.5:g}" r="{DOT}"/>')
        parts.append(f'<text x="{WIDE + 28}" y="{LINE * line:g}">{says}</text>')
    for line, (kind, number, says) in enumerate(told, start=len(LEGEND) + 2):
        y = f'y="{LINE * line:g}"'
        parts.append(f'<text class="name {kind}" text-anchor="end" x="{WIDE + 20}" {y}>{number}</text>')
        parts.append(f'<text x="{WIDE + 28}" {y}>{escape(says)}</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--teacher", required=True, help="its scores")
    parser.add_argument("--add", action="store_true", help="to the rows there are")
    parser.add_argument("--says", help="what the table shows")
    parser.add_argument("--notes", nargs="+")
    parser.add_argument("--named", nargs="+", metavar="ROW=LABEL", help="what the figure calls a row")
    add_origin(parser)
    options = parser.parse_args()
    parameters, teacher = read_scores(options.teacher)
    old: dict[str, Any] = json.loads(FILE.read_text())
    rows = {one["name"]: one for one in old["contenders"]} if options.add else {}
    rows |= {
        one.name: asdict(one) for one in (contender(row, teacher, 4 * parameters) for row in options.rows)
    }
    content = old | {
        "says": options.says or old["says"],
        "notes": options.notes or old["notes"],
        "named": old["named"] | dict(pair.rsplit("=", 1) for pair in options.named or []),
        "hardware": options.hardware or old["hardware"],
        "versions": old["versions"] | dict(options.versions),
        "bytes": 4 * parameters,
        "contenders": sorted(rows.values(), key=lambda one: -one["bytes"]),
    }
    if not options.add:
        content["sets"] = len([one for one in teacher if one["mode"] == "standard"])
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(markdown(read_kept()))


if __name__ == "__main__":
    main()

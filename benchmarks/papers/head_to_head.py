"""Head to head at equal bytes: every method alone, together, and what one would take instead.

    python benchmarks/papers/head_to_head.py --teacher teacher/result.json --hardware "one H200" --versions torch=2.11.0 \
        "alone: depth, 6 layers=range/6/result.json@half" "together: int4=q4/result.json@11585891" "today: …"

A row is a kind, a name, a file with scores (of `benchmarks/leaf.py`, `depth_range.py`, `heal.py`, `width.py` or `trundle evaluate -o`), and
what it weighs: `half` is two bytes a parameter, a number is that of a file. `width.py`'s files hold several sizes: FILE#-1-4 is that of 1/4. Scores
were taken in half precision on a GPU, or with the graph of that file. `kept/head_to_head.json` is what the page, README's table and the figure are
made of; with `--add` its other rows stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from claims import KEPT, add_origin

from trundle.report.axes import Axis, Plot, around_log

FILE = KEPT / "head_to_head.json"
KINDS = ("alone", "together", "today")
LEVELS = (2, 4, 8, 16, 32)
LOWEST = 0.8
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


def read_scores(file: str) -> tuple[int, list[dict[str, Any]]]:
    """Parameters, where they are told, and scores."""
    place, _, size = file.partition("#")
    content = json.loads(Path(place).read_text())
    if "models" in content:
        content = next(one for one in content["models"] if one["size"] == size)
    return int(content.get("parameters", 0)), content.get("scores") or content["results"]


def contender(row: str, teacher: list[dict[str, Any]], whole_bytes: int) -> Contender:
    kind, rest = row.split(": ", 1)
    name, place = rest.rsplit("=", 1)
    file, form = place.rsplit("@", 1)
    parameters, scores = read_scores(file)
    weight = 2 * parameters if form == "half" else int(form)
    whole = {(one["kind"], one["task"]): one["score"] for one in teacher if one["mode"] == "standard"}
    own = {(one["kind"], one["task"]): one["score"] for one in scores if one["mode"] == "standard"}
    mode = "standard" if scores == teacher else "asymmetric"
    searches = [one for one in scores if (one["kind"], one["mode"]) == ("retrieval", mode)]
    across = {(one["kind"], one["task"]): one["score"] for one in searches}
    return Contender(
        kind=kind,
        name=name,
        bytes=weight,
        smaller=whole_bytes / weight,
        own=statistics.fmean(own.values()) / statistics.fmean(whole[key] for key in own),
        across=statistics.fmean(across.values()) / statistics.fmean(whole[key] for key in across)
        if across
        else None,
        sets=len(own),
    )


def read_kept() -> dict[str, Any]:
    """What was kept, with contenders by size."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    content["contenders"] = [Contender(**one) for one in content["contenders"]]
    return content


def table(contenders: list[Contender], sets: int) -> list[str]:
    """By level: at least so many times smaller, but not twice that."""
    lines = ["| smaller by | | file | own index | teacher's index |", "|---|---|---:|---:|---:|"]
    for level in LEVELS:
        above = 2 * level if level != LEVELS[-1] else float("inf")
        here = [one for one in contenders if level - 0.05 <= one.smaller < above - 0.05]
        for one in sorted(here, key=lambda one: -(one.across or 0)):
            searching = [each.across for each in here if each.across is not None]
            best = len(searching) > 1 and one.across == max(searching)
            name = f"**{one.name}**" if best else one.name
            few = "" if one.sets == sets else f" ({one.sets} sets)"
            searched = "can't search it" if one.across is None else f"{100 * one.across:.1f}%"
            lines.append(
                f"| {one.smaller:.1f}× | {name} | {one.bytes / 1e6:.0f} MB | {100 * one.own:.1f}%{few} | {searched} |"
            )
    return lines


def markdown(content: dict[str, Any]) -> str:
    """The section of the page."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = ["## Head to head at equal bytes", "", content["says"], "", "![](head-to-head.svg)", ""]
    lines += table(content["contenders"], content["sets"])
    lines += ["", *(f"- {note}" for note in content["notes"]), ""]
    lines += [
        f"{content['hardware']}; {versions}. The rows come from the scripts named in [LOG](../LOG.md); put together with:",
        "",
        "```bash",
    ]
    return "\n".join([*lines, COMMAND, "```"])


def figure(content: dict[str, Any]) -> str:
    """The share kept on the teacher's index against bytes; what can't search it is drawn where its own index puts it, hollow."""
    contenders: list[Contender] = content["contenders"]
    low, high = around_log([one.bytes for one in contenders] + [content["bytes"]])
    plot = Plot(
        title="What is kept of all-mpnet-base-v2's search against the size of the file",
        across=Axis(
            label="size of the weights (log scale)",
            low=low,
            high=high,
            log=True,
            write=lambda v: f"{v / 1e6:g} MB",
        ),
        up=Axis(
            label="retrieval on the teacher's index", low=LOWEST, high=1.02, write=lambda v: f"{100 * v:.0f}%"
        ),
    )
    plot.level(1.0, "whole")
    for one in contenders:
        up = one.own if one.across is None else one.across
        if up >= LOWEST:
            kind = f"{one.kind} hollow" if one.across is None else one.kind
            plot.dot(
                (one.bytes, up),
                kind,
                size=5,
                stop=False,
                says=f"{one.name}: {one.bytes / 1e6:.0f} MB, {100 * up:.1f}%",
            )
    found = {one.name: one for one in contenders}
    for name, label in content["named"].items():
        one = found[name]
        up = one.own if one.across is None else one.across
        if up >= LOWEST:
            plot.name((one.bytes, up), label, one.kind, size=5)
    style = (
        "text{font:13px system-ui,sans-serif;fill:#666}.name{font-weight:600;stroke:#fff;stroke-width:4;paint-order:stroke}"
        ".rule,.stub{stroke:#e4e4e4}.base,.whole{stroke:#999}.whole{stroke-dasharray:3 5}"
        ".alone{fill:#1f6fb2}.together{fill:#d1541b}.today{fill:#777}.hollow{fill:#fff;stroke:#777;stroke-width:2}"
        "@media (prefers-color-scheme:dark){text{fill:#aaa}.name{stroke:#111}.rule,.stub{stroke:#333}.hollow{fill:#111}"
        ".alone{fill:#6db1f5}.together{fill:#ff9d66}.today{fill:#aaa}}"
    )
    return (
        plot.svg()
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace(">", f"><style>{style}</style>", 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--teacher", required=True, help="its scores")
    parser.add_argument("--add", action="store_true", help="to the rows there are")
    parser.add_argument("--says", help="what the table shows")
    parser.add_argument("--notes", nargs="+")
    parser.add_argument("--named", nargs="+", metavar="ROW=LABEL", help="which rows the figure names")
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
        "named": dict(pair.rsplit("=", 1) for pair in options.named) if options.named else old["named"],
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

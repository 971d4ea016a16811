"""`trundle inspect --layers`: on the terminal, in a file, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import pico
from trundle.cli.console import _curve
from trundle.cli.evaluate import _marks
from trundle.methods.depth.curve import LayerCurve
from trundle.report.page import curve_page, curve_svg

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tuples(tmp_path: Path) -> str:
    rows = [
        {"query": f"{text} {n}", "positive": f"{n} {text}", "negative": f"{n}"}
        for n in range(20)
        for text in pico.TEXTS
    ]
    (tmp_path / "tuples.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(tmp_path / "tuples.jsonl")


def test_the_curve_on_the_screen_and_in_a_file(
    run: Run, tuples: str, pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(pico_folders("llama"))
    page = tmp_path / "curve.html"
    code, out, err = run("inspect", model, "--layers", "--data", tuples, "-o", str(page), "-q")
    assert code == 0, err
    assert f"Written to {page}" in out
    code, machine, _ = run("inspect", model, "--layers", "--data", tuples, "--json")
    curve = json.loads(machine)["curve"]
    assert len(curve["losses"]) == pico.LAYERS
    for name in ("small", "large"):
        assert f"{name}: {curve[name]}" in out
        assert re.search(rf"{name} +{curve[name]} of 4 layers +{curve['losses'][curve[name] - 1]:.3f}", out)
        assert f"{name}: {curve[name]}</text>" in page.read_text()
    assert "FLOPs/token" in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layers"], "pass them with --data"),
        (["--data", "TUPLES"], "add --layers"),
        (["-o", "x.html"], "add --layers"),
        (["--layers", "--data", "TUPLES", "-o", "curve.doc"], "ends in .html or .svg"),
        (["--layers", "--data", "TUPLES", "-o", "no/such/folder/curve.svg"], "folder that exists"),
    ],
)
def test_contradicting_flags(run: Run, tuples: str, words: list[str], says: str) -> None:
    code, _, err = run("inspect", "no-such-model", *(word.replace("TUPLES", tuples) for word in words))
    assert code == 2
    assert says in err


def test_a_folder_that_is_not_writable_is_rejected_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    code, _, err = run("inspect", "no-such-model", "--layers", "--data", "x", "-o", str(tmp_path / "a.svg"))
    assert (code, "exists and is writable" in err) == (2, True)


CURVES = [
    LayerCurve(losses=(1.5,), tuples=2),
    LayerCurve(losses=(1.5, 1.5), tuples=2),
    LayerCurve(losses=(3.0, 1.0, 2.0, 4.0, 0.5, 5.0, 6.0), tuples=2),
    LayerCurve(losses=tuple(float(n % 7) for n in range(100)), tuples=2),
]


@pytest.mark.parametrize("curve", CURVES)
def test_any_curve_can_be_drawn(curve: LayerCurve) -> None:
    svg = curve_svg(curve.losses, _marks(curve), "a <b> & c")
    tree = ElementTree.fromstring(svg)
    circles = tree.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == curve.layers
    assert all(0 <= float(c.get("cx", -1)) <= 760 and 0 <= float(c.get("cy", -1)) <= 380 for c in circles)
    assert "http" not in curve_page(curve.losses, _marks(curve), "t", [("a",), ("b",)], ["n"]).replace(
        "http://www.w3.org", ""
    )
    lines = _curve(curve.losses, {curve.large: "large"})
    assert sum(len(re.findall("[▔─▁]+", line.split("┤")[1])) for line in lines if "┤" in line) >= (
        curve.layers - 1 if curve.layers <= 48 else 1
    )
    assert any(line.rstrip().endswith((f"large: {curve.large}", "↑")) for line in lines)
    assert max(map(len, lines)) < 120


def test_lower_losses_are_drawn_lower() -> None:
    lines = _curve([3.0, 1.0, 2.0], {2: "low"})
    heights = [
        next(row for row, line in enumerate(lines) if line[8 + 3 * n : 9 + 3 * n].strip()) for n in range(3)
    ]
    assert heights[0] < heights[2] < heights[1]

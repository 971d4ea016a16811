"""Output is printed unchanged; without a terminal, progress is a line now and then."""

from __future__ import annotations

import time

import pytest

from trundle.cli import console
from trundle.cli.console import _Lines, _show, _show_table, terminal


def test_brackets_are_printed_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """Tokens, names and paths may look like it."""
    rows = [("name", "size"), ("[unused5]", "1"), ("m[/x]", "2"), (":smile:", "3")]
    _show_table(rows)
    _show("[bold]a line[/bold]")
    out, _ = capfd.readouterr()
    assert all(name in out for name, _ in rows)
    assert "[bold]a line[/bold]" in out


def test_without_a_terminal_the_innermost_task_is_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0.01)
    progress = terminal(quiet=False)
    with progress.task("outside", None), progress.task("inside", 100) as advance:
        advance(25)
        err, until = "", time.monotonic() + 30
        while "inside: 25 of 100, " not in err and time.monotonic() < until:
            time.sleep(0.01)
            err += capfd.readouterr().err
    assert "inside: 25 of 100, " in err
    assert " s left" in err
    assert "outside" not in err


def test_a_line_says_how_much_is_done_how_fast_and_the_time_left() -> None:
    lines = _Lines("teacher vectors", 3000, print)
    assert lines._line(10.0) == "teacher vectors: 0 of 3,000, 10 s so far"
    lines.advance(1000)
    assert lines._line(10.0) == "teacher vectors: 1,000 of 3,000, 100/s, 20 s left"
    assert _Lines("reading", None, print)._line(2.0) == "reading, 2 s so far"
    training = _Lines("align, seconds", 300, print)
    training.advance(60)
    assert training._line(60.0) == "align, seconds: 60 of 300, 240 s left"  # a rate would be 1/s

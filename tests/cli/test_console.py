"""Output is printed unchanged."""

from __future__ import annotations

import pytest

from trundle.cli.console import _show, _show_table


def test_brackets_are_printed_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """Tokens, names and paths may look like it."""
    rows = [("name", "size"), ("[unused5]", "1"), ("m[/x]", "2"), (":smile:", "3")]
    _show_table(rows)
    _show("[bold]a line[/bold]")
    out, _ = capfd.readouterr()
    assert all(name in out for name, _ in rows)
    assert "[bold]a line[/bold]" in out

"""Runs the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from trundle.cli.app import main


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `trundle …` in this process: exit code, stdout, stderr."""

    def call(*words: str, columns: int = 140) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trundle", *words])
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr("warnings.simplefilter", lambda *_, **__: None)
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call

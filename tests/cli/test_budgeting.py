"""What `compress --budget` prints about its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from trundle.cli.compression import _REPORT, _write_report
from trundle.errors import BadInput
from trundle.progress import _Silent
from trundle.report import report
from trundle.report.contents import _Report


def test_the_result_is_shown_without_a_comparison_if_texts_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def make_report(*_: object, data: list[str] | None = None, **__: object) -> _Report:
        asked.append(data)
        if data:
            raise BadInput("38 texts are too few; give at least 100")
        return _Report(runs=(), teacher=None)

    monkeypatch.setattr(report, "make_report", make_report)
    monkeypatch.setattr(report, "write_report", lambda _, place: place.write_text("a page"))
    said: list[str] = []
    progress = _Silent()
    monkeypatch.setattr(progress, "say", said.append)
    _write_report(tmp_path, "model", ["few.txt"], texts=7, trust=False, progress=progress)
    assert asked == [["few.txt"], None]
    assert said == ["the report has no comparison: 38 texts are too few; give at least 100"]
    assert (tmp_path / _REPORT).is_file()

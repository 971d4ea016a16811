"""What `compress --budget` shows of what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trundle import reporting
from trundle.cli import budgeting
from trundle.errors import BadInput
from trundle.progress import Silent
from trundle.report.records import Report


def test_a_model_is_told_of_though_texts_are_too_few_to_compare_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def make_report(*_: object, data: list[str] | None = None, **__: object) -> Report:
        asked.append(data)
        if data:
            raise BadInput("38 texts are too few; give at least 100")
        return Report(runs=(), teacher=None)

    monkeypatch.setattr(reporting, "make_report", make_report)
    monkeypatch.setattr(reporting, "write_report", lambda _, place: place.write_text("a page"))
    said: list[str] = []
    progress = Silent()
    monkeypatch.setattr(progress, "say", said.append)
    budgeting.report(tmp_path, "model", ["few.txt"], texts=7, trust=False, progress=progress)
    assert asked == [["few.txt"], None]
    assert said == ["the report has no comparison: 38 texts are too few; give at least 100"]
    assert (tmp_path / budgeting.REPORT).is_file()

"""Where the time goes."""

from __future__ import annotations

import threading

import pytest

from recorded_progress import RecordedProgress
from trundle import progress
from trundle.progress import Stopwatch


def test_each_second_counts_for_the_innermost_task(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = RecordedProgress()
    watch = Stopwatch(shown)
    now = 1.0
    with watch.task("training", 10) as advance:
        now = 3.0
        with watch.task("validating", None):
            now = 6.0
        advance(7)
        now = 7.0
    now = 7.5
    beside = threading.Thread(target=lambda: watch.task("beside", None).__enter__())
    beside.start()
    beside.join()
    now = 9.0
    assert watch.count() == {"other": 3.0, "training": 3.0, "validating": 3.0}
    assert shown.tasks == [("training", 10), ("validating", None), ("beside", None)]
    assert shown.units == 7


def test_the_time_before_the_first_task_counts_as_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    watch = Stopwatch(RecordedProgress(), began=2.0)
    now = 6.0
    assert watch.count() == {"starting": 3.0, "other": 1.0}

"""What a search that was stopped has left for the next one: figures that must not change, and the folder it had begun to fill.

Without the first, a training would not find its checkpoint, which is kept by all that decides how it goes. Without the second, the
same command given again would be told that its own output is in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trundle.artifact import LINEAGE_FILE, cache_folder, write_whole

TRIALS = "trials"
RATE_FILE, CONTEST_OVER, WRITTEN_FILE = "texts-a-second", "contest-over", "written"


def once(place: Path, measure: Callable[[], float]) -> float:
    """A figure as it was when it was first measured."""
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, repr(measure()))
    return float(place.read_text())


def mark_written(work: Path, output: str | Path) -> None:
    """The output is this search's from here on, until the search is done and its work is gone."""
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / WRITTEN_FILE, _identity(output))


def wrote(work: Path, output: str | Path) -> bool:
    """Whether the search that has its work here has written this output, and nobody since, and was stopped before its end."""
    place = work / WRITTEN_FILE
    return place.is_file() and place.read_text() == _identity(output)


def any_wrote(output: str | Path) -> bool:
    """Whether some search has, told before it is known which one goes on."""
    works = cache_folder() / TRIALS
    return works.is_dir() and any(wrote(work, output) for work in works.iterdir())


def _identity(output: str | Path) -> str:
    lineage = Path(output).resolve() / LINEAGE_FILE
    return f"{lineage} {lineage.stat().st_mtime_ns if lineage.is_file() else None}"

"""A search interrupted at any point resumes when the same command is run again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorded_progress import RecordedProgress
from trundle.cache import locked
from trundle.data.corpus import Corpus
from trundle.errors import BadInput
from trundle.model.cost import cost
from trundle.model.load import load
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request
from trundle.recipe import Recipe
from trundle.runtime.encoder import Encoder
from trundle.search import search, trials
from trundle.search.prospects import _Prospects
from trundle.search.search import compress_to_budget
from trundle.search.trials import Outcome, _Trials

Searching = Callable[..., Outcome]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def searching(pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path) -> Searching:
    """The same command each time, but for what is said."""
    folder = pico_folders("bert", 2)
    whole = cost(load(folder)).file_bytes

    def go(*, share: float = 0.5, output: Path = tmp_path / "small", **options: Any) -> Outcome:
        words = [f"{int(share * whole)}B"]
        return compress_to_budget(
            Request(source=str(folder), output=output, corpus=corpus, **options), words, minutes=0.03
        )

    return go


def stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_search_resumes_from_its_trials(
    searching: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "small"
    with monkeypatch.context() as patch:
        patch.setattr(_Trials, "finish", stopped)
        patch.setattr(_Trials, "_may_try", lambda _self, _tried, number, _until: number == 0)
        with pytest.raises(KeyboardInterrupt):
            searching()
    assert not output.exists()
    made: list[str] = []
    monkeypatch.setattr(trials, "run_recipe", lambda r, s: made.append(str(r.output)) or run_recipe(r, s))
    outcome = searching()
    assert made == [str(output)]  # and no second round, for which there was no time then
    tried = [len(each.distances) for each in outcome.tried if each.distances]
    assert len(tried) > 1
    assert set(tried) == {1}


def test_an_interrupted_final_training_resumes_with_its_time(
    searching: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is kept by its options, and the time that is left is another one."""
    asked = []

    def stopped_at_last(request: Request, recipe: Recipe) -> Any:
        if request.output != tmp_path / "small":
            return run_recipe(request, recipe)
        asked.append(recipe.as_json())
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "run_recipe", stopped_at_last)
    for left in (1.7, 0.4):
        monkeypatch.setattr(search, "_time_left", lambda *_, seconds=left: seconds)
        with pytest.raises(KeyboardInterrupt):
            searching()
    first, second = asked
    assert first == second
    assert first["steps"][-1]["align"]["minutes"] == 1.7 / 60


def test_a_search_interrupted_after_training_only_exports(
    searching: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "small"
    monkeypatch.setattr("trundle.pipeline.run._KEPT_AFTER", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(search, "_ship", stopped)
        with pytest.raises(KeyboardInterrupt):
            searching()
    weights = (output / "model.safetensors").read_bytes()
    with pytest.raises(BadInput, match="already exists"):  # another search has no business with it
        searching(share=1 / 3)
    lineage = output / "trundle.json"
    written = lineage.stat()
    os.utime(lineage, ns=(written.st_atime_ns, written.st_mtime_ns + 1))
    with pytest.raises(
        BadInput, match="already exists"
    ):  # nor this one, once somebody else has written there
        searching()
    os.utime(lineage, ns=(written.st_atime_ns, written.st_mtime_ns))
    monkeypatch.setattr("trundle.methods.align.align.run_training", stopped)
    outcome = searching()
    assert (output / "model.safetensors").read_bytes() == weights
    assert Encoder(output).encode("a text").shape == (32,)
    assert outcome.run is not None
    assert outcome.run.fidelity is not None
    assert not list((tmp_path / "cache" / "trials").iterdir())
    assert not list((tmp_path / "cache" / "steps").iterdir())
    with pytest.raises(BadInput, match="already exists"):
        searching()


def test_a_resumed_search_trains_on_as_many_texts(
    searching: Searching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the machine is then: the teacher's vectors are kept by their number.

    A new search takes the speed of the last one if its own is close to it, for the same reason.
    """
    asked, kinds = [], []

    def noted(self: _Trials, *_: object, **__: object) -> None:
        asked.append(self.texts)
        kinds.append(self.request.fresh)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Trials, "contest", noted)
    for rate, fresh in ((150, False), (300, False), (300, True), (330, True)):
        monkeypatch.setattr(_Prospects, "reading_rate", lambda _, found=rate: float(found))
        with pytest.raises(KeyboardInterrupt):
            searching(fresh=fresh)
    assert asked[0] == asked[1] < asked[2] == asked[3]
    assert kinds == [False, False, True, True]


def test_two_equal_searches_at_once_share_no_trials(
    searching: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Path] = []
    told = RecordedProgress()

    def noted(self: _Trials, *_: object, **__: object) -> None:
        works.append(self.work)
        raise KeyboardInterrupt

    def search_once(name: str) -> None:
        with pytest.raises(KeyboardInterrupt):
            searching(output=tmp_path / name, progress=told)

    monkeypatch.setattr(_Trials, "contest", noted)
    search_once("one")
    with locked(works[0], if_taken=pytest.fail):
        search_once("two")
    search_once("three")
    assert works[0] != works[1]
    assert works[0] == works[2]
    assert [line for line in told.lines if "the same search" in line] == [
        "another process runs the same search; this one starts its own"
    ]

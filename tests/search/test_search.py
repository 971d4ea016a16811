"""From a budget to a folder, on a pico model."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recorded_progress import RecordedProgress
from trundle.cli import tables
from trundle.cli.compression import _run_budget
from trundle.cli.console import _RunFlags
from trundle.data.corpus import Corpus
from trundle.errors import BadInput
from trundle.model import encode
from trundle.model import load as load_module
from trundle.model.cost import cost
from trundle.model.load import load
from trundle.model.matrices import _is_on_grid, grid_weights
from trundle.model.save import model_digest
from trundle.pipeline.run import Request
from trundle.precision import FORMATS
from trundle.records import PLANNING_FILE, read_lineage
from trundle.report import report
from trundle.runtime.encoder import Encoder
from trundle.search import budget, candidates, search, trials
from trundle.search.budget import _CLOSING, _Rung, _Timetable
from trundle.search.candidates import _list_candidates
from trundle.search.limits import TeacherOptions
from trundle.search.prospects import _Prospects
from trundle.search.search import compress_to_budget
from trundle.search.trials import _Trials, _Tried
from trundle.teacher.targets import find_targets


@pytest.mark.usefixtures("quick")
def test_the_best_that_fits_is_trained_exported_and_written(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_OVERTIME", 1000.0)
    monkeypatch.setattr(trials, "_HOPELESS", math.inf)
    folder, output = pico_folders("bert", 2), tmp_path / "small"
    limit = int(0.6 * cost(load(folder)).parameters)
    loaded, plain = [], load_module.model_folder
    with monkeypatch.context() as patched:
        patched.setattr(
            load_module, "model_folder", lambda name, **how: loaded.append(name) or plain(name, **how)
        )
        outcome = compress_to_budget(
            Request(source=str(folder), output=output, corpus=corpus), [f"{limit}-params"], minutes=0.05
        )
    assert loaded.count(str(folder)) == 1, "its trials and the last training use the model in memory"
    tried = [each for each in outcome.tried if each.distances]
    assert len(tried) == 3
    assert outcome.chosen.outcome == "chosen"
    assert len(outcome.chosen.distances) == 2
    assert len({each.steps[0] for each in tried}) == 1, "all are compared after as many steps"
    assert tried[0].steps[0] > 0
    last = [each for each in tried if len(each.distances) == 2]
    assert outcome.chosen.distances[-1] == min(each.distances[-1] for each in last)
    small, large = load(output), load(folder)
    assert small.encode(["a text"]).shape == large.encode(["a text"]).shape
    assert cost(small).parameters == outcome.chosen.candidate.cost.parameters <= limit
    assert Encoder(output).encode("a text").shape == (32,)
    assert 'Encoder("small")' in (card := (output / "README.md").read_text())
    assert f"{cost(large).file_bytes / (outcome.bytes or 1):.1f}× smaller" in card
    assert outcome.run is not None
    assert outcome.run.fidelity is not None
    assert f"On held-out texts: cosine {outcome.run.fidelity.cosine:.4f}" in card
    planning = json.loads((output / PLANNING_FILE).read_text())
    assert planning["chosen"] == outcome.chosen.candidate.name
    assert len(planning["candidates"]) == len(outcome.tried)
    lineage = read_lineage(output)
    assert lineage is not None
    assert lineage["source"] == str(folder)
    assert [step["step"] for step in lineage["steps"]].count("align") == 3
    assert not list((tmp_path / "cache" / "trials").iterdir())


@pytest.mark.usefixtures("quick")
def test_a_static_model_is_chosen_if_no_layer_fits(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    folder, output = pico_folders("bert", 2), tmp_path / "small"
    outcome = compress_to_budget(
        Request(source=str(folder), output=output, corpus=corpus), ["0.1ms"], minutes=0.03
    )
    assert {each.candidate.layers for each in outcome.tried} == {0}
    assert outcome.chosen.candidate.tokens == outcome.chosen.candidate.whole.sizes["vocab"]
    assert Encoder(output).encode("a text").shape == (32,)
    lineage = read_lineage(output)
    assert lineage is not None
    assert {step["step"] for step in lineage["steps"]} == {"depth", "align"}


@pytest.mark.usefixtures("quick")
def test_the_best_candidate_so_far_is_chosen_when_time_is_up(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_TRYING", -1.0)
    words = [f"{cost(load(pico_folders('bert', 2))).file_bytes // 2}B"]
    outcome = compress_to_budget(
        Request(source=str(pico_folders("bert", 2)), output=tmp_path / "small", corpus=corpus),
        words,
        minutes=0.03,
    )
    chosen, *others = outcome.tried
    assert (chosen.outcome, len(chosen.distances)) == ("chosen", 1)
    assert others
    assert {(each.outcome, each.distances) for each in others} == {("no time to try it", ())}


@pytest.mark.usefixtures("quick")
def test_a_model_that_fits_once_it_is_int8_is_only_exported(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [replace(row, bytes_per_layer=0) for row in FORMATS]
    monkeypatch.setattr("trundle.model.cost.FORMATS", rows)
    monkeypatch.setattr("trundle.model.cost._SMALLEST_INT8", 0)
    folder, output = pico_folders("bert", 2), tmp_path / "small"
    outcome = compress_to_budget(
        Request(source=str(folder), output=output, corpus=corpus), ["2x"], minutes=0.03
    )
    assert outcome.chosen.candidate.untouched
    assert outcome.chosen.outcome == "chosen"
    assert outcome.run is not None
    assert outcome.run.fidelity is not None
    assert 0.9 < outcome.run.fidelity.cosine < 1 - 1e-7, "the graph is measured, not the weights"
    np.testing.assert_array_equal(load(output).encode(["a text"]), load(folder).encode(["a text"]))
    assert Encoder(output).graph.precision == "int8"


@pytest.mark.usefixtures("quick")
def test_an_occupied_folder_for_the_pair_is_rejected_at_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "load", lambda *_, **__: pytest.fail("the model was opened before"))
    (tmp_path / "small-pair").mkdir()
    (tmp_path / "small-pair" / "mine.txt").write_text("keep this")
    folder = str(pico_folders("bert", 2))
    with pytest.raises(BadInput, match="small-pair"):
        compress_to_budget(
            Request(source=folder, output=tmp_path / "small", corpus=corpus, pair=True), ["2x"]
        )
    student = str(pico_folders("distilbert"))
    for place in (folder, student):
        with pytest.raises(BadInput, match="is an input of this command"):
            compress_to_budget(
                Request(source=folder, output=place, corpus=corpus, replace=True), ["2x"], students=[student]
            )
    output, rows = tmp_path / "old", tmp_path / "old" / "rows.parquet"
    output.mkdir()
    for file in (rows, output / "config.json"):
        file.write_text("{}")
    for options in (TeacherOptions(index=str(rows)), TeacherOptions(queries=f"{rows}::text=query")):
        with pytest.raises(BadInput, match="an input of this command"):
            compress_to_budget(
                Request(source="", output=output, replace=True), ["2x"], teacher_options=options
            )


@pytest.mark.usefixtures("quick")
def test_a_model_that_is_only_exported_makes_no_pair(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [replace(row, bytes_per_layer=0) for row in FORMATS]
    monkeypatch.setattr("trundle.model.cost.FORMATS", rows)
    monkeypatch.setattr("trundle.model.cost._SMALLEST_INT8", 0)
    with pytest.raises(BadInput, match=r"once it is int8, .* leave --pair out, or pass a smaller budget"):
        compress_to_budget(
            Request(source=str(pico_folders("bert", 2)), output=tmp_path / "small", corpus=corpus, pair=True),
            ["2x"],
        )


@pytest.mark.usefixtures("quick")
def test_every_model_is_loaded_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(search, "load", lambda name, **_: opened.append(str(name)) or load(name))
    names = [str(pico_folders(family)) for family in ("bert", "distilbert")]
    outcome = compress_to_budget(
        Request(source=names[0], output=None, corpus=corpus, dry_run=True), ["2x"], students=names[1:]
    )
    assert {each.candidate.base for each in outcome.tried} == set(names)
    assert opened == names


@pytest.mark.usefixtures("quick")
def test_the_teacher_reads_each_held_out_text_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials and the last training share the validation vectors, comparison and report the others."""
    source, output, read = pico_folders("bert", 2), tmp_path / "small", Counter[str]()
    plain, teacher = encode._encode, model_digest(load(source))

    def counted(model: Any, tokenise: Any, texts: list[str], *more: Any, **settings: Any) -> Any:
        if model_digest(model) == teacher:
            read.update(texts)
        return plain(model, tokenise, texts, *more, **settings)

    monkeypatch.setattr(encode, "_encode", counted)
    monkeypatch.setattr(report, "bench", lambda *_, **__: None)
    limit = f"{cost(load(source)).parameters // 2}-params"
    flags = _RunFlags(output=output, data=[str(tmp_path / "texts.txt")], quiet=True)
    _run_budget(str(source), [limit], flags, TeacherOptions(), minutes=0.03, students=[], fast=False)
    measured = json.loads((output / "report.json").read_text())["measured"]["small"]
    assert measured["quality"]["agreement_asymmetric"] is not None
    for part in (corpus.validation(), corpus.held_out()):
        assert {read[text.text] for text in part} == {1}


@pytest.mark.usefixtures("quick")
def test_a_changed_model_in_the_same_folder_is_tried_again(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []

    def stop(self: _Trials, *_: object, **__: object) -> None:
        places.append(self.work)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Trials, "contest", stop)
    folder = tmp_path / "model"
    for changed in (False, False, True):
        model = load(pico_folders("bert", 2))
        if changed:
            next(model.parameters()).data.add_(1)
        model.save_pretrained(str(folder), create_model_card=False)
        with pytest.raises(KeyboardInterrupt):
            compress_to_budget(Request(source=str(folder), output=tmp_path / "small", corpus=corpus), ["2x"])
    assert places[0] == places[1] != places[2]


@pytest.mark.usefixtures("quick")
def test_a_narrow_candidate_is_mapped_with_its_training_vectors(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_WIDTHS", (Fraction(1), Fraction(1, 2)))
    folder = str(pico_folders("bert", 2))
    found = _list_candidates(load(folder), folder, dimensions=32, precisions=["int8"])
    contest = _Trials(
        source=folder,
        request=Request(source=folder, corpus=corpus),
        texts=200,
        mapped=100,
        work=tmp_path / "work",
    )
    narrow = next(each for each in found if each.width != 1)
    tried = contest.contest(
        [_Tried(candidate=narrow)],
        _Timetable(labelling=0, rungs=(_Rung(candidates=1, seconds=0.5),), finishing=0),
        until=0,
    )
    assert tried[0].distances
    stores = [find_targets(folder) for folder in (tmp_path / "cache" / "targets").iterdir()]
    assert len(stores) == 2, "one to learn from, one to validate by"
    assert 200 in [len(each) for each in stores if each is not None]


def test_on_a_gpu_the_winner_learns_by_muon_and_is_rounded_late(
    pico_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = str(pico_folders("bert", 2)), []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(trials, "run_recipe", lambda _request, recipe: asked.append(recipe))
    found = _list_candidates(load(folder, device="cpu"), folder, dimensions=32, precisions=["int4", "int8"])
    contest = _Trials(source=folder, request=Request(source=folder), texts=99, mapped=99, work=tmp_path)
    for in_int4 in (True, False):
        kept = (each for each in found if each.layers and not each.untouched)
        chosen = next(each for each in kept if each.in_int4 is in_int4)
        contest.finish(_Tried(candidate=chosen), 60.0)
    options: list[Any] = [
        call.options for recipe in asked for call in recipe.calls if call.method.name == "align"
    ]
    assert [each.optimizer for each in options] == ["muon", "muon"]
    assert [each.round_after for each in options] == [trials._ROUND_AFTER, 0]


@pytest.mark.usefixtures("quick")
def test_a_candidate_without_trial_waits_for_the_teachers_vectors(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If trials ran before, that time is already spent."""
    rate, asked = 50.0, []
    monkeypatch.setattr(budget, "_TRIED", 1)
    monkeypatch.setattr(budget, "_fewest_steps", lambda **_: 0)
    monkeypatch.setattr(_Prospects, "reading_rate", lambda _: rate)

    def noted(self: _Trials, best: _Tried, *_: object, **__: object) -> None:
        asked.append((self.texts, self.mapped, best.distances))
        raise KeyboardInterrupt

    def left(_minutes: float, gone: float, closing: float) -> float:
        asked.append((gone, closing))
        return 0.1

    monkeypatch.setattr(_Trials, "finish", noted)
    monkeypatch.setattr(search, "_time_left", left)
    with pytest.raises(KeyboardInterrupt):
        compress_to_budget(
            Request(source=str(pico_folders("bert", 2)), output=tmp_path / "small", corpus=corpus),
            ["2x"],
            minutes=0.03,
        )
    (gone, closing), (texts, mapped, distances) = asked
    assert distances == ()
    assert gone >= (texts + mapped) / rate
    assert closing >= _CLOSING


@pytest.mark.usefixtures("quick")
def test_without_time_for_a_training_the_model_is_made_in_closed_form(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_TRIED", 1)
    monkeypatch.setattr(budget, "_fewest_steps", lambda **_: 10**9)
    folder, progress = str(pico_folders("bert", 2)), RecordedProgress()
    rounded = _list_candidates(load(folder), folder, dimensions=32, precisions=["int4"])[0]
    monkeypatch.setattr(_Prospects, "promising", lambda *_, **__: [rounded])
    request = Request(source=folder, output=tmp_path / "small", corpus=corpus, progress=progress)
    outcome = compress_to_budget(request, ["2x"], minutes=0.03)
    assert any("so the model is made in closed form" in line for line in progress.lines)
    assert "no training, because about" in tables._time_plan(outcome)
    lineage = read_lineage(tmp_path / "small")
    assert lineage is not None
    (step,) = lineage["steps"]
    wanted = {"steps": 0, "start": "keep", "rounding": "int4"}
    assert {key: step["options"][key] for key in wanted} == wanted
    small = load(tmp_path / "small")
    assert len(small) == len(load(folder)), "no linear map is added"
    assert all(_is_on_grid(weight) for weight, _ in grid_weights(small))
    assert Encoder(tmp_path / "small").graph.precision == "int4"


def test_a_map_is_fitted_once_and_then_kept() -> None:
    contest = _Trials(source="large", request=Request(source="large"), texts=900, mapped=300, work=Path())
    cut = SimpleNamespace(
        base="large",
        name="x",
        layers=2,
        precision="int8",
        in_int4=False,
        untouched=False,
        in_space=False,
        steps=lambda **_: [{"depth": {"keep": 2}}],
    )
    tried = _Tried(candidate=cut)  # type: ignore[arg-type]
    first, later = (contest._recipe(tried, rounds, {"steps": 5}).calls[-1].options for rounds in (0, 1))
    assert (first.start, first.start_texts) == ("ridge", 300)  # type: ignore[attr-defined]
    assert (later.start, later.start_texts) == ("keep", None)  # type: ignore[attr-defined]

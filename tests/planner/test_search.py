"""From a budget to a folder, on a pico model: what is promised is what is written."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from told import Told
from trundle.artifact import read_lineage
from trundle.data import find_targets, read_corpus
from trundle.data.corpus import Corpus
from trundle.errors import BadInput, MissingExtra
from trundle.measure import cost
from trundle.model import load
from trundle.planner import candidates as space
from trundle.planner import compress_to_budget, halving, search, trials
from trundle.planner.speed import Speed
from trundle.progress import Silent
from trundle.runtime import Encoder

pytest.importorskip("onnxruntime", reason="the extra export is not installed")


@pytest.mark.usefixtures("quick")
def test_the_best_that_fits_is_trained_exported_and_written(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "OVERTIME", 1000.0)
    monkeypatch.setattr(trials, "HOPELESS", math.inf)
    folder, output = pico_folders("bert"), tmp_path / "small"
    limit = int(0.6 * cost(load(folder)).parameters)
    outcome = compress_to_budget(str(folder), [f"{limit}-params"], output=output, corpus=corpus, minutes=0.1)
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
    planning = json.loads((output / search.PLANNING_FILE).read_text())
    assert planning["chosen"] == outcome.chosen.candidate.name
    assert len(planning["candidates"]) == len(outcome.tried)
    lineage = read_lineage(output)
    assert lineage is not None
    assert lineage["source"] == str(folder)
    assert [step["step"] for step in lineage["steps"]].count("align") == 3
    assert not list((tmp_path / "cache" / "trials").iterdir())


@pytest.mark.usefixtures("quick")
def test_where_no_layer_fits_a_static_model_does(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    folder, output = pico_folders("bert"), tmp_path / "small"
    outcome = compress_to_budget(str(folder), ["0.1ms"], output=output, corpus=corpus, minutes=0.1)
    assert {each.candidate.layers for each in outcome.tried} == {0}
    assert outcome.chosen.candidate.tokens == outcome.chosen.candidate.whole.sizes["vocab"]
    assert Encoder(output).encode("a text").shape == (32,)
    lineage = read_lineage(output)
    assert lineage is not None
    assert {step["step"] for step in lineage["steps"]} == {"depth", "align"}


@pytest.mark.usefixtures("quick")
def test_when_the_time_for_trials_is_gone_the_best_so_far_is_taken(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "TRYING", -1.0)
    words = [f"{cost(load(pico_folders('bert'))).file_bytes // 2}B"]
    outcome = compress_to_budget(
        str(pico_folders("bert")), words, output=tmp_path / "small", corpus=corpus, minutes=0.1
    )
    chosen, *others = outcome.tried
    assert (chosen.outcome, len(chosen.distances)) == ("chosen", 1)
    assert others
    assert {(each.outcome, each.distances) for each in others} == {("no time to try it", ())}


@pytest.mark.usefixtures("quick")
def test_budgets_that_make_no_sense_are_told_so(pico_folders: Callable[[str], Path], corpus: Corpus) -> None:
    folder = str(pico_folders("bert"))
    with pytest.raises(BadInput, match=r"as it is .* nothing was done; ask for less"):
        compress_to_budget(folder, ["1GB"], output=None, corpus=corpus, dry_run=True)
    with pytest.raises(BadInput, match=r"the smallest is no layers \(static\), .* allow that much"):
        compress_to_budget(folder, ["1kB"], output=None, corpus=corpus, dry_run=True)
    with pytest.raises(BadInput, match="say where the result goes"):
        compress_to_budget(folder, ["2x"], output=None, corpus=corpus)
    with pytest.raises(BadInput, match="inf minutes can't be planned with"):
        compress_to_budget(folder, ["2x"], output=None, corpus=corpus, minutes=float("inf"))


def test_where_time_counts_four_bits_are_multiplied_in_int8(
    pico_folders: Callable[[str], Path], corpus: Corpus
) -> None:
    folder = str(pico_folders("bert"))
    whole = search.Search(source=folder, bases={folder: load(folder)}, corpus=corpus, progress=search.SILENT)
    fast, slow = (Speed(fixed=fixed, attention=1e-6, mlp=1e-6) for fixed in (0.1, 0.5))
    speeds = {(folder, "int8"): fast, (folder, "float32"): slow}
    for timed, precision, speed_of_it in ((False, "int4", slow), (True, "int4+int8", fast)):
        found = whole.candidates(speeds, timed=timed)
        assert {each.precision for each in found} == {"int8", precision}
        small = next(each for each in found if each.precision == precision)
        assert small.milliseconds == speed_of_it.milliseconds(small.cost)


@pytest.mark.usefixtures("quick")
def test_what_is_called_the_smallest_can_be_had(pico_folders: Callable[[str], Path], corpus: Corpus) -> None:
    folder = str(pico_folders("bert"))
    with pytest.raises(BadInput) as refused:
        compress_to_budget(folder, ["1kB"], output=None, corpus=corpus, dry_run=True)
    found = re.search(r"with ([\d.]+) MB, ([\d.]+)M parameters", str(refused.value))
    assert found is not None
    words = [f"{found[1]}MB", f"{found[2]}M-params"]
    assert compress_to_budget(folder, words, output=None, corpus=corpus, dry_run=True).tried


@given(st.floats(1e-6, 1e6))
def test_raised_figures_have_three_digits_and_are_never_less(value: float) -> None:
    assert value <= float(search.raised(value)) * (1 + 1e-8)
    assert float(search.raised(value)) <= value * 1.011


@pytest.mark.usefixtures("quick")
def test_a_time_can_only_be_asked_for_where_graphs_are_timed(
    pico_folders: Callable[[str], Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match="a budget in milliseconds"):
        compress_to_budget(str(pico_folders("bert")), ["0.001ms"], output=None, corpus=corpus, dry_run=True)


def test_the_teacher_is_timed_on_few_texts_too(pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("\n".join(f"text number {number}" for number in range(12)))
    folder = str(pico_folders("bert"))
    few = search.Search(
        source=folder,
        bases={folder: load(folder)},
        corpus=read_corpus([str(tmp_path / "few.txt")], seed=0),
        progress=Silent(),
    )
    assert few.affordable_texts(1.0) >= halving.FEWEST_TEXTS


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=200), count=st.integers(1, 300))
def test_texts_of_all_lengths_are_timed_among_their_like(lengths: list[int], count: int) -> None:
    texts = ["x" * length for length in lengths]
    groups = search.of_all_lengths(texts, count)
    timed = [len(text) for group in groups for text in group]
    assert timed == sorted(timed)
    assert not Counter(timed) - Counter(lengths), "none is timed twice"
    if len(groups) > 1:
        assert len({len(group) for group in groups}) == 1
        quarter = len(lengths) / len(groups)
        ordered = sorted(lengths)
        for number, group in enumerate(groups):
            middle = len(group[len(group) // 2])
            first, last = ordered.index(middle), len(ordered) - 1 - ordered[::-1].index(middle)
            assert first <= (number + 1) * quarter, "no longer ones stand for them"
            assert last >= number * quarter - 1, "no shorter ones stand for them"
    else:
        assert len(timed) == len(lengths)


@pytest.mark.usefixtures("quick")
def test_a_model_that_fits_once_it_is_int8_is_only_exported(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trundle.measure.costs.GRAPH_BYTES_PER_LAYER", 0)
    monkeypatch.setattr("trundle.measure.costs.SMALLEST_INT8", 0)
    folder, output = pico_folders("bert"), tmp_path / "small"
    outcome = compress_to_budget(str(folder), ["2x"], output=output, corpus=corpus, minutes=0.1)
    assert outcome.chosen.candidate.untouched
    assert outcome.chosen.outcome == "chosen"
    np.testing.assert_array_equal(load(output).encode(["a text"]), load(folder).encode(["a text"]))
    assert Encoder(output).graph.precision == "int8"


@pytest.mark.usefixtures("quick")
def test_times_of_a_busy_machine_are_called_rough_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    busy = Speed(fixed=0.1, attention=1e-6, mlp=1e-6, undisturbed=False)
    monkeypatch.setattr(search, "measure_speed", lambda *_, **__: busy)
    folder = str(pico_folders("bert"))
    compress_to_budget(folder, ["2x"], output=None, corpus=corpus, dry_run=True, progress=told)
    assert sum("the machine was busy" in line for line in told.lines) == 1


@pytest.mark.usefixtures("quick")
def test_an_occupied_folder_for_the_pair_is_refused_at_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "load", lambda *_, **__: pytest.fail("the model was opened before"))
    (tmp_path / "small-pair").mkdir()
    (tmp_path / "small-pair" / "mine.txt").write_text("keep this")
    folder = str(pico_folders("bert"))
    with pytest.raises(BadInput, match="small-pair"):
        compress_to_budget(folder, ["2x"], output=tmp_path / "small", corpus=corpus, pair=True)
    student = str(pico_folders("distilbert"))
    for place in (folder, student):
        with pytest.raises(BadInput, match="is a model the result is made from"):
            compress_to_budget(
                folder, ["2x"], output=place, corpus=corpus, students=[student], replace_output=True
            )


@pytest.mark.usefixtures("quick")
def test_a_model_that_is_only_exported_makes_no_pair(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trundle.measure.costs.GRAPH_BYTES_PER_LAYER", 0)
    monkeypatch.setattr("trundle.measure.costs.SMALLEST_INT8", 0)
    with pytest.raises(BadInput, match=r"once it is int8, .* leave --pair out, or ask for less"):
        compress_to_budget(
            str(pico_folders("bert")), ["2x"], output=tmp_path / "small", corpus=corpus, pair=True
        )


@pytest.mark.parametrize(
    ("seconds", "rate", "texts"),
    [(4, 3, 200), (45, 3, 204), (45, 9, 608), (450, 3, 2000), (450, 5, 2000), (450, 100, 40_904)],
)
def test_a_slow_teacher_answers_fewer_texts(seconds: float, rate: float, texts: int) -> None:
    """Enough for a sound linear map where twice the time allows it; else the time counts, down to the fewest."""
    assert search.texts_within(seconds, rate) == texts


@pytest.mark.parametrize(
    ("texts", "proved"), [(0, 2000), (200, 200), (2000, 400), (9000, 1800), (50_000, 2000)]
)
def test_a_slow_teacher_proves_by_fewer_texts(texts: int, proved: int) -> None:
    assert search.proof_texts(texts) == proved


@pytest.mark.usefixtures("quick")
def test_every_model_is_opened_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(search, "load", lambda name, **_: opened.append(str(name)) or load(name))
    names = [str(pico_folders(family)) for family in ("bert", "distilbert")]
    outcome = compress_to_budget(
        names[0], ["2x"], output=None, corpus=corpus, students=names[1:], dry_run=True
    )
    assert {each.candidate.base for each in outcome.tried} == set(names)
    assert opened == names


@pytest.mark.usefixtures("quick")
def test_another_model_in_the_same_folder_is_tried_anew(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []

    def stop(self: trials.Trials, *_: object, **__: object) -> None:
        places.append(self.work)
        raise KeyboardInterrupt

    monkeypatch.setattr(trials.Trials, "contest", stop)
    folder = tmp_path / "model"
    for changed in (False, False, True):
        model = load(pico_folders("bert"))
        if changed:
            next(model.parameters()).data.add_(1)
        model.save_pretrained(str(folder), create_model_card=False)
        with pytest.raises(KeyboardInterrupt):
            compress_to_budget(str(folder), ["2x"], output=tmp_path / "small", corpus=corpus)
    assert places[0] == places[1] != places[2]


@pytest.mark.usefixtures("quick")
def test_a_narrow_candidate_is_mapped_by_the_vectors_it_learns_from(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "WIDTHS", (Fraction(1), Fraction(1, 2)))
    folder = str(pico_folders("bert"))
    found = space.list_candidates(load(folder), folder, dimensions=32, precision="int8")
    contest = trials.Trials(
        source=folder,
        corpus=corpus,
        texts=200,
        work=tmp_path / "work",
        seed=0,
        trust_remote_code=False,
        progress=search.SILENT,
    )
    narrow = next(each for each in found if each.width != 1)
    tried = contest.contest(
        [search.Tried(candidate=narrow)],
        halving.Timetable(labelling=0, rungs=(halving.Rung(candidates=1, seconds=0.5),), finishing=0),
        until=0,
    )
    assert tried[0].distances
    stores = [find_targets(folder) for folder in (tmp_path / "cache" / "targets").iterdir()]
    assert len(stores) == 2, "one to learn from, one to validate by"
    assert 200 in [len(each) for each in stores if each is not None]

"""What is known before the search starts: candidates, rates, and errors in a budget."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_progress import RecordedProgress
from trundle.data.corpus import Corpus, read_corpus
from trundle.errors import BadInput, MissingExtra
from trundle.model.load import load
from trundle.pipeline.run import Request
from trundle.progress import SILENT
from trundle.search import prospects
from trundle.search.budget import _proof_texts, _texts_within
from trundle.search.limits import _Budget
from trundle.search.prospects import _coverage, _of_all_lengths, _Prospects, _raised, _Speed
from trundle.search.search import compress_to_budget


@pytest.mark.usefixtures("quick")
def test_invalid_budgets_are_rejected(pico_folders: Callable[[str], Path], corpus: Corpus) -> None:
    folder = str(pico_folders("bert"))
    with pytest.raises(BadInput, match=r"already within .* nothing was done; pass a smaller budget"):
        compress_to_budget(Request(source=folder, output=None, corpus=corpus, dry_run=True), ["1GB"])
    with pytest.raises(BadInput, match=r"the smallest is no layers \(static\), .* allow that much"):
        compress_to_budget(Request(source=folder, output=None, corpus=corpus, dry_run=True), ["1kB"])
    with pytest.raises(BadInput, match="pass a folder for the result"):
        compress_to_budget(Request(source=folder, output=None, corpus=corpus), ["2x"])
    with pytest.raises(BadInput, match="a search can't take inf minutes"):
        compress_to_budget(Request(source=folder, output=None, corpus=corpus), ["2x"], minutes=float("inf"))


def test_with_a_time_limit_int4_matmuls_run_in_int8(
    pico_folders: Callable[[str], Path], corpus: Corpus
) -> None:
    folder = str(pico_folders("bert"))
    whole = _Prospects(source=folder, bases={folder: load(folder)}, corpus=corpus, progress=SILENT)
    fast, slow = (_Speed(fixed=fixed, attention=1e-6, mlp=1e-6) for fixed in (0.1, 0.5))
    speeds = {(folder, "int8"): fast, (folder, "float32"): slow}
    for timed, precision, speed_of_it in ((False, "int4", slow), (True, "int4+int8", fast)):
        found = whole.candidates(speeds, _Budget(milliseconds=5.0 if timed else None))
        assert {each.precision for each in found} == {"int8", "int8+int4_tokens", precision}
        small = next(each for each in found if each.precision == precision)
        assert small.milliseconds == speed_of_it.milliseconds(small.cost)


@pytest.mark.usefixtures("quick")
def test_the_smallest_candidate_in_the_error_is_possible(
    pico_folders: Callable[[str], Path], corpus: Corpus
) -> None:
    folder = str(pico_folders("bert"))
    with pytest.raises(BadInput) as refused:
        compress_to_budget(Request(source=folder, output=None, corpus=corpus, dry_run=True), ["1kB"])
    found = re.search(r"with ([\d.]+) MB, ([\d.]+)M parameters", str(refused.value))
    assert found is not None
    words = [f"{found[1]}MB", f"{found[2]}M-params"]
    assert compress_to_budget(Request(source=folder, output=None, corpus=corpus, dry_run=True), words).tried


@given(st.floats(1e-6, 1e6))
def test_figures_are_rounded_up_to_three_digits(value: float) -> None:
    assert value <= float(_raised(value)) * (1 + 1e-8)
    assert float(_raised(value)) <= value * 1.011


@pytest.mark.usefixtures("quick")
def test_a_time_limit_needs_exported_graphs(
    pico_folders: Callable[[str], Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prospects, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match="a budget in milliseconds"):
        compress_to_budget(
            Request(source=str(pico_folders("bert")), output=None, corpus=corpus, dry_run=True), ["0.001ms"]
        )


def test_the_teacher_is_timed_on_few_texts_too(pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("\n".join(f"text number {number}" for number in range(12)))
    folder = str(pico_folders("bert"))
    few = _Prospects(
        source=folder,
        bases={folder: load(folder)},
        corpus=read_corpus([str(tmp_path / "few.txt")], seed=0),
        progress=SILENT,
    )
    assert few.reading_rate() > 0


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=200), count=st.integers(1, 300))
def test_texts_are_timed_in_batches_of_similar_length(lengths: list[int], count: int) -> None:
    texts = ["x" * length for length in lengths]
    groups = _of_all_lengths(texts, count)
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
def test_a_busy_machine_is_reported_once(
    pico_folders: Callable[[str], Path], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = RecordedProgress()
    busy = _Speed(fixed=0.1, attention=1e-6, mlp=1e-6, undisturbed=False)
    monkeypatch.setattr(prospects, "_measure_speed", lambda *_, **__: busy)
    folder = str(pico_folders("bert"))
    compress_to_budget(
        Request(source=folder, output=None, corpus=corpus, dry_run=True, progress=told), ["2x", "100ms"]
    )
    assert sum("the machine was busy" in line for line in told.lines) == 1


@pytest.mark.parametrize(
    ("seconds", "rate", "texts"),
    [(4, 3, 200), (45, 3, 204), (45, 9, 608), (450, 3, 2000), (450, 5, 2000), (450, 100, 40_904)],
)
def test_a_slow_teacher_encodes_fewer_texts(seconds: float, rate: float, texts: int) -> None:
    """Enough for a good linear map if twice the time allows it; otherwise as many as the time allows."""
    assert _texts_within(seconds, rate) == texts


@pytest.mark.parametrize(
    ("texts", "proved"), [(0, 2000), (200, 200), (2000, 400), (9000, 1800), (50_000, 2000)]
)
def test_a_slow_teacher_is_compared_on_fewer_texts(texts: int, proved: int) -> None:
    assert _proof_texts(texts) == proved


def test_tokens_that_cover_the_counted_texts_do_not_cover_all_others(
    pico_folders: Callable[[str], Path],
) -> None:
    model = load(str(pico_folders("bert")))
    texts = ["the quick brown fox", "queries are short"] * 20
    ids = {one for row in model.tokenizer(texts[:1])["input_ids"] for one in row}
    coverage = _coverage(model, texts)
    assert coverage(len(ids)) < 0.8
    assert coverage(len(model.tokenizer)) == 1.0
    assert _coverage(model, texts[:1])(len(ids)) == 1.0

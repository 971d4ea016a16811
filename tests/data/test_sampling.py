from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from trundle.data.examples import Example
from trundle.data.sampling import distinct, draw, fingerprint, sample
from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput

TEXTS = st.lists(st.text())
SEEDS = st.integers(min_value=0, max_value=2**32)


@given(first=TEXTS, second=TEXTS)
def test_fingerprints_differ_exactly_when_contents_do(first: list[str], second: list[str]) -> None:
    assert (fingerprint(first) == fingerprint(second)) == (first == second)


@given(text=st.text(), cut=st.integers(min_value=0))
def test_boundaries_and_order_change_the_fingerprint(text: str, cut: int) -> None:
    at = cut % (len(text) + 1)
    assert fingerprint([text]) != fingerprint([text[:at], text[at:]])
    halves = [text[:at], text[at:] + "x"]
    if halves[0] != halves[1]:
        assert fingerprint(halves) != fingerprint(halves[::-1])


def test_every_field_changes_the_fingerprint() -> None:
    examples = [
        Example(query="q", positive="p"),
        Example(query="p", positive="q"),
        Example(query="q", positive="p", negatives=("n",)),
        Example(query="q", positive="p", negatives=("n", "")),
    ]
    texts = [Text(text="q"), Text(text="q", kind="query"), Text(text="q", kind="document")]
    assert len({fingerprint([item]) for item in (*examples, *texts)}) == len(examples) + len(texts)


@given(lines=st.lists(st.text(st.characters(exclude_categories=["C"])).filter(str.strip), min_size=1))
def test_the_file_format_does_not_change_the_fingerprint(
    lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "same.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "same.jsonl").write_text("\n".join(json.dumps({"id": 1, "text": line}) for line in lines))
    pq.write_table(pa.table({"text": lines}), folder / "same.parquet")
    names = ("same.txt", "same.jsonl", "same.parquet")
    assert len({fingerprint(read_texts(str(folder / name))) for name in names}) == 1


SCRIPT = """
from trundle.data.sampling import draw, fingerprint, sample
print(fingerprint(["a", "ü"]), sample(range(1000), 5, 7), [draw(str(n), 3) < 0.5 for n in range(8)])
"""
EXPECTED = (
    "2a532bdcc151dae409d6c61b1d58b91b [130, 422, 548, 645, 745] "
    "[False, True, False, True, True, True, True, False]"
)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_results_are_the_same_in_every_run(hash_seed: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == EXPECTED


@given(items=st.lists(st.integers()), n=st.integers(min_value=0, max_value=30), seed=SEEDS)
def test_a_sample_keeps_the_order_and_draws_without_replacement(items: list[int], n: int, seed: int) -> None:
    numbered = list(enumerate(items))
    drawn = sample(iter(numbered), n, seed)
    assert len(drawn) == min(n, len(items))
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(numbered)
    assert drawn == sample(iter(numbered), n, seed)
    assert set(drawn) <= set(sample(iter(numbered), n + 1, seed))
    assert [place for place, _ in drawn] == sample(range(len(items)), n, seed)


def test_items_that_cannot_be_compared_are_sampled() -> None:
    assert len(sample([object() for _ in range(100)], 10, 0)) == 10


def test_every_item_is_drawn_equally_often() -> None:
    counts = Counter(item for seed in range(2000) for item in sample(range(20), 5, seed))
    assert chisquare([counts[item] for item in range(20)]).pvalue > 1e-6


def test_a_sample_holds_only_what_it_keeps() -> None:
    tracemalloc.start()
    sample(("x" * 1000 + str(number) for number in range(20_000)), 10, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


@given(key=st.text(), seed=SEEDS)
def test_a_draw_depends_on_the_key_and_the_seed_alone(key: str, seed: int) -> None:
    assert 0 <= draw(key, seed) < 1
    assert draw(key, seed) == draw(key, seed)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_share_held_out_is_the_share_asked_for(share: float) -> None:
    held = sum(draw(str(number), 0) < share for number in range(20_000))
    assert held == pytest.approx(20_000 * share, rel=0.1)
    elsewhere = sum(draw(str(number), 0) < share and draw(str(number), 1) < share for number in range(20_000))
    assert elsewhere == pytest.approx(20_000 * share**2, rel=0.4)


@given(keys=TEXTS)
def test_distinct_keeps_the_first_of_each(keys: list[str]) -> None:
    assert [key for _, key in distinct(enumerate(keys), key=lambda item: item[1])] == list(
        dict.fromkeys(keys)
    )


def test_distinct_streams() -> None:
    assert next(distinct(iter(lambda: "again", None), key=str)) == "again"


def test_bad_numbers_are_rejected() -> None:
    with pytest.raises(BadInput, match="0 or more"):
        sample([], -1, 0)

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.bench.workload import _LONG_WORDS, _PIECE, _SHORT_WORDS, _mean_words, workload
from trundle.errors import BadInput


def test_generated_texts_have_the_target_lengths_and_do_not_repeat() -> None:
    work = workload()
    assert {len(text.split()) for text in work.short} == set(_SHORT_WORDS)
    assert {len(text.split()) for text in work.long} == set(_LONG_WORDS)
    assert len(set(work.long)) == len(work.long)
    assert "{" not in "".join(work.short + work.long)


def test_the_same_texts_every_time() -> None:
    assert workload() == workload()
    assert workload().fingerprint() == workload().fingerprint()
    assert workload().fingerprint() != workload(["something else"]).fingerprint()


@given(
    st.lists(st.text(max_size=60), min_size=1, max_size=20).filter(
        lambda texts: any(text.split() for text in texts)
    )
)
def test_given_texts_are_used_in_order_and_truncated(texts: list[str]) -> None:
    stream = "".join(word for text in texts for word in text.split())
    work = workload(texts)
    for place, text in enumerate(work.short):
        used = "".join(text.split())
        assert used == "".join(islice(cycle(stream), len(used)))
        stream = stream[len(used) % len(stream) :] + stream[: len(used) % len(stream)]
        assert len(text.split()) == _SHORT_WORDS[place % len(_SHORT_WORDS)]
    assert json.loads(work.as_json()) == {"short": list(work.short), "long": list(work.long)}


def test_a_megabyte_without_spaces_gives_texts_of_the_usual_length() -> None:
    work = workload(["雨" * 1_000_000])
    assert max(len(text.replace(" ", "")) for text in work.long) == max(_LONG_WORDS) * _PIECE


def test_an_endless_source_is_read_only_as_far_as_needed() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "rain on the roof"

    assert _mean_words(workload(endless()).long) == pytest.approx(
        sum(_LONG_WORDS) / len(_LONG_WORDS), rel=0.05
    )


@pytest.mark.parametrize("texts", [[], ["", "  \n"]])
def test_texts_without_words_are_rejected(texts: list[str]) -> None:
    with pytest.raises(BadInput, match="no words"):
        workload(texts)


def test_a_text_that_is_no_string_is_rejected() -> None:
    with pytest.raises(BadInput, match="a text is a int"):
        workload(["fine", 7])  # type: ignore[list-item]

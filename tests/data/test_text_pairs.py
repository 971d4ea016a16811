from __future__ import annotations

from trundle.data.examples import _NEIGHBOURS, _TITLE_BODY, DROPOUT, _pair_from_text, pairs_from_texts
from trundle.data.texts import Text

LONG = (
    "Banks lend money to people. They ask for interest. "
    "Some loans fail, and that is priced in. It always was."
)


def test_a_first_line_is_a_title() -> None:
    pair = _pair_from_text("Quarterly report\n\nRevenue rose by ten per cent\nand costs fell.")
    assert (pair.query, pair.source) == ("Quarterly report", _TITLE_BODY)
    assert pair.positive == "Revenue rose by ten per cent\nand costs fell."


def test_halves_are_neighbours() -> None:
    pair = _pair_from_text(LONG)
    assert pair.source == _NEIGHBOURS
    assert f"{pair.query} {pair.positive}" == LONG
    assert pair.query == "Banks lend money to people. They ask for interest."


def test_a_short_text_is_paired_with_itself() -> None:
    for text in ("one sentence without an end", "Yes. No.", "Short.\n\nToo short"):
        pair = _pair_from_text(text)
        assert (pair.query, pair.positive, pair.source) == (text, text, DROPOUT)


def test_held_out_pieces_are_left_out() -> None:
    texts = [Text(text=LONG), Text(text="a plain line")]
    kept = list(pairs_from_texts(texts, allowed=lambda text: not text.startswith("Some loans")))
    assert [pair.query for pair in kept] == ["a plain line"]

"""Training texts made from other texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.data.sampling import _AUGMENTATIONS, _JOINS, _PIECES, augmented, check_augmentations
from trundle.data.texts import Text
from trundle.errors import BadInput

LONG = Text(
    text="The first sentence is about models. Here a second one speaks of vectors! And is there a third one?",
    kind="document",
)
SHORT = [Text(text=f"short text number {number}", kind="query") for number in range(7)]


@given(
    st.lists(st.text(min_size=1, max_size=200)), st.sets(st.sampled_from(_AUGMENTATIONS)), st.integers(0, 9)
)
def test_every_text_stays_in_its_order_and_the_same_pieces_come_again(raw, names, seed):
    texts = [Text(text=text) for text in raw]
    made = list(augmented(texts, sorted(names), seed=seed))
    assert made == list(augmented(texts, sorted(names), seed=seed))
    rest = iter(made)
    assert all(any(text is found for found in rest) for text in texts)
    assert all(text.text.strip() for text in made if text not in texts)


@pytest.mark.parametrize("name", _PIECES)
def test_pieces_are_made_of_the_texts_own_words(name):
    found = list(augmented([LONG], [name], seed=0))[1:]
    assert found
    assert all(
        set(piece.text.split()) <= set(LONG.text.replace("?", " ?").split()) | set(LONG.text.split())
        or piece.text in LONG.text
        for piece in found
    )
    assert all(len(piece.text) < len(LONG.text) for piece in found)


def test_a_seed_and_a_text_give_these_pieces_in_every_version_of_python():
    made = [text.text for text in augmented([LONG], ["sentences", "spans", "prefixes", "words"], seed=3)]
    assert made[1:] == [
        "And is there a third one?",
        "Here a second one speaks of vectors!",
        "a second one speaks",
        "The first sentence is",
        "about",
    ]


def test_neighbours_are_joined_in_threes():
    joined = [text.text for text in augmented(SHORT, [_JOINS], seed=0) if text not in SHORT]
    assert joined == [" ".join(text.text for text in SHORT[start : start + 3]) for start in (0, 3)]


def test_pieces_that_are_not_allowed_are_not_generated():
    everything = list(augmented([LONG, *SHORT], _AUGMENTATIONS, seed=0))
    banned = {text.text for text in everything[1:4]}
    kept = list(augmented([LONG, *SHORT], _AUGMENTATIONS, seed=0, allowed=lambda text: text not in banned))
    assert [text for text in everything if text.text not in banned] == kept


def test_an_unknown_kind_is_named():
    with pytest.raises(BadInput, match="no augmentation 'rhymes'"):
        check_augmentations(["spans", "rhymes"])

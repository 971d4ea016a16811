"""More texts out of the texts there are: a teacher can label anything, so texts are free.

Each kind of making is a function from one text to new ones, drawn with a generator seeded by the text itself, so that a
text always gives the same pieces. Only joins depend on the order of reading: they put neighbours together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from random import Random

from trundle.data.texts import Text
from trundle.errors import BadInput

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")
_SENTENCE_WORDS = range(4, 60)
_SENTENCES_PER_TEXT = 2
_SPAN_WORDS = (4, 24)
_LONG_ENOUGH = 12
"""Words a text must have before pieces are cut from it."""
_JOINED = 3
_SHORT = 12
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")


def _sentences(text: Text, random: Random) -> Iterator[Text]:
    """A few whole sentences of a longer text."""
    found = [part.strip() for part in _SENTENCE_END.split(text.text)]
    usable = [part for part in found if len(part.split()) in _SENTENCE_WORDS]
    if len(found) > 1:
        for part in random.sample(usable, min(_SENTENCES_PER_TEXT, len(usable))):
            yield Text(text=part, kind="document")


def _spans(text: Text, random: Random) -> Iterator[Text]:
    """A run of words from anywhere in a longer text: what a query often is."""
    words = text.text.split()
    if len(words) > _LONG_ENOUGH:
        size = random.randint(_SPAN_WORDS[0], min(_SPAN_WORDS[1], len(words) - 1))
        start = random.randrange(len(words) - size + 1)
        yield Text(text=" ".join(words[start : start + size]), kind="query")


def _prefixes(text: Text, random: Random) -> Iterator[Text]:
    """The beginning of a text, as somebody who is still typing has it."""
    words = text.text.split()
    if len(words) >= 4:
        size = random.randint(2, min(_SPAN_WORDS[1], len(words) - 1))
        yield Text(text=" ".join(words[:size]), kind=text.kind)


def _words(text: Text, random: Random) -> Iterator[Text]:
    """One word of the text by itself."""
    found = _WORD.findall(text.text)
    if found:
        yield Text(text=random.choice(found), kind="query")


_PIECES: dict[str, Callable[[Text, Random], Iterator[Text]]] = {
    "sentences": _sentences,
    "spans": _spans,
    "prefixes": _prefixes,
    "words": _words,
}
_JOINS = "joins"
_AUGMENTATIONS = (*_PIECES, _JOINS)


def check_augmentations(names: Sequence[str]) -> tuple[str, ...]:
    """The names, if each is known."""
    for name in names:
        if name not in _AUGMENTATIONS:
            raise BadInput(f"there is no augmentation {name!r}; there is {', '.join(_AUGMENTATIONS)}")
    return tuple(names)


def augmented(
    texts: Iterable[Text],
    names: Sequence[str],
    *,
    seed: int,
    allowed: Callable[[str], bool] = lambda _text: True,
) -> Iterator[Text]:
    """Every text, and after it what is made from it and is allowed."""
    chosen = [_PIECES[name] for name in _PIECES if name in names]
    waiting: list[str] = []
    for text in texts:
        yield text
        if chosen:
            random = Random(_seed_of(text, seed))
            yield from (piece for make in chosen for piece in make(text, random) if allowed(piece.text))
        if _JOINS in names and len(text.text.split()) <= _SHORT:
            waiting.append(text.text)
            if len(waiting) == _JOINED:
                joined = " ".join(waiting)
                if allowed(joined):
                    yield Text(text=joined, kind="document")
                waiting = []


def _seed_of(text: Text, seed: int) -> int:
    digest = blake2b(f"{seed}\0{text.text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")

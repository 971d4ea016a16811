"""Make more training texts from existing ones, for a teacher to label.

What is drawn depends on the seed and the text alone, by hashes and integer arithmetic, so a text gives the
same pieces in every version of Python. Only `joins` depends on the order of reading: it joins short texts
that follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

from trundle.data.texts import Text
from trundle.errors import BadInput

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")
_SENTENCE_WORDS = range(4, 60)
_SENTENCES_PER_TEXT = 2
_SPAN_WORDS = (4, 24)
_LONG_ENOUGH = 12
"""A span is taken only from texts with more words than this."""
_JOINED = 3
_SHORT = 12
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")


class _Draws:
    """Whole numbers that depend on a seed and a text, one after another."""

    def __init__(self, seed: int, text: str) -> None:
        self._state = blake2b(f"{seed}\0{text}".encode(), digest_size=8)

    def below(self, count: int) -> int:
        """Return a number from 0 to `count` − 1."""
        self._state.update(b"\0")
        return int.from_bytes(self._state.digest(), "big") % count

    def between(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)


def _sentences(text: Text, draws: _Draws) -> Iterator[Text]:
    found = [part.strip() for part in _SENTENCE_END.split(text.text)]
    usable = [part for part in found if len(part.split()) in _SENTENCE_WORDS]
    if len(found) > 1:
        for _ in range(min(_SENTENCES_PER_TEXT, len(usable))):
            yield Text(text=usable.pop(draws.below(len(usable))), kind="document")


def _spans(text: Text, draws: _Draws) -> Iterator[Text]:
    words = text.text.split()
    if len(words) > _LONG_ENOUGH:
        size = draws.between(_SPAN_WORDS[0], min(_SPAN_WORDS[1], len(words) - 1))
        start = draws.below(len(words) - size + 1)
        yield Text(text=" ".join(words[start : start + size]), kind="query")


def _prefixes(text: Text, draws: _Draws) -> Iterator[Text]:
    words = text.text.split()
    if len(words) >= 4:
        size = draws.between(2, min(_SPAN_WORDS[1], len(words) - 1))
        yield Text(text=" ".join(words[:size]), kind=text.kind)


def _words(text: Text, draws: _Draws) -> Iterator[Text]:
    if found := _WORD.findall(text.text):
        yield Text(text=found[draws.below(len(found))], kind="query")


_PIECES: dict[str, Callable[[Text, _Draws], Iterator[Text]]] = {
    "sentences": _sentences,
    "spans": _spans,
    "prefixes": _prefixes,
    "words": _words,
}
_JOINS = "joins"
_AUGMENTATIONS = (*_PIECES, _JOINS)


def check_augmentations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names if all of them are known augmentations."""
    for name in names:
        if name not in _AUGMENTATIONS:
            raise BadInput(f"there is no augmentation {name!r}; choose from {', '.join(_AUGMENTATIONS)}")
    return tuple(names)


def augmented(
    texts: Iterable[Text],
    names: Sequence[str],
    *,
    seed: int,
    allowed: Callable[[str], bool] = lambda _text: True,
) -> Iterator[Text]:
    """Yield every text, followed by the texts that are made from it and `allowed`."""
    chosen = [_PIECES[name] for name in _PIECES if name in names]
    waiting: list[str] = []
    for text in texts:
        yield text
        if chosen:
            draws = _Draws(seed, text.text)
            yield from (piece for make in chosen for piece in make(text, draws) if allowed(piece.text))
        if _JOINS in names and len(text.text.split()) <= _SHORT:
            waiting.append(text.text)
            if len(waiting) == _JOINED:
                if allowed(joined := " ".join(waiting)):
                    yield Text(text=joined, kind="document")
                waiting = []

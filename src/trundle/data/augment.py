"""Make more training texts from existing ones, for a teacher to label.

The generator of each augmentation is seeded by the text itself, so a text always gives the same pieces. Only
`joins` depends on the order of reading: it joins short texts that follow each other.
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
"""A span is taken only from texts with more words than this."""
_JOINED = 3
_SHORT = 12
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")


def _sentences(text: Text, random: Random) -> Iterator[Text]:
    found = [part.strip() for part in _SENTENCE_END.split(text.text)]
    usable = [part for part in found if len(part.split()) in _SENTENCE_WORDS]
    if len(found) > 1:
        chosen = random.sample(usable, min(_SENTENCES_PER_TEXT, len(usable)))
        yield from (Text(text=part, kind="document") for part in chosen)


def _spans(text: Text, random: Random) -> Iterator[Text]:
    words = text.text.split()
    if len(words) > _LONG_ENOUGH:
        size = random.randint(_SPAN_WORDS[0], min(_SPAN_WORDS[1], len(words) - 1))
        start = random.randrange(len(words) - size + 1)
        yield Text(text=" ".join(words[start : start + size]), kind="query")


def _prefixes(text: Text, random: Random) -> Iterator[Text]:
    words = text.text.split()
    if len(words) >= 4:
        size = random.randint(2, min(_SPAN_WORDS[1], len(words) - 1))
        yield Text(text=" ".join(words[:size]), kind=text.kind)


def _words(text: Text, random: Random) -> Iterator[Text]:
    if found := _WORD.findall(text.text):
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
            digest = blake2b(f"{seed}\0{text.text}".encode(), digest_size=8).digest()
            random = Random(int.from_bytes(digest, "big"))
            yield from (piece for make in chosen for piece in make(text, random) if allowed(piece.text))
        if _JOINS in names and len(text.text.split()) <= _SHORT:
            waiting.append(text.text)
            if len(waiting) == _JOINED:
                if allowed(joined := " ".join(waiting)):
                    yield Text(text=joined, kind="document")
                waiting = []

"""Work for one call of a worker: a few shards in a row, and where their texts are.

A piece must be read from its beginning, so shards that lie in one piece are better made together; but a stretch is also
what one worker has to do again when it dies, less the shards it had finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from pydantic import BaseModel, ConfigDict

from trundle.data.pieces import Piece, read_piece
from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.scale.survey import Bits, Cut, Positions, bits_between

LONGEST = 16
"""Shards in a stretch, at most."""
ROUNDS = 4
"""Stretches for each worker, at least, where there are shards enough: so that none is long alone at the end."""


class Stretch(BaseModel):
    """Shards from number `first` on, with so many texts each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    before: int
    """Texts of the first piece that belong to shards before."""
    texts: int
    """Texts to read after those, repeats included."""


def stretch_length(shards: int, workers: int) -> int:
    """How many shards to put into a stretch."""
    return max(1, min(LONGEST, shards // (ROUNDS * workers)))


def cut_stretches(
    pieces: Sequence[Piece], starts: Positions, cuts: Sequence[Cut], repeats: Bits, length: int
) -> Iterator[tuple[Stretch, bytes]]:
    """All stretches, each with the bits of its texts that are repeats."""
    begin = 0
    for first in range(0, len(cuts), length):
        part = cuts[first : first + length]
        end = part[-1].end
        opening, closing = np.searchsorted(starts, [begin, end - 1], side="right") - 1
        yield (
            Stretch(
                first=first,
                sizes=tuple(cut.kept for cut in part),
                pieces=tuple(pieces[opening : closing + 1]),
                before=begin - int(starts[opening]),
                texts=end - begin,
            ),
            np.packbits(bits_between(repeats, begin, end)).tobytes(),
        )
        begin = end


def shard_texts(stretch: Stretch, repeats: bytes) -> Iterator[list[Text]]:
    """The texts of each shard of a stretch."""
    everything: Iterable[Text] = chain.from_iterable(map(read_piece, stretch.pieces))
    left_out = np.unpackbits(np.frombuffer(repeats, dtype=np.uint8), count=stretch.texts).tolist()
    asked = islice(everything, stretch.before, stretch.before + stretch.texts)
    kept = (text for text, again in zip(asked, left_out, strict=False) if not again)
    for size in stretch.sizes:
        texts = list(islice(kept, size))
        if len(texts) < size:
            raise BadInput(
                f"{stretch.pieces[-1].path} changed while it was read; build again when it is still"
            )
        yield texts

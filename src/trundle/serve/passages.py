"""A dropped file as passages that can be found one by one."""

from __future__ import annotations

import re

LONGEST = 700
SHORTEST = 12
PARAGRAPH = re.compile(r"\n[ \t]*\n")
SENTENCE = re.compile(r"(?<=[.!?…])\s+")


def split_passages(text: str) -> list[str]:
    """Paragraphs where the file has them, otherwise lines; long ones are cut between sentences.

    Pieces too short to mean anything, and repeated ones, are left out.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = PARAGRAPH.split(text.strip())
    if len(parts) < 3:
        parts = text.splitlines()
    pieces = (piece for part in parts for piece in _cut(" ".join(part.split())))
    return [piece for piece in dict.fromkeys(pieces) if len(piece) >= SHORTEST]


def _cut(paragraph: str) -> list[str]:
    """A paragraph in pieces of at most `LONGEST` characters, between sentences where it can be."""
    if len(paragraph) <= LONGEST:
        return [paragraph]
    pieces, piece = [], ""
    for sentence in SENTENCE.split(paragraph):
        if piece and len(piece) + 1 + len(sentence) > LONGEST:
            pieces.append(piece)
            piece = ""
        piece = f"{piece} {sentence}".strip()
        while len(piece) > LONGEST:
            end = piece.rfind(" ", 1, LONGEST)
            end = LONGEST if end < 0 else end
            pieces.append(piece[:end])
            piece = piece[end:].strip()
    return [*pieces, piece] if piece else pieces

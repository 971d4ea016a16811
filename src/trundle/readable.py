"""Texts that can be read, before anybody tries; needs nothing heavy, for the runtime asks the same."""

from __future__ import annotations

from collections.abc import Sequence

from trundle.errors import BadInput


def check_texts(texts: Sequence[str]) -> None:
    """Refuse what no tokenizer can read."""
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise BadInput(f"text {number} is a {type(text).__name__}, not a string; convert it first")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise BadInput(
                    f"text {number} holds half of a character pair (a lone surrogate); clean it with "
                    "text.encode('utf-8', 'replace').decode()"
                ) from error

"""Digests of content, so that what was made from one file or table is never taken for what was made from another."""

from __future__ import annotations

from hashlib import blake2b, file_digest
from pathlib import Path

from trundle.errors import BadInput

DIGEST_BYTES = 16


def content_digest(path: Path) -> str:
    """The hash of a file's content, read in small pieces."""
    with path.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def table_id(path: str | Path) -> str:
    """Who a teacher is that exists only as a file of vectors."""
    try:
        return f"table {content_digest(Path(path))}"
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); check the file") from error

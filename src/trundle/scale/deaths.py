"""How often workers have died at one thing: a cluster starts them again for ever, and would never say why nothing comes.

Whoever begins adds a byte to one file, whoever ends adds a byte to another; the difference died, or is still at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trundle.errors import BadInput

MOST = 10
BEGUN, ENDED = ".begun", ".ended"


@contextmanager
def counted(folder: Path, what: str, *, at_once: int = 1) -> Iterator[None]:
    """Do the block, unless too many have died in it; `at_once` workers may be in it at the same time."""
    begun, ended = (folder / f".{what}{ending}" for ending in (BEGUN, ENDED))
    dead = _add(begun) - _size(ended) - at_once
    if dead >= MOST:
        raise BadInput(
            f"{dead} workers have died at this one after the other; look whether their nodes have memory enough, "
            "then run again"
        )
    yield
    _add(ended)


def forget(folder: Path) -> None:
    """A new build counts anew."""
    for ending in (BEGUN, ENDED):
        for path in folder.glob(f".*{ending}"):
            path.unlink(missing_ok=True)


def _add(path: Path) -> int:
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0

"""Folders of unfinished work that one process has at a time; who is killed lets the next one in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def own_folder(folder: Path, *, if_taken: Callable[[], None]) -> Iterator[Path]:
    """The folder, or where another process has it, one beside it: `if_taken` tells the person so, or refuses."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    claim = _claim_of(folder)
    try:
        claim.acquire(timeout=0)
    except Timeout:
        if_taken()
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        claim = _claim_of(folder)
        claim.acquire()
    try:
        yield folder
    finally:
        if not folder.exists():
            _unlink(claim)
        claim.release()


def drop_folder(folder: Path) -> None:
    """Remove what is no longer needed, unless another process has it just now."""
    try:
        with (claim := _claim_of(folder)).acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
            _unlink(claim)
    except Timeout:
        return


def _claim_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def _unlink(claim: FileLock) -> None:
    """To be done while it is held: who opened it by then looks again."""
    Path(claim.lock_file).unlink(missing_ok=True)

"""Folders that appear whole or not at all, and that remember where they came from.

What this is not: it knows nothing of models. A step, a benchmark or an evaluation that must leave a folder behind
writes it through `whole_folder`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trundle.errors import BadInput, WriteFailed
from trundle.records import LINEAGE_FILE

_MODEL_MARKS = (LINEAGE_FILE, "modules.json", "config.json", "query/modules.json")
"""A folder with none of these is no model, and is never replaced."""

_HERE, _EXCHANGE = -100, 2
"""What Linux calls AT_FDCWD and RENAME_EXCHANGE."""


def check_free(
    target: str | Path,
    *,
    replace: bool = False,
    marks: Sequence[str] = _MODEL_MARKS,
    read: Sequence[str] = (),
) -> Path:
    """Refuse an output that would overwrite something, before any heavy work starts.

    Only a folder that holds one of the `marks` is ever replaced, and none that is `read` to make the result.
    """
    path = Path(target)
    if path.resolve() in [Path(one).expanduser().resolve() for one in read]:
        raise BadInput(f"{path} is a model the result is made from; choose another folder")
    if path.is_file():
        raise BadInput(f"{path} is a file; give a folder to write to")
    if path.is_dir() and any(path.iterdir()):
        if not replace:
            raise BadInput(f"{path} exists already; choose another folder, or say --force to replace it")
        if not any((path / mark).is_file() for mark in marks):
            what = "a model folder" if marks == _MODEL_MARKS else f"a folder with {marks[0]}"
            raise BadInput(f"{path} is not {what}, so --force won't replace it; choose another folder")
    if path.resolve() in (here := Path.cwd().resolve(), *here.parents):
        raise BadInput(f"{path.resolve()} is where you are or above it; choose a folder of its own")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"{parent} is a file, so nothing can be written below it; choose another folder")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"{parent} can't be written to; choose another folder")
    return path


@contextmanager
def whole_folder(
    target: str | Path, *, replace: bool = False, marks: Sequence[str] = _MODEL_MARKS
) -> Iterator[Path]:
    """A scratch folder beside `target` that becomes `target` when the block ends, and vanishes if it fails.

    A kill in the middle leaves only a hidden scratch folder, never a half-written result. A folder that is
    replaced stays in place until the new one is complete.
    """
    path = check_free(target, replace=replace, marks=marks).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    except OSError as error:
        raise WriteFailed(f"{path} can't be made ({error.strerror}); choose another place") from error
    try:
        yield scratch
        usual = _usual_mode(scratch)
        scratch.chmod(usual | (usual & 0o444) >> 2)
        for file in scratch.rglob("*"):
            if file.is_file():
                file.chmod(usual)
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        swap_folders(scratch, path)
    except OSError as error:
        raise WriteFailed(
            f"{path} could not be written ({error.strerror or error}); free some space and run again"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _usual_mode(folder: Path) -> int:
    """How this user's files may be read and written; a scratch folder, and weights in safetensors, begin as nobody else's."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    return mode


def swap_folders(scratch: Path, path: Path) -> None:
    """Put `scratch` in the place of `path` by renames alone; another process may do the same, or clear it, at any moment."""
    if _exchanged(scratch, path) or _moved(scratch, path) or _exchanged(scratch, path):
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.rename(old / path.name)
    try:
        scratch.rename(path)
    except BaseException:
        (old / path.name).rename(path)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Make a folder vanish at once, and not file by file: another process may look at any moment, and this one be killed."""
    if not path.is_dir():
        return
    with suppress(OSError):
        doomed = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
        with suppress(OSError):  # where another process was faster
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _moved(scratch: Path, path: Path) -> bool:
    """Whether the name was free."""
    try:
        scratch.rename(path)
    except OSError:
        if not path.exists():
            raise
        return False
    return True


def _exchanged(one: Path, other: Path) -> bool:
    """Give two folders each other's names in one step, so that no kill can leave a name without a folder.

    Only Linux can, and not on every file system; False where it can't.
    """
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and not call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


def write_whole(path: Path, text: str) -> None:
    """Write one small file so that a reader never sees half of it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise WriteFailed(
            f"{path} could not be written ({error.strerror}); free some space and run again"
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


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

"""Folders and files that are written atomically: a reader sees the complete result or nothing."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trundle.errors import BadInput, WriteFailed
from trundle.records import LINEAGE_FILE

_MODEL_MARKS = (LINEAGE_FILE, "modules.json", "config.json", "query/modules.json")
"""A folder without any of these is not a model folder, and is never replaced."""

_HERE, _EXCHANGE = -100, 2
"""What Linux calls AT_FDCWD and RENAME_EXCHANGE."""


def check_free(
    target: str | Path,
    *,
    replace: bool = False,
    marks: Sequence[str] = _MODEL_MARKS,
    read: Sequence[str] = (),
) -> Path:
    """Returns the output as a path; rejects one that would overwrite something before any heavy work starts.

    With `replace`, a folder that holds one of the files `marks` may be replaced, but none of those that are
    `read`.
    """
    path = Path(target)
    if path.resolve() in [Path(one).expanduser().resolve() for one in read]:
        raise BadInput(f"{path} is an input of this command; choose another output folder")
    if path.is_file():
        raise BadInput(f"{path} is a file; pass a folder to write to")
    if path.is_dir() and any(path.iterdir()):
        if not replace:
            raise BadInput(f"{path} already exists; choose another folder, or pass --force to replace it")
        if not any((path / mark).is_file() for mark in marks):
            what = "a model folder" if marks == _MODEL_MARKS else f"a folder with {marks[0]}"
            raise BadInput(f"{path} is not {what}, so --force does not replace it; choose another folder")
    if path.resolve() in (here := Path.cwd().resolve(), *here.parents):
        raise BadInput(f"{path.resolve()} is the current folder or one of its parents; choose another folder")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"{parent} is a file, so no folder can be created in it; choose another folder")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"{parent} is not writable; choose another folder")
    return path


@contextmanager
def atomic_folder(
    target: str | Path, *, replace: bool = False, marks: Sequence[str] = _MODEL_MARKS
) -> Iterator[Path]:
    """Yields a scratch folder that becomes `target` when the block ends, and is deleted if the block fails.

    A killed process leaves a hidden scratch folder, never an incomplete result. With `replace`, the old
    folder stays in place until the new one is complete; only a folder with one of the files `marks` is
    replaced.
    """
    path = check_free(target, replace=replace, marks=marks).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    except OSError as error:
        raise WriteFailed(f"{path} can't be created ({error.strerror}); choose another folder") from error
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
        raise _failed(path, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _failed(path: Path, error: OSError) -> WriteFailed:
    problem = error.strerror or error
    return WriteFailed(f"{path} could not be written ({problem}); free some space and run again")


def _usual_mode(folder: Path) -> int:
    """The permissions of this user's new files; scratch folders and safetensors files start as private."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    return mode


def swap_folders(scratch: Path, path: Path) -> None:
    """Replaces `path` by `scratch` with renames only; another process may replace or delete it meanwhile."""
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
    """Deletes a folder with one rename first, so that another process never sees a part of it."""
    if not path.is_dir():
        return
    with suppress(OSError):
        doomed = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
        with suppress(OSError):  # where another process was faster
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _moved(scratch: Path, path: Path) -> bool:
    try:
        scratch.rename(path)
    except OSError:
        if not path.exists():
            raise
        return False
    return True


def _exchanged(one: Path, other: Path) -> bool:
    """Swaps the names of two folders in one system call; False where the system or file system can't."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and not call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


def write_atomic(path: Path, text: str) -> None:
    """Writes one small file atomically."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)

"""Folders and files that are written atomically: a reader sees the complete result or nothing.

What is not complete yet lies beside its target, under a hidden name that ends with `.part`. Its process holds
a lock on it, so the next process that writes the same target finds what a killed one left, and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trundle.errors import BadInput, WriteFailed
from trundle.records import LINEAGE_FILE

fcntl: Any = import_module("fcntl") if os.name == "posix" else None
"""Without it, scratch of killed processes is not recognised, and stays."""
_MODEL_MARKS = (LINEAGE_FILE, "modules.json", "config.json", "query/modules.json")
"""A folder without any of these is not a model folder, and is never replaced."""

_HERE, _EXCHANGE = -100, 2
"""What Linux calls AT_FDCWD and RENAME_EXCHANGE."""
_PART, _OLD = "part", "old"
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


def check_free(
    target: str | Path,
    *,
    replace: bool = False,
    marks: Sequence[str] = _MODEL_MARKS,
    read: Sequence[str | Path] = (),
) -> Path:
    """Returns the output as a path; rejects one that would overwrite something before any heavy work starts.

    With `replace`, a folder that holds one of the files `marks` may be replaced, but none that is or holds
    something that is `read`.
    """
    path = Path(target)
    place = path.resolve()
    check_not_read(path, read)
    if path.is_file():
        raise BadInput(f"{path} is a file; pass a folder to write to")
    if _is_mount_point(place):
        raise BadInput(f"{path} is a mount point, which can't be replaced; write to {path / 'small'}")
    if not _is_empty(path):
        if not replace:
            raise BadInput(f"{path} already exists; choose another folder, or pass --force to replace it")
        if not _may_go(path, marks):
            what = "a model folder" if marks == _MODEL_MARKS else f"a folder with {marks[0]}"
            raise BadInput(f"{path} is not {what}, so --force does not replace it; choose another folder")
    if place in (here := Path.cwd().resolve(), *here.parents):
        raise BadInput(f"{place} is the current folder or one of its parents; choose another folder")
    parent = place.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise BadInput(f"{parent} is a file, so no folder can be created in it; choose another folder")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"{parent} is not writable; choose another folder")
    return path


def check_not_read(target: str | Path, read: Sequence[str | Path]) -> None:
    """Rejects an output that is, holds or is part of something that the command reads."""
    path = Path(target)
    place = path.resolve()
    for one in read:
        name = str(one).partition("::")[0]  # a data source may name columns behind it
        source = Path(name or one).expanduser().resolve()
        if source == place:
            raise BadInput(f"{path} is an input of this command; choose another output folder")
        if place in source.parents and source.exists():
            raise BadInput(f"{path} holds {one}, an input of this command; choose another output folder")
        full = path.is_file() or not _is_empty(path)
        if source in place.parents and full and not (path / LINEAGE_FILE).is_file():
            raise BadInput(f"{path} is part of {one}, an input of this command; choose another folder")


def _is_empty(path: Path) -> bool:
    return not path.is_dir() or not any(path.iterdir())


def _may_go(path: Path, marks: Sequence[str]) -> bool:
    return path.is_dir() and (_is_empty(path) or any((path / mark).is_file() for mark in marks))


def _is_mount_point(place: Path) -> bool:
    if os.path.ismount(place):
        return True
    try:  # folders of the same file system are only listed here
        mounted = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    return str(place).replace(" ", r"\040") in (line.split(" ")[4] for line in mounted.splitlines())


@contextmanager
def atomic_folder(
    target: str | Path, *, replace: bool = False, marks: Sequence[str] = _MODEL_MARKS, keep: bool = False
) -> Iterator[Path]:
    """Yields a scratch folder that becomes `target` when the block ends, and is deleted if the block fails.

    A killed process leaves a hidden scratch folder, never an incomplete result. With `replace`, the old
    folder stays in place until the new one is complete; only a folder with one of the files `marks` is
    replaced, and nothing that appeared at `target` meanwhile. With `keep`, a complete result that can't be
    put in place stays in a folder next to it, which the error names; so callers check `target` before they
    start. A symbolic link is followed.
    """
    if not keep:  # otherwise a result that was expensive to make is written in any case
        check_free(target, replace=replace, marks=marks)
    path = _followed(Path(target))
    with scratch_folder(path.parent, path.name) as scratch:
        try:
            yield scratch
            _sync_tree(scratch)
        except OSError as error:
            raise _failed(path, error) from error
        try:
            check_free(path, replace=replace, marks=marks)
            if replace:
                _replace(scratch, path, marks)
            else:
                scratch.rename(path)  # fails if there is anything but an empty folder
            sync(path.parent)
        except (OSError, BadInput) as error:
            reason = str(error).partition(";")[0] if isinstance(error, BadInput) else error.strerror or error
            problem = f"{path} could not be put in place ({reason})"
            if keep and (kept := _kept(scratch, path)) is not None:
                raise WriteFailed(f"{problem}; the result is complete in {kept}: move it yourself") from error
            raise WriteFailed(f"{problem}; choose another folder and run again") from error


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yields a new hidden folder in `parent` for work on `name`, and deletes it when the block ends."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent, name)
        scratch, lock = _claimed(parent, name, lambda place: place.mkdir(mode=0o700))
    except OSError as error:
        raise _failed(parent / name, error) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _released(lock)


def _remove_abandoned(parent: Path, name: str) -> None:
    """Removes what killed processes left when they wrote `name`, and restores what they had moved aside."""
    if fcntl is None or not parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(name)}\.trundle-\w+\.({_PART}|{_OLD})")
    for entry in [entry for entry in parent.iterdir() if pattern.fullmatch(entry.name)]:
        if (lock := _claim(entry)) is None:
            continue
        with suppress(OSError):
            if entry.suffix == f".{_OLD}" and not (parent / name).exists():
                (entry / name).rename(parent / name)
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        _released(lock)


def _claimed(parent: Path, name: str, create: Callable[[Path], None]) -> tuple[Path, int | None]:
    """Creates a scratch file or folder and locks it for this process."""
    while True:
        place = parent / f".{name}.trundle-{secrets.token_hex(4)}.{_PART}"
        try:
            create(place)
        except FileExistsError:
            continue
        if fcntl is None:
            return place, None
        # Another process may find it before it is locked, and remove it.
        lock = _claim(place)
        if place.exists():
            return place, lock


def _claim(place: Path) -> int | None:
    """Locks a file or folder until this process ends or closes it; None if another process holds it."""
    descriptor = None
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _released(descriptor)
        return None
    return descriptor


def _released(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _followed(path: Path) -> Path:
    return path.resolve() if path.is_symlink() else path.absolute()


def _failed(path: Path, error: OSError) -> WriteFailed:
    fix = "check the disk and run again"
    if error.errno is None:  # torch reports a full disk without its number
        fix = "free some space or check the disk, and run again"
    elif error.errno in _FULL:
        fix = "free some space and run again"
    elif error.errno in _UNWRITABLE:
        fix = "choose another folder"
    return WriteFailed(f"{path} could not be written ({error.strerror or error}); {fix}")


def _kept(scratch: Path, path: Path) -> Path | None:
    for number in count(1):
        place = path.with_name(f"{path.name}.new{number if number > 1 else ''}")
        if place.exists():
            continue
        try:
            scratch.rename(place)
        except OSError:
            return None
        return place
    return None


def _sync_tree(folder: Path) -> None:
    """Gives everything in a folder the user's usual permissions, and writes it to disk."""
    usual = _usual_mode(folder)
    for place in (folder, *folder.rglob("*")):
        if place.is_file():
            place.chmod(usual)
            sync(place)
        elif place.is_dir():
            if place == folder:
                place.chmod(usual | (usual & 0o444) >> 2)
            sync(place)


def sync(place: Path) -> None:
    """Writes a file, or the names in a folder, to disk."""
    if os.name == "nt" and place.is_dir():
        return
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that can't sync folders
            raise
    finally:
        os.close(descriptor)


def _usual_mode(folder: Path) -> int:
    """The permissions of this user's new files; scratch folders and safetensors files start as private."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    return mode


def _replace(scratch: Path, path: Path, marks: Sequence[str]) -> None:
    """Puts `scratch` in the place of `path`, unless something else has appeared there meanwhile."""
    swap_folders(scratch, path)
    if scratch.exists() and not _may_go(scratch, marks):
        swap_folders(scratch, path)
        raise BadInput(f"{path} was changed meanwhile")


def swap_folders(scratch: Path, path: Path) -> None:
    """Puts `scratch` in the place of `path` by renames only; the old folder, if any, becomes `scratch`."""
    if _exchanged(scratch, path) or _moved(scratch, path) or _exchanged(scratch, path):
        return
    aside = path.with_name(f".{path.name}.trundle-{secrets.token_hex(4)}.{_OLD}")
    aside.mkdir()
    lock = None if fcntl is None else _claim(aside)
    try:
        path.rename(aside / path.name)
        try:
            scratch.rename(path)
        except BaseException:
            (aside / path.name).rename(path)
            raise
        (aside / path.name).rename(scratch)
    finally:
        with suppress(OSError):
            aside.rmdir()
        _released(lock)


def remove_folder(path: Path) -> None:
    """Deletes a folder with one rename first, so that another process never sees a part of it."""
    if path.is_dir():
        with suppress(OSError, WriteFailed), scratch_folder(path.parent, path.name) as doomed:
            path.rename(doomed)  # fails where another process was faster


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
    """Writes one small file atomically, and to disk; a symbolic link is followed."""
    with atomic_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a file to write, which replaces `path` when it is complete; a symbolic link is followed."""
    path = _followed(path)
    scratch, lock = None, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent, path.name)
        scratch, lock = _claimed(path.parent, path.name, lambda place: place.touch(exist_ok=False))
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _failed(path, error) from error
    finally:
        if scratch is not None:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
        _released(lock)


@contextmanager
def locked_folder(folder: Path, if_taken: Callable[[], None]) -> Iterator[None]:
    """Holds a folder's lock, which is released when its process dies; calls `if_taken` before it waits.

    A folder that cannot be written needs no lock: what is finished in it can be read. A folder that did not
    exist and got no content is removed.
    """
    lock, new = FileLock(folder / _LOCK), not folder.exists()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if_taken()
            lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # while it is held: waiting processes open a new file
                (folder / _LOCK).unlink()
            lock.release()
        if new:
            with suppress(OSError):
                folder.rmdir()


def absolute_name(model: str) -> str:
    """Returns a folder as its absolute path, so that other processes find it; a hub name is unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model

"""Folders that appear whole or not at all, and that remember where they came from.

What this is not: it knows nothing of models. A step, a benchmark or an evaluation that must leave a folder behind
writes it through `whole_folder`.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trundle.errors import BadInput, WriteFailed

LINEAGE_FILE = "trundle.json"
LINEAGE_FORMAT = 1
THE_ORIGINAL = "the original"
"""What a lineage calls the teacher where that is the model that came in."""
CALIBRATION_FILE = "calibration.json"
RECORDS = (LINEAGE_FILE, CALIBRATION_FILE)
"""What is known of a model whatever form its weights have."""
MODEL_MARKS = (LINEAGE_FILE, "modules.json", "config.json", "query/modules.json")
"""A folder with none of these is no model, and is never replaced."""

HERE, EXCHANGE = -100, 2
"""What Linux calls AT_FDCWD and RENAME_EXCHANGE."""

VERSIONED = (
    "trundle",
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "numpy",
    "scikit-learn",
)


def versions(packages: Sequence[str] = VERSIONED) -> dict[str, str]:
    """The versions a result depends on, for packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What made a folder: enough to make it again."""

    source: str
    space: str | None = None
    """Whose vector space the model is in, where that is another model's than the source's."""
    steps: tuple[Mapping[str, Any], ...] = ()
    data: tuple[Mapping[str, Any], ...] = ()
    seed: int = 0
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)
    parent: Mapping[str, Any] | None = None
    format: int = LINEAGE_FORMAT

    def after_parent(self) -> Lineage:
        """One lineage for both, where the source was only a stage on the way here."""
        parent = self.parent
        if parent is None:
            return self
        return replace(
            self,
            source=parent["source"],
            space=THE_ORIGINAL if self.space == parent["source"] else self.space,
            steps=(*parent["steps"], *self.steps),
            before=parent["before"],
            parent=parent["parent"],
        )

    def write(self, folder: Path) -> None:
        """Put the lineage into `folder`."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False)
        (folder / LINEAGE_FILE).write_text(text + "\n", encoding="utf-8")


def read_lineage(folder: str | Path) -> dict[str, Any] | None:
    """The lineage of a folder trundle made, or None for any other folder."""
    path = Path(folder) / LINEAGE_FILE
    if not path.is_file():
        return None
    try:
        lineage = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is damaged ({error}); delete it, or make the folder again") from error
    if not isinstance(lineage, dict) or lineage.get("format") != LINEAGE_FORMAT:
        raise BadInput(
            f"{path} was written by another version of trundle; make the folder again with this one"
        )
    return lineage


def keep_records(source: Path, folder: Path) -> None:
    """Let a model's other form, in `folder`, remember what `source` does."""
    for name in RECORDS:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


def cache_folder() -> Path:
    """Where costly intermediate results are kept: $TRUNDLE_CACHE, or a folder among the user's other caches."""
    given = os.environ.get("TRUNDLE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).expanduser() if given else base / "trundle"


def check_free(
    target: str | Path,
    *,
    replace: bool = False,
    marks: Sequence[str] = MODEL_MARKS,
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
            what = "a model folder" if marks == MODEL_MARKS else f"a folder with {marks[0]}"
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
    target: str | Path, *, replace: bool = False, marks: Sequence[str] = MODEL_MARKS
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
    return call is not None and not call(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE)


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

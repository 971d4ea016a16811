"""The cache: a folder for each piece of costly work, named by everything its result depends on.

The layout is CACHE/KIND/KEY. The same inputs give the same key, so an interrupted command finds its work
again when it is run again. `locked` lets one process at a time work in an entry; the lock is released when
its process dies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from trundle.errors import BadModel

_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_NOT_DOWNLOADED = ["onnx/*", "openvino/*", "original/*"]
_MODEL_FILES = ("modules.json", "config.json", "encoder.json", "query/encoder.json")

_CacheKind = Literal["answers", "graphs", "runs", "speed", "steps", "targets", "texts", "tokens", "trials"]


def cache_folder() -> Path:
    """Returns the root of the cache: $TRUNDLE_CACHE, or `trundle` in the user's cache folder."""
    given = os.environ.get("TRUNDLE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given).expanduser() if given else base / "trundle"


def cache_entry(kind: _CacheKind, *inputs: Any, root: Path | None = None) -> Path:
    """Returns the folder of the work that depends on `inputs`; the folder need not exist.

    Inputs are JSON values, or anything that prints the same when it is the same. `root` replaces the cache's
    root.
    """
    return (root or cache_folder()) / kind / cache_key(*inputs)


def cache_key(*inputs: Any) -> str:
    """Returns a name for `inputs`, the same for the same inputs."""
    text = json.dumps(inputs, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def file_state(name: str) -> list[Any]:
    """Returns what changes when the file or folder `name` does: paths, sizes and times of all files.

    A hub name is represented by itself and by the revision that was downloaded last.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return [name, _downloaded_revision(name)]
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    states = [(str(file), file.stat()) for file in files if file.is_file()]
    return [str(path.resolve()) if states else name, [(each, s.st_size, s.st_mtime_ns) for each, s in states]]


_API_MODELS = ("text-embedding-", "embed-english", "embed-multilingual", "voyage-", "gemini-embedding")
_FULL_NAMES = {
    "bge": "BAAI/bge-base-en-v1.5",
    "e5": "intfloat/e5-base-v2",
    "multilingual-e5": "intfloat/multilingual-e5-base",
    "gte": "thenlper/gte-base",
    "mxbai": "mixedbread-ai/mxbai-embed-large-v1",
    "nomic": "nomic-ai/nomic-embed-text-v1.5",
    "jina": "jinaai/jina-embeddings-v2-base-en",
    "snowflake": "Snowflake/snowflake-arctic-embed-m",
    "qwen3": "Qwen/Qwen3-Embedding-0.6B",
}
"""Families of models that people name without their owner, each with a full name."""


def check_name(name: str) -> None:
    """Rejects what is neither a model's folder nor could be a hub name; nothing is looked up."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in _MODEL_FILES):
            raise BadModel(f"{name} has neither modules.json nor config.json; pass a model folder")
        return
    if path.is_file():
        raise BadModel(f"{name} is a file; pass the model's folder")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name.strip():
        raise BadModel(f"there is no folder {name!r}; pass a model folder or a hub name")
    if name.startswith(_API_MODELS):
        use = f"pass its address with --teacher-model {name}, or an index that it made with --index"
        raise BadModel(f"{name!r} is a model behind an API and has no weights to cut; {use}")


def model_folder(name: str, *, trust_remote_code: bool = False) -> Path:
    """Returns the folder of a model; a hub name is downloaded first, if its newest revision is not here."""
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    import huggingface_hub as hub

    patterns = [*_DOWNLOADED, "*.py"] if trust_remote_code else _DOWNLOADED
    for candidate in [name] if "/" in name else [f"sentence-transformers/{name}", name]:
        try:
            found = hub.snapshot_download(candidate, allow_patterns=patterns, ignore_patterns=_NOT_DOWNLOADED)
            return Path(found)
        except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
            continue
        except (hub.errors.LocalEntryNotFoundError, hub.errors.HfHubHTTPError, OSError) as error:
            what = f"{name!r} is not a local folder and the model hub can't be reached"
            raise BadModel(f"{what}; pass a local model folder, or connect to the network") from error
    full = next((full for short, full in _FULL_NAMES.items() if name.lower().startswith(short)), None)
    fix = "check the spelling" if full is None else f"pass the name with its owner, such as {full}"
    raise BadModel(f"{name!r} is neither a local folder nor a model on the hub; {fix}")


def _downloaded_revision(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    for candidate in (name, f"sentence-transformers/{name}"):
        with suppress(ValueError):  # not a hub name
            found = try_to_load_from_cache(candidate, "config.json")
            if isinstance(found, str):
                return Path(found).parent.name
    return None


@contextmanager
def locked(folder: Path, *, if_taken: Callable[[], None] | None) -> Iterator[Path]:
    """Yields `folder` while no other process works in it.

    If another process does, calls `if_taken`, which reports that or raises, and yields a folder next to it.
    Waits for the other process if `if_taken` is None.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock_of(folder)
    try:
        lock.acquire(timeout=-1 if if_taken is None else 0)
        for left in folder.parent.glob(f"{folder.name}-*[0-9]"):
            remove_entry(left)  # of a process that was killed beside another one
    except Timeout:
        assert if_taken is not None
        if_taken()
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        lock = _lock_of(folder)
        lock.acquire()
    try:
        yield folder
    finally:
        if not folder.exists():
            _unlink(lock)
        lock.release()


def remove_entry(folder: Path) -> None:
    """Deletes an entry that is no longer needed, unless another process works in it."""
    try:
        with (lock := _lock_of(folder)).acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
            _unlink(lock)
    except Timeout:
        return


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def _unlink(lock: FileLock) -> None:
    # Only while the lock is held: a process that has opened the file by then tries again.
    Path(lock.lock_file).unlink(missing_ok=True)

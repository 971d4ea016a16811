"""Who a teacher is, so that vectors of two teachers never mix in one folder.

An identity follows from content alone: a copy of a model has the same one, a retrained model another.
"""

from __future__ import annotations

from hashlib import blake2b, file_digest
from pathlib import Path

from trundle.artifact import LINEAGE_FILE
from trundle.errors import BadInput, BadModel

DIGEST_BYTES = 16

MODEL_SUFFIXES = frozenset({".json", ".model", ".safetensors", ".txt"})
"""What decides a model's vectors: configs, prompts, vocabularies, merges and weights."""


def content_digest(path: Path) -> str:
    """The hash of a file's content, read in small pieces."""
    with path.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def model_id(folder: str | Path) -> str:
    """A model folder's identity: all configs, tokenizer files and weights, by content; about 1 s per GB."""
    root = Path(folder)
    files = sorted(
        file.relative_to(root)
        for file in root.rglob("*")
        if file.suffix in MODEL_SUFFIXES and file.name != LINEAGE_FILE and file.is_file()
    )
    if not any(file.suffix == ".safetensors" for file in files):
        raise BadModel(f"{root} holds no safetensors weights; give the folder of a saved model")
    whole = blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        whole.update(f"{file.as_posix()}\0{content_digest(root / file)}\n".encode())
    return f"model {whole.hexdigest()}"


def table_id(path: str | Path) -> str:
    """A file of vectors, by content."""
    try:
        return f"table {content_digest(Path(path))}"
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); check the file") from error

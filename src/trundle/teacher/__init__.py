"""Teachers: sources of vectors for texts, and the stores that hold the vectors they returned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

MANIFEST = "manifest.json"
"""The file that makes a folder a store of teacher vectors."""
_INDEXES = ("index.json", "chroma.sqlite3", "collection")
"""Files and folders that make a folder an index: trundle's own, Chroma's, Qdrant's."""

_OTHERS = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".gz", ".safetensors")  # texts and models


def teacher_kind(name: str) -> Literal["endpoint", "table", "store", "index", "model"]:
    """Return what a teacher's name stands for.

    A URL, a parquet file, a store of vectors, the address or file of an index, or a model.
    """
    if name.startswith(("http://", "https://")):
        return "model" if "//huggingface.co/" in name else "endpoint"  # a page is no endpoint
    if Path(name).suffix == ".parquet":
        return "table"
    if (Path(name) / MANIFEST).is_file():
        return "store"
    is_file = Path(name).is_file() and Path(name).suffix.lower() not in _OTHERS
    is_index = "://" in name or is_file or any((Path(name) / mark).exists() for mark in _INDEXES)
    return "index" if is_index else "model"


def without_secrets(name: str) -> str:
    """Return a teacher's name without the password, key or query of an address."""
    if "://" not in name:
        return name
    hidden = re.sub(r"(?<=://)([^/@:?]*):.*@", r"\1@", name)
    return re.sub(r"(?i)([?&][^=&]*(?:password|key|token|secret)[^=&]*)=[^&]*", r"\1=…", hidden)

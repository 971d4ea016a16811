"""Teachers: sources of vectors for texts, and the stores that hold the vectors they returned."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

MANIFEST = "manifest.json"
"""The file that makes a folder a store of teacher vectors."""


def teacher_kind(name: str) -> Literal["endpoint", "table", "store", "model"]:
    """Return what a teacher's name stands for: a URL, a parquet file, a store of vectors, or a model."""
    if name.startswith(("http://", "https://")):
        return "endpoint"
    if Path(name).suffix == ".parquet":
        return "table"
    return "store" if (Path(name) / MANIFEST).is_file() else "model"

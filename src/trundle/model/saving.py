"""A model leaves as a standard folder, whole or not at all, with its lineage and card inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer

from trundle.artifact import Lineage, whole_folder
from trundle.errors import WriteFailed


def save(
    model: SentenceTransformer,
    folder: str | Path,
    *,
    lineage: Lineage,
    card: str,
    files: Mapping[str, str | bytes] | None = None,
    replace: bool = False,
) -> Path:
    """Write the layout that plain sentence-transformers loads and the additional `files`."""
    target = Path(folder)
    with whole_folder(target, replace=replace) as scratch:
        try:
            model.save_pretrained(str(scratch), create_model_card=False, safe_serialization=True)
        except SafetensorError as error:
            raise WriteFailed(
                f"{target} could not be written ({error}); free some space and run again"
            ) from error
        for name, content in {"README.md": card, **(files or {})}.items():
            (scratch / name).write_bytes(content.encode() if isinstance(content, str) else content)
        lineage.write(scratch)
    return target


def weight_bytes(folder: str | Path) -> int:
    """What the weights weigh on disk."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))

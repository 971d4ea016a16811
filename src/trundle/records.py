from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trundle.errors import BadInput

LINEAGE_FILE = "trundle.json"
_LINEAGE_FORMAT = 1
THE_ORIGINAL = "the original"
"""What a lineage calls the teacher where that is the model that came in."""
CALIBRATION_FILE = "calibration.json"
_RECORDS = (LINEAGE_FILE, CALIBRATION_FILE)
"""What is known of a model whatever form its weights have."""

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
    format: int = _LINEAGE_FORMAT

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
    if not isinstance(lineage, dict) or lineage.get("format") != _LINEAGE_FORMAT:
        raise BadInput(
            f"{path} was written by another version of trundle; make the folder again with this one"
        )
    return lineage


def keep_records(source: Path, folder: Path) -> None:
    """Let a model's other form, in `folder`, remember what `source` does."""
    for name in _RECORDS:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)

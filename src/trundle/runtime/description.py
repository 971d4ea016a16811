"""What an exported graph does not say about its model: a small file, written by export, read without torch.

A pair (queries by a student, documents by its teacher) is a folder with two such models, one per side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import blake2b, file_digest
from importlib.util import find_spec
from pathlib import Path, PurePath
from shlex import quote
from typing import Any, Literal

from trundle.errors import BadModel
from trundle.precision import FORMATS, EngineName, Precision

FILE = "encoder.json"
_FORMAT = 1
_DIGEST_BYTES = 16
_MOST = {"dimensions": 1 << 16, "max_tokens": 1 << 24, "pad_id": 1 << 31, "parameters": 1 << 50}
"""The largest values that are taken for true."""

_PACKAGES: Mapping[EngineName, str] = {"openvino": "openvino", "onnx": "onnxruntime"}
_Side = Literal["query", "document"]
SIDES: tuple[_Side, ...] = ("query", "document")
"""What a text is, and the names of the two folders in a pair."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One file the model can run from, and the facts that export measured about it."""

    path: str
    engine: EngineName
    precision: Precision
    one_by_one: bool = False
    """Whether a text's vector would depend on the other texts of its batch, so that each runs alone."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Description:
    """Everything between a text and the graph's input, and between its output and a vector."""

    dimensions: int
    normalised: bool
    max_tokens: int
    pad_id: int
    parameters: int
    tokenizer: str = "tokenizer.json"
    special_tokens: bool = True
    """Whether the tokenizer adds its special tokens; a static model has none."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    before: str = ""
    after: str = ""
    """What a chat template puts around every text; then the tokenizer adds nothing."""
    graphs: tuple[Graph, ...] = ()
    identity: str = ""
    """The same for models with the same vectors: a digest of weights, tokenizer and settings."""
    weights: str = ""
    """A digest of the torch weights in the same folder; empty if the graphs were exported without them."""
    weight_files: Mapping[str, list[int]] = field(default_factory=dict, compare=False)
    """Size and time of change of each file of weights; the digest is computed again if one differs."""
    format: int = _FORMAT

    def prompt_for(self, role: str | None) -> str:
        """The prompt for texts of a role, chosen as sentence-transformers chooses it."""
        names = {"query": ("query",), "document": ("document", "passage", "corpus")}.get(role or "", ())
        default = self.prompts.get(self.default_prompt or "", "")
        return next((self.prompts[name] for name in names if name in self.prompts), default)

    def with_graph(self, graph: Graph) -> Description:
        """The description with one graph added; it replaces an older graph in the same file."""
        others = tuple(other for other in self.graphs if other.path != graph.path)
        return replace(self, graphs=(*others, graph))

    def as_text(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def is_exported(folder: Path) -> bool:
    """Whether the runtime can load `folder`, which may be one model or a pair."""
    return _has_graphs(folder) or all(_has_graphs(folder / side) for side in SIDES)


def _has_graphs(folder: Path) -> bool:
    """Whether a folder names graphs that are there; a killed export may have named one too early."""
    if not (folder / FILE).is_file():
        return False
    try:
        graphs = read_description(folder).graphs
    except BadModel:
        return True  # loading it explains what is wrong
    return any((folder / graph.path).is_file() for graph in graphs)


def read_weights(folder: Path) -> tuple[str, dict[str, list[int]]]:
    """A digest of the torch weights and tokenizers in a folder, and the state of their files."""
    files = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        exported = name.parts[0] in SIDES or any(part.startswith(".") for part in name.parts)
        if not exported and (file.suffix == ".safetensors" or file.name == "tokenizer.json"):
            files.append(file)
    if not any(file.suffix == ".safetensors" for file in files):
        return "", {}
    states = {str(file.relative_to(folder)): _state(file) for file in files}
    parts = [f"{name} {_content_digest(folder / name, *state)}\n" for name, state in states.items()]
    return blake2b("".join(parts).encode(), digest_size=_DIGEST_BYTES).hexdigest(), states


def _check_weights(folder: Path, description: Description) -> None:
    """Reject graphs of a model that has other torch weights now."""
    if not description.weights:
        return
    home = folder.resolve()
    if home.name in SIDES and not any(home.rglob("*.safetensors")):
        home = home.parent  # one side of a pair
    known = description.weight_files
    if all((home / name).is_file() and _state(home / name) == state for name, state in known.items()):
        return
    now, _ = read_weights(home)
    if now and now != description.weights:
        changed = f"the weights or the tokenizer in {home} have changed since its graphs were exported"
        raise BadModel(f"{changed}; export them again: trundle export {quote(str(home))} --force")


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


@cache
def _content_digest(file: Path, _size: int, _changed: int) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


def side_folders(folder: Path) -> dict[_Side, Path]:
    """The folder of the model for each side; the same folder for both unless it is a pair."""
    pair = not (folder / FILE).is_file() and any((folder / side / FILE).is_file() for side in SIDES)
    return {side: folder / side if pair else folder for side in SIDES}


def installed(engine: EngineName) -> bool:
    """Whether the library that runs graphs of this engine is installed."""
    return find_spec(_PACKAGES[engine]) is not None


def usable_cores() -> int:
    """The cores this process may run on, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_values(found: Description) -> None:
    """Reject what the runtime would fail on with a text, or allocate."""
    for name, most in _MOST.items():
        value = getattr(found, name)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise ValueError(f"{name} is {value!r}")
    texts = (found.before, found.after, *found.prompts, *found.prompts.values())
    known = {(row.engine, row.precision) for row in FORMATS}
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a prompt is no text")
    if not known.issuperset((graph.engine, graph.precision) for graph in found.graphs):
        raise ValueError("a graph is of an unknown kind")


def read_description(folder: Path) -> Description:
    """The description in `folder`; an error says how to create one."""
    path = folder / FILE
    if not folder.is_dir():
        raise BadModel(f"there is no folder {str(folder)!r}; pass one that `trundle export` wrote")
    if not path.is_file():
        raise BadModel(f"{folder} has not been exported; run: trundle export {quote(str(folder))} --to onnx")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise BadModel(f"{path} was written by another version of trundle; export the model again")
        graphs = tuple(Graph(**graph) for graph in content.pop("graphs"))
        found = Description(graphs=graphs, **content)
        _check_values(found)
        for name in map(PurePath, (found.tokenizer, *(graph.path for graph in graphs))):
            if name.is_absolute() or ".." in name.parts:
                raise BadModel(f"{path} names {name}, which is outside; export the model again")
        return found
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadModel(f"{path} is damaged ({error}); export the model again") from error

"""What a runtime must know of a model beside its graph: one small file, written by export, read without torch.

A pair (queries by a student, documents by its teacher) is a folder that holds two such models, one for each side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from trundle.errors import BadModel

FILE = "encoder.json"
_FORMAT = 1

EngineName = Literal["onnx", "openvino"]
_PACKAGES: Mapping[EngineName, str] = {"openvino": "openvino", "onnx": "onnxruntime"}
Precision = Literal["float32", "float16", "bfloat16", "int8", "int4", "int4+int8"]
_Side = Literal["query", "document"]
SIDES: tuple[_Side, ...] = ("query", "document")
"""What a text is, and the names of the two folders in a pair."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One file the model can be run from, and how near it is to the torch model it was made from."""

    path: str
    engine: EngineName
    precision: Precision
    one_by_one: bool = False
    """Whether a text's vector would depend on its neighbours in a batch, so that each must be run alone."""
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
    """Whether the tokenizer puts its own before and after a text; a static model does without."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    before: str = ""
    after: str = ""
    """What a chat template puts around every text; then the tokenizer adds nothing by itself."""
    graphs: tuple[Graph, ...] = ()
    format: int = _FORMAT

    def prompt_for(self, role: str | None) -> str:
        """The text put before every text of a role, as sentence-transformers would choose it."""
        default = self.prompts.get(self.default_prompt or "", "")
        match role:
            case "query":
                return self.prompts.get("query", default)
            case "document":
                names = ("document", "passage", "corpus")
                return next((self.prompts[name] for name in names if name in self.prompts), default)
        return default

    def with_graph(self, graph: Graph) -> Description:
        """The description with one graph added, in the place of an older one in the same file."""
        others = tuple(other for other in self.graphs if other.path != graph.path)
        return replace(self, graphs=(*others, graph))

    def as_text(self) -> str:
        """As it stands in its file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def is_exported(folder: Path) -> bool:
    """Whether the runtime can open `folder`, be it one model or a pair."""
    return (folder / FILE).is_file() or all((folder / side / FILE).is_file() for side in SIDES)


def side_folders(folder: Path) -> dict[_Side, Path]:
    """Where the model for each side lies: in most folders it is the same."""
    pair = not (folder / FILE).is_file() and any((folder / side / FILE).is_file() for side in SIDES)
    return {side: folder / side if pair else folder for side in SIDES}


def installed(engine: EngineName) -> bool:
    """Whether the library that runs graphs of this kind is there."""
    return find_spec(_PACKAGES[engine]) is not None


def read_description(folder: Path) -> Description:
    """The description in `folder`, or a sentence that says how to get one."""
    path = folder / FILE
    if not folder.is_dir():
        raise BadModel(f"there is no folder {str(folder)!r}; give one that `trundle export` wrote")
    if not path.is_file():
        raise BadModel(f"{folder} has not been exported; run: trundle export {folder} --to onnx")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise BadModel(f"{path} was written by another version of trundle; export the model again")
        graphs = tuple(Graph(**graph) for graph in content.pop("graphs"))
        return Description(graphs=graphs, **content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadModel(f"{path} is damaged ({error}); export the model again") from error

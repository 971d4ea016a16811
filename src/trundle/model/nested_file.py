"""What a nested model's folder keeps of its sizes, so that any of them can be taken out of it later.

One small file beside the wide model: how positions are selected, which widths were trained, and each one's linear map
into the shared vector space. It names the weights it belongs to; where they were changed since, it counts for nothing
but the selection.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save as as_safetensors
from sentence_transformers import SentenceTransformer

from trundle.errors import BadModel
from trundle.model.heads import with_linear_head
from trundle.model.identity import weights_digest
from trundle.model.layout import layout_of
from trundle.model.selection import Selection, default_select, narrow_cut
from trundle.model.surgery import Cut, cut, narrow_modules, transformer_of

NESTED_FILE = "nested.safetensors"


@dataclass(frozen=True, kw_only=True)
class Map:
    """y = weight · x + bias."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Nested:
    """The sizes inside a wide model."""

    selection: Selection
    widths: tuple[Fraction, ...]
    maps: Mapping[Fraction, Map] = field(default_factory=dict)
    """Each width's way into the wide model's vector space, where it was trained to have one."""
    normalise: bool = False
    weights: str
    """The digest of the weights all this belongs to."""

    def as_bytes(self) -> bytes:
        """The file's content."""
        order = np.asarray(self.selection.hidden_order, dtype=np.int64)
        tensors: dict[str, NDArray[Any]] = {"hidden_order": order} if order.size else {}
        for width, linear in self.maps.items():
            # safetensors writes memory as it lies, whatever the strides say
            tensors[f"{width}.weight"] = np.ascontiguousarray(linear.weight)
            tensors[f"{width}.bias"] = np.ascontiguousarray(linear.bias)
        about = {
            "select": self.selection.select,
            "mlp": self.selection.mlp,
            "widths": [str(width) for width in self.widths],
            "normalise": self.normalise,
            "weights": self.weights,
        }
        return as_safetensors(tensors, metadata={"nested": json.dumps(about, sort_keys=True)})


def read_nested(folder: str | Path) -> Nested | None:
    """The sizes inside a folder's model, or None where it was never nested."""
    path = Path(folder) / NESTED_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="np") as file:
            about = json.loads(file.metadata()["nested"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        widths = tuple(map(Fraction, about["widths"]))
        return Nested(
            selection=Selection(
                select=about["select"],
                mlp=about["mlp"],
                hidden_order=tuple(tensors.get("hidden_order", np.empty(0, np.int64)).tolist()),
            ),
            widths=widths,
            maps={
                width: Map(weight=tensors[f"{width}.weight"], bias=tensors[f"{width}.bias"])
                for width in widths
                if f"{width}.weight" in tensors
            },
            normalise=about["normalise"],
            weights=about["weights"],
        )
    except Exception as error:
        raise BadModel(f"{path} is damaged ({error}); make the nested model again") from error


def is_trained(nested: Nested | None, model: SentenceTransformer, width: Fraction) -> bool:
    """Whether a size was trained inside exactly these weights."""
    return nested is not None and width in nested.widths and nested.weights == weights_digest(model)


def untrained(name: str, width: Fraction, nested: Nested | None) -> str:
    """What to say of a size that nobody trained."""
    if nested is None:
        there = "it was never nested"
    elif width in nested.widths:
        there = "its weights were changed since it was nested"
    else:
        there = f"it was trained at {', '.join(map(str, nested.widths))}"
    return f"{name} at width {width} is untrained ({there}): its vectors are poor until it is trained"


def selection_for(nested: Nested | None, model: SentenceTransformer, *, mlp: bool | None = None) -> Selection:
    """How a size is taken: as the folder's sizes were, or as suits the family."""
    if nested is not None:
        return nested.selection
    return Selection(select=default_select(layout_of(transformer_of(model).model)), mlp=bool(mlp))


def pooled_width(model: SentenceTransformer, what: Cut) -> int:
    """How wide the vectors of a cut model are."""
    hidden = what.hidden or tuple(range(layout_of(transformer_of(model).model).sizes["hidden"]))
    rest = [copy.deepcopy(module) for module in list(model)[1:]]
    narrow_modules(rest, hidden)
    widths = [getattr(module, "get_embedding_dimension", lambda: None)() for module in rest]
    return next((width for width in reversed(widths) if width), len(hidden))


def at_width(
    model: SentenceTransformer, width: Fraction, how: Selection, nested: Nested | None = None
) -> SentenceTransformer:
    """The model at one of its widths, as a model of its own; `nested` is given where this size was trained."""
    if width == 1:
        return model
    backbone = transformer_of(model).model
    small = cut(model, narrow_cut(layout_of(backbone), backbone.config, width, how))
    if nested is None or width not in nested.maps:
        return small
    linear = nested.maps[width]
    return with_linear_head(small, linear.weight, linear.bias, normalise=nested.normalise)

"""The sizes inside a nested model, and how to extract one of them.

One small file next to the wide model records how positions are selected, which widths were trained, and the
linear map of each into the shared vector space. It names the weights it belongs to; if they have changed,
only the selection is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save as as_safetensors
from sentence_transformers import SentenceTransformer

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.heads import with_linear_head
from trundle.model.layout import Layout, layout_of
from trundle.model.save import weights_digest
from trundle.model.surgery import Cut, Indices, cut, transformer_of

Select = Literal["consecutive", "uniform", "rotary", "importance"]

NESTED_FILE = "nested.safetensors"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How the positions of a size are selected."""

    select: Select
    mlp: bool = False
    """Whether the MLPs get narrower as well."""
    hidden_order: Indices = ()
    """With `importance`: the dimensions of the hidden width, the most important one first."""


def default_select(layout: Layout) -> Select:
    """Return the default selection of a family: complete rotary pairs if it has them."""
    return "rotary" if layout.family.rotary else "consecutive"


def _spaced(size: int, count: int) -> Indices:
    return tuple(number * size // count for number in range(count))


def _spaced_pairs(size: int, count: int, rotated: int) -> Indices:
    """Evenly spaced pairs (i, i + half) of a head's rotated part, then spaced positions of the rest."""
    kept = rotated * count // size
    pairs = _spaced(rotated // 2, kept // 2)
    others = _spaced(size - rotated, count - kept)
    return (*pairs, *(rotated // 2 + pair for pair in pairs), *(rotated + place for place in others))


def narrow_cut(layout: Layout, config: Any, share: Fraction, how: Selection) -> Cut:
    """Return the cut to this share of the width, or raise an error that says why it is impossible."""
    hidden, head = (_size_at(layout, axis, share) for axis in ("hidden", "head"))
    neurons = _size_at(layout, "mlp", share) if how.mlp else 0
    sizes, rotary = layout.sizes, layout.family.rotary
    if rotary and head % 2:
        raise ImpossibleCut(f"{share} of a head is {head}, odd for rotary positions; pass a larger width")

    def kept(axis: str, count: int) -> Indices:
        return _spaced(sizes[axis], count) if how.select == "uniform" else tuple(range(count))

    if how.select == "rotary" or (how.select == "importance" and rotary):
        rope = getattr(config, "rope_parameters", None) or {}
        rotated = int(sizes["head"] * rope.get("partial_rotary_factor", 1.0))
        kept_in_head = _spaced_pairs(sizes["head"], head, rotated)
    else:
        kept_in_head = kept("head", head)
    return Cut(
        hidden=tuple(sorted(how.hidden_order[:hidden])) or kept("hidden", hidden),
        head=kept_in_head,
        mlp=(kept("mlp", neurons),) * layout.layers if how.mlp else None,
    )


def _size_at(layout: Layout, axis: str, share: Fraction) -> int:
    size = layout.sizes[axis]
    if not 0 < share <= 1:
        raise ImpossibleCut(f"{share} is not a width; pass a share of the model's, above 0 and up to 1")
    if (size * share).denominator > 1:
        names = {"hidden": "hidden width", "head": "head width", "mlp": "MLP width"}
        possible = Fraction(max(1, round(size * share)), size)
        raise ImpossibleCut(f"{share} of the {names[axis]} {size} is not a whole number; pass {possible}")
    return int(size * share)


@dataclass(frozen=True, kw_only=True)
class Map:
    """The linear map y = weight · x + bias."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Nested:
    """The sizes inside a wide model."""

    selection: Selection
    widths: tuple[Fraction, ...]
    maps: Mapping[Fraction, Map] = field(default_factory=dict)
    """The map of each width into the wide model's vector space, if it was trained with one."""
    normalise: bool = False
    weights: str
    """The digest of the weights that this record belongs to."""

    def as_bytes(self) -> bytes:
        """Return the content of the file."""
        order = np.asarray(self.selection.hidden_order, dtype=np.int64)
        tensors: dict[str, NDArray[Any]] = {"hidden_order": order} if order.size else {}
        for width, linear in self.maps.items():
            # safetensors writes memory in its order, whatever the strides are
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


def _read_nested(folder: str | Path) -> Nested | None:
    path = Path(folder) / NESTED_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="np") as file:
            about = json.loads(file.metadata()["nested"])
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        order = tuple(tensors["hidden_order"].tolist()) if "hidden_order" in tensors else ()
        widths = tuple(map(Fraction, about["widths"]))
        return Nested(
            selection=Selection(select=about["select"], mlp=about["mlp"], hidden_order=order),
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
    """Return whether a size was trained inside exactly these weights."""
    return nested is not None and width in nested.widths and nested.weights == weights_digest(model)


def untrained(name: str, width: Fraction, nested: Nested | None) -> str:
    """Return the warning for a size that was not trained."""
    if nested is None:
        reason = "it was never nested"
    elif width in nested.widths:
        reason = "its weights have changed since it was nested"
    else:
        reason = f"it was trained at {', '.join(map(str, nested.widths))}"
    return f"{name} at width {width} is untrained ({reason}): its vectors are poor until it is trained"


def _default_selection(model: SentenceTransformer) -> Selection:
    return Selection(select=default_select(layout_of(transformer_of(model).model)))


def at_width(
    model: SentenceTransformer, width: Fraction, how: Selection, nested: Nested | None = None
) -> SentenceTransformer:
    """Return the model at one of its widths as a separate model; pass `nested` if this size was trained."""
    if width == 1:
        return model
    backbone = transformer_of(model).model
    small = cut(model, narrow_cut(layout_of(backbone), backbone.config, width, how))
    if nested is None or width not in nested.maps:
        return small
    linear = nested.maps[width]
    return with_linear_head(small, linear.weight, linear.bias, normalise=nested.normalise)

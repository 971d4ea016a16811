"""What a nested model's folder keeps of its sizes, so that any of them can be taken out of it later.

One small file beside the wide model: how positions are selected, which widths were trained, and each one's linear map
into the shared vector space. It names the weights it belongs to; where they were changed since, it counts for nothing
but the selection.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
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
from trundle.model.surgery import Cut, Indices, cut, narrow_modules, transformer_of

Select = Literal["consecutive", "uniform", "rotary", "importance"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How sizes are taken out of a model."""

    select: Select
    mlp: bool = False
    """Whether the MLPs get narrower, too."""
    hidden_order: Indices = ()
    """With `importance`: the dimensions of the hidden width, the most important one first."""


def default_select(layout: Layout) -> Select:
    """What keeps most of a family's habits: whole rotary pairs where it has them."""
    return "rotary" if layout.family.rotary else "consecutive"


def _first(size: int, count: int) -> Indices:
    """The first positions."""
    del size
    return tuple(range(count))


def _spaced(size: int, count: int) -> Indices:
    """Evenly spaced positions."""
    return tuple(number * size // count for number in range(count))


def _spaced_pairs(size: int, count: int, rotated: int) -> Indices:
    """Evenly spaced pairs (i, i + half) of the part of a head that is turned, then spaced ones of the part that is not."""
    turned = rotated * count // size
    pairs = _spaced(rotated // 2, turned // 2)
    still = _spaced(size - rotated, count - turned)
    return (*pairs, *(rotated // 2 + pair for pair in pairs), *(rotated + place for place in still))


def narrow_cut(layout: Layout, config: Any, share: Fraction, how: Selection) -> Cut:
    """The cut that leaves this share of the width, or why it can't be had."""
    sizes = layout.sizes
    hidden, head = _part_of(layout, "hidden", share), _part_of(layout, "head", share)
    neurons = _part_of(layout, "mlp", share) if how.mlp else sizes["mlp"]
    if layout.family.rotary and head % 2:
        raise ImpossibleCut(
            f"{share} of a head's {sizes['head']} dimensions is {head}, too few or odd for rotary positions, which turn "
            "pairs; give a larger width"
        )
    spread = _spaced if how.select == "uniform" else _first
    best = tuple(sorted(how.hidden_order[:hidden]))
    kept_hidden = best or spread(sizes["hidden"], hidden)
    kept = _head_positions(layout, config, head, how.select)
    mlp = None if not how.mlp else (spread(sizes["mlp"], neurons),) * layout.layers
    return Cut(hidden=kept_hidden, head=kept, mlp=mlp)


def _head_positions(layout: Layout, config: Any, count: int, select: Select) -> Indices:
    """The dimensions kept inside every head."""
    size = layout.sizes["head"]
    if select == "rotary" or (select == "importance" and layout.family.rotary):
        return _spaced_pairs(size, count, _rotated_dimensions(config, size))
    return _spaced(size, count) if select == "uniform" else _first(size, count)


def _rotated_dimensions(config: Any, head: int) -> int:
    """How many dimensions of a head rotary positions turn: all, unless the config says a part of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(head * rope.get("partial_rotary_factor", 1.0))


def _part_of(layout: Layout, axis: str, share: Fraction) -> int:
    """The share of an axis in whole positions."""
    size = layout.sizes[axis]
    if not 0 < share <= 1:
        raise ImpossibleCut(
            f"a width is a share of the model's, above 0 and up to 1, such as 1/2, not {share}"
        )
    if (size * share).denominator > 1:
        names = {"hidden": "hidden width", "head": "head width", "mlp": "MLP width"}
        raise ImpossibleCut(
            f"{share} of the {names[axis]} {size} is no whole number; give widths that divide it, such as "
            f"{Fraction(max(1, round(size * share)), size)}"
        )
    return int(size * share)


def by_priority(size: int, selections: Sequence[Indices]) -> Indices:
    """All positions, those that the narrowest selection looks at first: where the most important things should lie."""
    narrowest_first = sorted(selections, key=len)
    ordered = dict.fromkeys(place for kept in narrowest_first for place in kept)
    return (*ordered, *(place for place in range(size) if place not in ordered))


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


def _read_nested(folder: str | Path) -> Nested | None:
    """The sizes inside a folder's model, or None where it was never nested."""
    path = Path(folder) / NESTED_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="np") as file:
            about = json.loads(file.metadata()["nested"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
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


def _selection_for(
    nested: Nested | None, model: SentenceTransformer, *, mlp: bool | None = None
) -> Selection:
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

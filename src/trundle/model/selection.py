"""Which dimensions a narrower model keeps of a wider one: positions by rule, as pure arithmetic.

Rotary positions turn dimension i of a head together with i + D/2, at a speed that depends on D. `rotary` therefore keeps
whole pairs, evenly spaced: where the share is one of a whole number (1/2, 1/4), pair i of the narrow head is pair 2i (4i)
of the wide one and turns at exactly its speed. `consecutive` takes the first ones, which pairs dimensions anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from trundle.errors import ImpossibleCut
from trundle.model.layout import Layout
from trundle.model.surgery import Cut, Indices

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


def first(size: int, count: int) -> Indices:
    """The first positions."""
    del size
    return tuple(range(count))


def spaced(size: int, count: int) -> Indices:
    """Evenly spaced positions."""
    return tuple(number * size // count for number in range(count))


def spaced_pairs(size: int, count: int, rotated: int) -> Indices:
    """Evenly spaced pairs (i, i + half) of the part of a head that is turned, then spaced ones of the part that is not."""
    turned = rotated * count // size
    pairs = spaced(rotated // 2, turned // 2)
    still = spaced(size - rotated, count - turned)
    return (*pairs, *(rotated // 2 + pair for pair in pairs), *(rotated + place for place in still))


def narrow_cut(layout: Layout, config: Any, share: Fraction, how: Selection) -> Cut:
    """The cut that leaves this share of the width, or why it can't be had."""
    sizes = layout.sizes
    hidden, head = part_of(layout, "hidden", share), part_of(layout, "head", share)
    neurons = part_of(layout, "mlp", share) if how.mlp else sizes["mlp"]
    if layout.family.rotary and head % 2:
        raise ImpossibleCut(
            f"{share} of a head's {sizes['head']} dimensions is {head}, too few or odd for rotary positions, which turn "
            "pairs; give a larger width"
        )
    spread = spaced if how.select == "uniform" else first
    best = tuple(sorted(how.hidden_order[:hidden]))
    kept_hidden = best or spread(sizes["hidden"], hidden)
    kept = head_positions(layout, config, head, how.select)
    mlp = None if not how.mlp else (spread(sizes["mlp"], neurons),) * layout.layers
    return Cut(hidden=kept_hidden, head=kept, mlp=mlp)


def head_positions(layout: Layout, config: Any, count: int, select: Select) -> Indices:
    """The dimensions kept inside every head."""
    size = layout.sizes["head"]
    if select == "rotary" or (select == "importance" and layout.family.rotary):
        return spaced_pairs(size, count, rotated_dimensions(config, size))
    return spaced(size, count) if select == "uniform" else first(size, count)


def rotated_dimensions(config: Any, head: int) -> int:
    """How many dimensions of a head rotary positions turn: all, unless the config says a part of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(head * rope.get("partial_rotary_factor", 1.0))


def part_of(layout: Layout, axis: str, share: Fraction) -> int:
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

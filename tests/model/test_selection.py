"""Which positions sizes keep, and which rotary frequencies, against transformers' own tables."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel

import pico
from trundle.errors import ImpossibleCut
from trundle.methods.width.importance import _by_priority
from trundle.model.anatomy import _family_of
from trundle.model.layout import layout_of
from trundle.model.nested import Selection, _spaced, _spaced_pairs, default_select, narrow_cut
from trundle.model.surgery import _cut_backbone

ROTARY = [family for family, (kind, _) in pico.CONFIGS.items() if _family_of(kind).rotary]


def speeds(backbone: Any) -> list[torch.Tensor]:
    return [
        buffer
        for name, buffer in backbone.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    ]


@pytest.mark.parametrize("family", ROTARY)
def test_rotary_selection_keeps_the_frequency_of_each_pair(family: str) -> None:
    wide = pico.backbone(family)
    layout = layout_of(wide)
    half = layout.sizes["head"] // 2
    what = narrow_cut(layout, wide.config, Fraction(1, 2), Selection(select="rotary"))
    assert what.head is not None
    first, second = what.head[: half // 2], what.head[half // 2 :]
    assert [place + half for place in first] == list(second)
    for before, after in zip(speeds(wide), speeds(_cut_backbone(wide, what)), strict=True):
        torch.testing.assert_close(after, before[list(first)])


def test_consecutive_selection_does_not() -> None:
    wide = pico.backbone("llama")
    what = narrow_cut(layout_of(wide), wide.config, Fraction(1, 2), Selection(select="consecutive"))
    assert not torch.allclose(
        speeds(_cut_backbone(wide, what))[0], speeds(wide)[0][: len(what.head or ()) // 2]
    )


def test_only_the_rotary_part_of_a_head_is_kept_in_pairs() -> None:
    assert _spaced_pairs(16, 8, 8) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert _spaced_pairs(16, 4, 16) == (0, 4, 8, 12)
    assert _spaced_pairs(12, 6, 8) == (0, 2, 4, 6, 8, 10)


@given(size=st.integers(1, 200), data=st.data())
def test_spaced_positions_are_different_and_inside(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size))
    kept = _spaced(size, count)
    assert len(set(kept)) == count
    assert list(kept) == sorted(kept)
    assert 0 <= kept[0] <= kept[-1] < size


@given(size=st.integers(1, 60), data=st.data())
def test_by_priority_is_an_order_that_begins_with_the_narrowest(size: int, data: st.DataObject) -> None:
    narrow = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
    more = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
    wide = tuple(dict.fromkeys([*narrow, *more]))
    found = _by_priority(size, [wide, tuple(narrow)])
    assert sorted(found) == list(range(size))
    assert found[: len(narrow)] == tuple(narrow)
    assert set(found[: len(wide)]) == set(wide)


@pytest.mark.parametrize(
    ("family", "share", "how", "says"),
    [
        ("bert", "1/3", Selection(select="consecutive"), "hidden width 32 is not a whole number"),
        ("bert", "1/16", Selection(select="consecutive"), "head width 8 is not a whole number"),
        ("bert", "1/32", Selection(select="consecutive", mlp=True), "not a whole number"),
        ("llama", "1/8", Selection(select="rotary"), "odd for rotary positions"),
        ("bert", "0", Selection(select="consecutive"), "above 0"),
        ("bert", "3/2", Selection(select="consecutive"), "above 0"),
    ],
)
def test_impossible_widths(family: str, share: str, how: Selection, says: str) -> None:
    backbone = pico.backbone(family)
    with pytest.raises(ImpossibleCut, match=says):
        narrow_cut(layout_of(backbone), backbone.config, Fraction(share), how)


def test_the_paper_s_sizes_come_from_its_shares() -> None:
    """Qwen1.5-0.5B's shapes: 464.0M, then 206.8M / 97.1M, with the MLP scaled 154.9M / 58.2M."""
    config = AutoConfig.for_model(
        "qwen2", hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=151_936,
    )  # fmt: skip
    with torch.device("meta"):
        backbone = AutoModel.from_config(config)
    layout = layout_of(backbone)
    assert default_select(layout) == "rotary"

    def millions(share: str, *, mlp: bool) -> float:
        what = narrow_cut(layout, config, Fraction(share), Selection(select="rotary", mlp=mlp))
        after = what.apply_to(layout)
        return round(sum(after.numel(parameter) for parameter in after.parameters) / 1e6, 1)

    assert [millions("1/2", mlp=False), millions("1/4", mlp=False)] == [206.8, 97.1]
    assert [millions("1/2", mlp=True), millions("1/4", mlp=True)] == [154.9, 58.2]

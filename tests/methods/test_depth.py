"""Which layers depth keeps, and its errors for impossible options."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import pico
from trundle.data.corpus import Corpus, read_corpus
from trundle.data.examples import Example
from trundle.data.texts import Text
from trundle.errors import BadInput, BadRecipe, ImpossibleCut
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import prepared
from trundle.methods.depth import _DepthPlan, _layers_left
from trundle.methods.depth.curve import measure_curve
from trundle.methods.depth.depth import _spread
from trundle.model.surgery import Cut, cut
from trundle.recipe import make_options

DEPTH = METHODS["depth"]
EXAMPLES = [
    Example(query=f"{text} {number}", positive=f"{number} {text}")
    for number in range(12)
    for text in pico.TEXTS
]
CORPUS = Corpus(
    train=lambda: iter(()),
    validation=lambda: iter(()),
    held_out=lambda: iter(()),
    examples=lambda: iter(EXAMPLES),
    facts=lambda: (),
)


def planned(model: SentenceTransformer, corpus: Corpus | None = None, **options: Any) -> _DepthPlan:
    plan = DEPTH.plan(model, make_options(DEPTH, options), Context(original=model, corpus=corpus, seed=1))
    assert isinstance(plan, _DepthPlan)
    return plan


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"keep": 3}, (0, 2, 3)),
        ({"drop": "50%"}, (0, 3)),
        ({"keep": 3, "order": "first"}, (0, 1, 2)),
        ({"drop": "50%", "order": "first"}, (0, 1)),
        ({"drop": "1/4", "order": "spread"}, (0, 2, 3)),
        ({"keep": 2, "order": "spread"}, (0, 3)),
        ({"keep": 1, "order": "spread"}, (0,)),
        ({"blocks": "0,2,3"}, (0, 2, 3)),
        ({"blocks": " 0, 3"}, (0, 3)),
        ({"blocks": [1, 2]}, (1, 2)),
        ({"blocks": "0,1,2,3"}, (0, 1, 2, 3)),
    ],
)
def test_the_layers_that_stay(
    options: dict[str, Any], blocks: tuple[int, ...], pico_model: Callable[[str], SentenceTransformer]
) -> None:
    assert planned(pico_model("bert"), **options).blocks == blocks


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_decoder_keeps_its_first_layers(
    family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    assert planned(pico_model(family), keep=2).blocks == (0, 1)
    assert planned(pico_model(family), keep=2, order="spread").blocks == (0, 3)


@given(layers=st.integers(1, 60), data=st.data())
def test_spread_layers_are_even(layers: int, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, layers))
    kept = _spread(keep, layers)
    assert len(kept) == keep
    assert list(kept) == sorted(set(kept))
    assert kept[0] == 0
    assert keep == 1 or kept[-1] == layers - 1
    gaps = np.diff(kept)
    assert keep < 2 or gaps.max() - gaps.min() <= 1


@given(layers=st.integers(1, 200), percent=st.integers(0, 99))
def test_a_share_is_exact(layers: int, percent: int) -> None:
    assert _layers_left(layers, Fraction(percent, 100)) == layers * (100 - percent) // 100


def test_the_share_that_floating_point_gets_wrong() -> None:
    assert int(10 * (1 - 0.9)) == 0
    assert _layers_left(10, Fraction("0.9")) == 1


@pytest.mark.parametrize("pick", ["small", "large"])
@pytest.mark.parametrize("family", ["bert", "qwen2"])
def test_pick_follows_the_curve(
    pick: str, family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    model = pico_model(family)
    plan, curve = planned(model, CORPUS, pick=pick), measure_curve(model, EXAMPLES, seed=1)
    assert len(plan.blocks) == (curve.small if pick == "small" else curve.large)
    assert plan.blocks == tuple(range(len(plan.blocks)))
    assert plan.losses == curve.losses
    assert _DepthPlan.model_validate_json(plan.model_dump_json()) == plan


def test_pick_measures_the_model_that_contrast_will_train(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    model = pico_model("qwen2")
    training = ContrastOptions(query_prompt="Find the answer:\n", pool_prompts=False, max_length=12)
    context = Context(original=model, corpus=CORPUS, seed=1, later=(training,))
    plan = DEPTH.plan(model, make_options(DEPTH, {"pick": "small", "scale": 50}), context)
    expected = measure_curve(prepared(model, training), EXAMPLES, scale=50, max_length=12, seed=1)
    assert plan.losses == expected.losses
    assert plan.losses != measure_curve(model, EXAMPLES, scale=50, seed=1).losses


def test_large_that_cuts_nothing_says_so() -> None:
    whole = _DepthPlan(blocks=(0, 1, 2), of=3, pick="large", losses=(2.0, 1.5, 1.25))
    assert str(whole) == "large is the full model (loss 1.250, full model 1.250): nothing to cut"
    small = _DepthPlan(blocks=(0,), of=3, pick="small", losses=(2.0, 1.5, 1.25))
    assert str(small) == "small (loss 2.000, full model 1.250): keep 1 of 3 layers: 0"
    assert str(_DepthPlan(blocks=(0, 1, 2), of=3)) == "keep all 3 layers: nothing to cut"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pick": "small", "keep": 2}, "keep and pick exclude each other"),
        ({"blocks": "0,1", "drop": "50%"}, "drop and blocks exclude each other"),
        ({"pick": "small", "order": "spread"}, "leave it out with pick"),
        ({"blocks": "0,1", "order": "first"}, "leave it out with blocks"),
        ({"blocks": "0,4"}, "layers 0 to 3"),
        ({"blocks": "1,0"}, "ascending order"),
        ({"blocks": "0,0"}, "ascending order"),
        ({"blocks": "-1,0"}, "layers 0 to 3"),
        ({"blocks": []}, "at least 1"),
    ],
)
def test_contradicting_options(
    options: dict[str, Any], says: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    with pytest.raises(ImpossibleCut, match=says):
        planned(pico_model("bert"), CORPUS, **options)


@pytest.mark.parametrize(
    "options", [{"blocks": "0,x"}, {"blocks": ""}, {"pick": "tiny"}, {"order": "last"}, {"keep": "3"}]
)
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe, match=r"^depth\."):
        make_options(DEPTH, options)


def test_a_special_first_layer_must_stay(pico_model: Callable[[str], SentenceTransformer]) -> None:
    with pytest.raises(ImpossibleCut, match="keep layer 0"):
        planned(pico_model("modernbert"), blocks="1,2")


def test_pick_needs_labelled_tuples(pico_model: Callable[[str], SentenceTransformer], tmp_path: Path) -> None:
    model = pico_model("bert")
    with pytest.raises(BadInput, match="pass them with --data"):
        planned(model, pick="small")
    (tmp_path / "plain.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    with pytest.raises(BadInput, match="no column known as the query"):
        planned(model, read_corpus([str(tmp_path / "plain.txt")], seed=0), pick="small")
    (tmp_path / "queries.jsonl").write_text(json.dumps({"query": "no answer to this"}), encoding="utf-8")
    with pytest.raises(BadInput, match="no column known as the positive"):
        planned(model, read_corpus([str(tmp_path / "queries.jsonl")], seed=0), pick="small")


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    model = pico.model("bert", str(tmp_path), num_hidden_layers=1)
    with pytest.raises(ImpossibleCut, match="no lower half"):
        planned(model, CORPUS, pick="small")
    assert "nothing to cut" in str(planned(model, CORPUS, pick="large"))
    assert planned(model, keep=1).blocks == (0,)


def test_a_cut_is_healed_if_there_are_texts(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model, texts = pico_model("bert"), [Text(text=text, kind=None) for text in pico.different_texts(60)]
    corpus = replace(CORPUS, train=lambda: iter(texts))
    context = Context(original=model, corpus=corpus)
    plan = planned(model, corpus, keep=2)
    small, unhealed = DEPTH.apply(model, plan, context), cut(model, Cut(blocks=plan.blocks))
    assert small.facts["healed_on"] == 60
    assert small.facts["error_healed"] < small.facts["error_unhealed"]
    same = [
        DEPTH.apply(model, planned(model, corpus, keep=2, heal="none"), context),
        DEPTH.apply(model, plan, replace(context, dry_run=True)),
        DEPTH.apply(model, planned(model, keep=2), Context(original=model)),
        DEPTH.apply(model, plan, replace(context, corpus=replace(corpus, train=lambda: iter(texts[:1])))),
    ]
    for other in same:
        np.testing.assert_array_equal(other.model.encode(pico.TEXTS), unhealed.encode(pico.TEXTS))
        assert not other.facts
    asked = planned(model, corpus, keep=2, heal="closed-form")
    with pytest.raises(BadInput, match="too few to heal"):
        DEPTH.apply(model, asked, replace(context, corpus=replace(corpus, train=lambda: iter(texts[:1]))))
    with pytest.raises(BadInput, match="healed on texts; pass them with --data"):
        planned(model, keep=2, heal="closed-form")

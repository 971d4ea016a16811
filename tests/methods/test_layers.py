"""The layer-loss curve against transformers' hidden states and sentence-transformers' pooling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import pico
from trundle.data.examples import Example
from trundle.errors import BadInput, BadModel
from trundle.methods.contract import Given
from trundle.methods.depth.curve import (
    _batch_losses,
    _draw_tuples,
    _pooled_by_layer,
    _tokens_of,
    measure_curve,
)
from trundle.methods.training import Prompts
from trundle.model.anatomy import _family_of
from trundle.model.encode import multiplies_bf16
from trundle.model.heads import without_head
from trundle.model.surgery import Cut, cut

FAMILIES = list(pico.CONFIGS)
PROMPT = "a small model:\n"
EXAMPLES = [
    Example(
        query=f"{text} {number}", positive=f"{number} {text}", negatives=(f"not {number}",) * (number % 3)
    )
    for number in range(12)
    for text in pico.TEXTS
]


@pytest.fixture(params=["left", "right"])
def padded(
    request: pytest.FixtureRequest, pico_model: Callable[[str], SentenceTransformer]
) -> Callable[[str], SentenceTransformer]:
    """A pico model that pads on one side and then on the other.

    Older versions of the library count left padding as places of a weighted mean, so there the reference is a
    mean.
    """

    def model(family: str) -> SentenceTransformer:
        mine = copy.deepcopy(pico_model(family))
        mine.tokenizer.padding_side = request.param
        if request.param == "left":
            mine[1] = Pooling(32, pooling_mode="mean")
        return mine

    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_what_a_model_cut_there_gives(
    family: str, padded: Callable[[str], SentenceTransformer]
) -> None:
    model = padded(family)
    ours = _pooled_by_layer(model, pico.TEXTS)
    assert len(ours) == pico.LAYERS
    for layers in range(1, pico.LAYERS + 1):
        small = without_head(cut(model, Cut(blocks=tuple(range(layers)))))
        expected = small.encode(pico.TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(ours[layers - 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_a_hidden_state_under_the_final_norm(
    family: str, padded: Callable[[str], SentenceTransformer]
) -> None:
    """hidden_states[-1] has its norm already in the families that have one; the others must get it."""
    model = padded(family)
    features = _tokens_of(model, pico.TEXTS)
    backbone: Any = model[0].model
    inputs = {name: value for name, value in features.items() if torch.is_tensor(value)}
    with torch.no_grad():
        states = list(backbone(**inputs, output_hidden_states=True).hidden_states[1:])
        norm = _family_of(backbone.config.model_type).final_norm
        if norm is not None:
            states[:-1] = map(backbone.get_submodule(norm), states[:-1])
        for state, ours in zip(states, _pooled_by_layer(model, pico.TEXTS), strict=True):
            expected = model[1](features | {"token_embeddings": state})["sentence_embedding"]
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "weightedmean", "lasttoken", "max"])
@pytest.mark.parametrize("pools_prompt", [True, False])
def test_prompts_are_pooled_as_the_model_pools_them(
    mode: Any, pools_prompt: bool, padded: Callable[[str], SentenceTransformer]
) -> None:
    model = padded("llama")
    model[1] = Pooling(32, pooling_mode=mode, include_prompt=pools_prompt)
    theirs = without_head(model).encode(pico.TEXTS, prompt=PROMPT, convert_to_tensor=True)
    torch.testing.assert_close(_pooled_by_layer(model, pico.TEXTS, PROMPT)[-1], theirs, atol=1e-5, rtol=1e-5)


def test_a_first_token_is_pooled_though_it_stands_before_the_prompt(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    model = copy.deepcopy(pico_model("bert"))
    model[1] = Pooling(32, pooling_mode="cls")
    theirs = without_head(model).encode(pico.TEXTS, prompt=PROMPT, convert_to_tensor=True)
    torch.testing.assert_close(_pooled_by_layer(model, pico.TEXTS, PROMPT)[-1], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_the_curve_in_half_precision(family: str, tmp_path: Path) -> None:
    """Norms run in the model's dtype as in the cut model; sums, cosines and the mean are in float32."""
    model = pico.model(family, str(tmp_path), num_hidden_layers=2)
    few = EXAMPLES[:21]
    full, half = measure_curve(model, few), measure_curve(model.bfloat16(), few)
    assert _pooled_by_layer(model, pico.TEXTS).dtype == torch.float32
    np.testing.assert_allclose(half.losses, full.losses, rtol=0.03)


def test_the_curve_is_the_mean_over_batches(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    curve = measure_curve(model, EXAMPLES, seed=2)
    drawn = _draw_tuples(EXAMPLES, 1280, seed=2)
    bf16 = multiplies_bf16(model.device)
    prompts = dict.fromkeys((example.source for example in EXAMPLES), Prompts())
    halves = [_batch_losses(model, half, prompts, bf16=bf16) for half in (drawn[:42], drawn[42:])]
    expected = (halves[0] + halves[1]) / 2
    assert len(drawn) == len(EXAMPLES) == 84
    np.testing.assert_allclose(curve.losses, expected.tolist(), rtol=1e-5)
    assert curve.layers == pico.LAYERS
    assert measure_curve(model, EXAMPLES, seed=2) == curve
    assert measure_curve(model, EXAMPLES, seed=3) != curve
    assert measure_curve(model, EXAMPLES, tuples=20).tuples == 20


def test_prompts_by_file_replace_the_models_own(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = copy.deepcopy(pico_model("qwen2"))
    named = [replace(example, source=f"{number % 2}.jsonl") for number, example in enumerate(EXAMPLES)]
    both: Given = {"query": PROMPT, "document": "text:\n"}
    curve = measure_curve(model, named, prompts={"0": both, "1": both}, scale=50)
    one = measure_curve(model, named, prompts={"0": both}, scale=50)
    model.prompts = dict(both)
    own = measure_curve(model, named, scale=50)
    np.testing.assert_allclose(curve.losses, own.losses, rtol=1e-5)
    assert np.abs(np.subtract(one.losses, own.losses)).max() > 1e-4


def test_tuples_of_one_source_stay_together_and_duplicates_are_removed() -> None:
    some = [Example(query=f"{number % 15}", positive="p", source="ab"[number % 2]) for number in range(60)]
    drawn = _draw_tuples(some, 1280, seed=0)
    assert sorted(example.query for example in drawn) == sorted(str(number) for number in range(15))
    sources = [example.source for example in drawn]
    assert sources == sorted(sources)


def test_the_model_is_not_changed(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = copy.deepcopy(pico_model("gpt2")).train()
    model[0].model.h[1].eval()
    before = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]  # transformers may have left its own
    with pytest.raises(BadInput, match="nothing to pool"):
        _pooled_by_layer(model, ["good", " "], PROMPT * 20)
    _pooled_by_layer(model, ["good"])
    assert [module.training for module in model.modules()] == before
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([], "there are none"),
        (EXAMPLES[:1], "there is only 1"),
        (EXAMPLES[:1] * 5, "there is only 1"),
        ([*EXAMPLES, Example(query="[SEP]", positive="p")], "has nothing to pool"),
    ],
)
def test_inputs_without_a_curve_are_rejected(
    examples: list[Example], says: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    with pytest.raises(BadInput, match=says):
        measure_curve(pico_model("bert"), examples)


def test_a_text_that_is_only_a_prompt_is_named(pico_model: Callable[[str], SentenceTransformer]) -> None:
    """The prompt fills all 48 tokens the model reads, so nothing of the text is left."""
    model = copy.deepcopy(pico_model("llama"))
    model.prompts = {"query": PROMPT * 20}
    with pytest.raises(BadInput, match="shorten the prompt"):
        measure_curve(model, EXAMPLES)


def test_a_long_text_is_truncated_as_in_the_library(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    long = ["fox " * 500, "dog"]
    expected = without_head(model).encode(long, convert_to_tensor=True)
    torch.testing.assert_close(_pooled_by_layer(model, long)[-1], expected, atol=1e-5, rtol=1e-5)


def test_damaged_weights_are_named(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = copy.deepcopy(pico_model("bert"))
    with torch.no_grad():
        model[0].model.encoder.layer[2].output.dense.bias.fill_(torch.nan)
    with pytest.raises(BadModel, match="the loss of layer 3 is NaN"):
        measure_curve(model, EXAMPLES)


def test_a_model_without_pooling_has_no_curve(pico_model: Callable[[str], SentenceTransformer]) -> None:
    bare = SentenceTransformer(modules=[pico_model("bert")[0]], device="cpu")
    with pytest.raises(BadModel, match="no pooling"):
        measure_curve(bare, EXAMPLES)


@pytest.mark.usefixtures("no_doubles")
def test_a_device_without_float64_works(pico_model: Callable[[str], SentenceTransformer]) -> None:
    assert measure_curve(pico_model("bert"), EXAMPLES).layers == pico.LAYERS

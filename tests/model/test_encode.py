"""The faster encoding gives the same vectors as the library's own encode."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router

import pico
from trundle.errors import BadInput
from trundle.model import encode, tokens
from trundle.model.anatomy import _BY_MODEL_TYPE
from trundle.model.encode import _encode_by_tokens, embedder, fast_forward
from trundle.model.load import load
from trundle.model.tokens import _by_length, find_short_cut

TEXTS = [" ".join(words) for words in itertools.permutations(pico.TEXTS, 2)] + [
    "one more text",
    "long " * 200,
]


def by_library(model: SentenceTransformer, texts: list[str], role: str = "text") -> np.ndarray:
    ways = {"text": model.encode, "query": model.encode_query, "document": model.encode_document}
    return ways[role](texts, convert_to_numpy=True, show_progress_bar=False)


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_every_family_is_encoded_as_the_library_does(family, pico_model):
    model = pico_model(family)
    np.testing.assert_allclose(embedder(model).text(TEXTS), by_library(model, TEXTS), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "qwen2"])
@pytest.mark.parametrize("role", ["text", "query", "document"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_are_the_models_own(family, role, include_prompt, pico_model):
    model = copy.deepcopy(pico_model(family))
    model.prompts = {"query": "what is asked: ", "passage": "said: ", "other": "so: "}
    model.default_prompt_name = "other"
    model[1].include_prompt = include_prompt
    found = getattr(embedder(model), role)(TEXTS)
    np.testing.assert_allclose(found, by_library(model, TEXTS, role), atol=1e-5)
    assert np.abs(found - by_library(pico_model(family), TEXTS)).max() > 1e-3


def test_truncated_vectors_and_routers_use_the_librarys_encode(pico_model):
    model = copy.deepcopy(pico_model("bert"))
    model.truncate_dim = 8
    np.testing.assert_allclose(embedder(model).text(TEXTS), by_library(model, TEXTS), atol=1e-5)
    one, other = copy.deepcopy(pico_model("bert")), copy.deepcopy(pico_model("mpnet"))
    routed = SentenceTransformer(
        modules=[Router.for_query_document(query_modules=list(one), document_modules=list(other))],
        device="cpu",
    )
    found = embedder(routed)
    np.testing.assert_allclose(found.query(TEXTS), by_library(one, TEXTS), atol=1e-5)
    np.testing.assert_allclose(found.document(TEXTS), by_library(other, TEXTS), atol=1e-5)


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """What runs on a GPU, in small batches; the model stays where it is."""
    monkeypatch.setattr(encode, "_on_gpu", lambda _: True)
    monkeypatch.setattr(encode, "_TOKENS_PER_BATCH", 300)
    monkeypatch.setattr(tokens, "_FIRST_SLICE", 4)
    monkeypatch.setattr(tokens, "_SLICE", 16)


@pytest.mark.usefixtures("as_if_on_gpu")
@pytest.mark.parametrize("family", pico.CONFIGS)
def test_batches_of_tokens_give_the_same_vectors(family, pico_model):
    model = pico_model(family)
    found = embedder(model)
    assert found.texts_per_call == 1 << 16
    np.testing.assert_allclose(found.text(TEXTS), by_library(model, TEXTS), atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())
    two_steps = found.two_steps()
    vectors = two_steps.encode(two_steps.tokenise(TEXTS, ["text"] * len(TEXTS)))
    np.testing.assert_allclose(vectors, by_library(model, TEXTS), atol=1e-5)


@pytest.mark.usefixtures("as_if_on_gpu")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "mistral"])
def test_batches_of_tokens_may_be_padded_on_the_left(family, pico_model):
    model = copy.deepcopy(pico_model(family))
    model.tokenizer.padding_side = "left"
    model.prompts = {"query": "what is asked: "}
    np.testing.assert_allclose(embedder(model).query(TEXTS), by_library(model, TEXTS, "query"), atol=1e-5)


@pytest.mark.usefixtures("as_if_on_gpu")
@pytest.mark.parametrize("family", pico.CONFIGS)
def test_a_copy_in_half_precision_gives_nearly_the_same_vectors(family, pico_model):
    model = pico_model(family)
    found, expected = embedder(model, half_on_gpu=True).text(TEXTS), by_library(model, TEXTS)
    assert (found * expected).sum(axis=1).min() > 0.9999
    assert 0 < np.abs(found - expected).max() < 2e-3
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.usefixtures("as_if_on_gpu")
def test_a_copy_is_made_once_and_goes_with_its_embedder(monkeypatch, pico_model):
    made, half_copy = [], encode._half_copy

    def watched(model):
        twin = half_copy(model)
        assert twin.tokenizer is model.tokenizer
        made.append(weakref.ref(twin))
        return twin

    monkeypatch.setattr(encode, "_half_copy", watched)
    found = embedder(pico_model("bert"), half_on_gpu=True)
    found.text(TEXTS)
    found.query(TEXTS)
    assert len(made) == 1
    assert made[0]() is not None
    del found
    gc.collect()
    assert made[0]() is None


@pytest.mark.usefixtures("as_if_on_gpu")
def test_progress_is_told_after_every_batch(pico_model):
    model, told = pico_model("bert"), []
    short_cut = find_short_cut(model)
    slices = [_by_length(short_cut.flat(TEXTS))]
    _encode_by_tokens(model, short_cut, slices, len(TEXTS), told.append)
    assert sum(told) == len(TEXTS)
    assert len(told) > 4


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_every_family_uses_the_fused_attention_kernel(family, pico_folders):
    """A family that fails here is computed slowly: see `fast_forward`.

    DeBERTa's scores depend on queries, keys and distances together, which no kernel of torch computes.
    """
    config = load(pico_folders(family), device="cpu")[0].model.config
    row = _BY_MODEL_TYPE[config.model_type]
    assert config._attn_implementation == (
        "eager" if row.unfused_attention or family == "deberta" else "sdpa"
    )


@pytest.mark.parametrize("ends", [(64, 64, 64), (64, 9, 30)], ids=["full", "padded"])
def test_fused_attention_has_the_librarys_outputs_and_gradients(ends, monkeypatch):
    model = pico.backbone("mpnet", max_position_embeddings=66, attention_probs_dropout_prob=0.0).eval()
    ids = torch.randint(5, 100, (3, 64), generator=torch.manual_seed(0))
    mask = (torch.arange(64)[None, :] < torch.tensor(ends)[:, None]).long()
    ids[mask == 0] = 1
    weight, calls = torch.randn(3, 64, 32), []
    attend = encode.scaled_dot_product_attention

    def counted(*given, **more):
        calls.append(more["dropout_p"])
        assert more["attn_mask"].is_contiguous(), "the kernel on a GPU takes no other mask"
        return attend(*given, **more)

    monkeypatch.setattr(encode, "scaled_dot_product_attention", counted)

    def states_and_gradients():
        model.zero_grad()
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        (states * weight * mask[:, :, None]).sum().backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        return states.detach() * mask[:, :, None], {name: each.clone() for name, each in gradients.items()}

    expected, wanted = states_and_gradients()
    assert calls == []
    with fast_forward(model):
        with fast_forward(model):
            states, gradients = states_and_gradients()
        again, _ = states_and_gradients()
    assert calls == [0.0] * 2 * pico.LAYERS
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == wanted.keys()
    assert wanted["encoder.relative_attention_bias.weight"].abs().max() > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], atol=2e-4, rtol=1e-3, msg=name)
    assert torch.equal(states_and_gradients()[0], expected)
    assert len(calls) == 2 * pico.LAYERS


def short_of_memory(monkeypatch, model, most):
    """A device on which more than so many texts at once do not fit."""
    forward = type(model[0]).forward

    def limited(self, features, **more):
        if len(features["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, features, **more)

    monkeypatch.setattr(type(model[0]), "forward", limited)


@pytest.mark.usefixtures("as_if_on_gpu")
def test_batches_of_tokens_that_do_not_fit_into_memory_are_halved(monkeypatch, pico_model):
    model = pico_model("bert")
    expected = by_library(model, TEXTS)
    short_of_memory(monkeypatch, model, 3)
    np.testing.assert_allclose(embedder(model).text(TEXTS), expected, atol=1e-5)
    short_of_memory(monkeypatch, model, 0)
    with pytest.raises(BadInput, match="a text of 48 tokens needs more memory than the GPU has left"):
        embedder(model).text(TEXTS)


@pytest.mark.usefixtures("as_if_on_gpu")
def test_without_memory_for_a_copy_the_model_itself_is_used(monkeypatch, pico_model):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = pico_model("bert")
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "half", no_memory)
        found = embedder(model, half_on_gpu=True).text(TEXTS)
    np.testing.assert_allclose(found, by_library(model, TEXTS), atol=1e-5)


@pytest.mark.usefixtures("as_if_on_gpu")
@pytest.mark.parametrize("family", ["bert", "truncated"])
def test_values_too_large_for_half_precision_are_encoded_in_float32(family, monkeypatch, pico_model):
    """Half precision makes infinity of what is too large for it; here the third chunk is."""
    model = copy.deepcopy(pico_model("bert"))
    model.truncate_dim = 8 if family == "truncated" else None
    expected = by_library(model, TEXTS)
    forward, halves = type(model[0].model).forward, []

    def overflowing(self, *given, **more):
        halves.append(self.dtype == torch.float16)
        found = forward(self, *given, **more)
        if halves[-1] and halves.count(True) > 2:
            found.last_hidden_state[:] = torch.inf
        return found

    monkeypatch.setattr(encode, "_GPU_CHUNK", 10)
    monkeypatch.setattr(encode, "_CHUNK", 10)
    monkeypatch.setattr(type(model[0].model), "forward", overflowing)
    found = embedder(model, half_on_gpu=True).text(TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    np.testing.assert_allclose(found[20:], expected[20:], atol=1e-5)
    first = halves.index(False)
    assert first > 2
    assert not any(halves[first:])

"""The faster encoding gives the same vectors as the library's own encode."""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router

import pico
from trundle.errors import BadInput
from trundle.model import encode
from trundle.model.encode import _encode, embedder, make_tokeniser

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


def test_batches_of_a_gpus_size_give_the_same_vectors(monkeypatch, pico_model):
    model = pico_model("bert")
    tokenise = make_tokeniser(model)
    monkeypatch.setattr(encode, "_GPU_CHARACTERS", 500)
    large = _encode(model, tokenise, TEXTS, on_gpu=True, batch_size=2)
    np.testing.assert_allclose(large, by_library(model, TEXTS), atol=1e-5)


def short_of_memory(monkeypatch, model, most):
    """A device on which more than so many texts at once do not fit."""
    forward = type(model[0]).forward

    def limited(self, features, **more):
        if len(features["input_ids"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, features, **more)

    monkeypatch.setattr(type(model[0]), "forward", limited)


def test_batches_that_do_not_fit_into_memory_are_halved(monkeypatch, pico_model):
    model = pico_model("bert")
    expected = by_library(model, TEXTS)
    short_of_memory(monkeypatch, model, 3)
    np.testing.assert_allclose(embedder(model).text(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "truncated"])
def test_values_too_large_for_half_precision_are_encoded_in_float32(family, monkeypatch, pico_model):
    """On a GPU, which is acted here: half precision makes infinity of what is too large for it."""
    model = copy.deepcopy(pico_model("bert"))
    model.truncate_dim = 8 if family == "truncated" else None
    expected = by_library(model, TEXTS)
    forward, halves, in_half = type(model[0]).forward, [], False

    @contextmanager
    def autocast(device, *, dtype, enabled):
        nonlocal in_half
        in_half = enabled
        yield
        in_half = False

    def overflowing(self, features, **more):
        halves.append(in_half)
        found = forward(self, features, **more)
        return found | {"token_embeddings": found["token_embeddings"] * (torch.inf if in_half else 1)}

    monkeypatch.setattr(encode, "_CHUNK", 10)
    monkeypatch.setattr(encode, "_on_gpu", lambda _: True)
    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(type(model[0]), "forward", overflowing)
    found = embedder(model, half_on_gpu=True)
    np.testing.assert_allclose(found.text(TEXTS), expected, atol=1e-5)
    first = halves.index(False)
    assert first > 0
    assert not any(halves[first:])


def test_a_single_text_that_does_not_fit_is_an_error(monkeypatch, pico_model):
    model = pico_model("bert")
    short_of_memory(monkeypatch, model, 0)
    with pytest.raises(BadInput, match="a text of 1,000 characters needs more memory than the GPU has left"):
        embedder(model).text(TEXTS)

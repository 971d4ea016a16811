"""Decoders as embedders: pooling, end tokens, bidirectional attention, and no language-model head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import pico
from trundle.errors import BadModel
from trundle.model.heads import (
    _attends_both_ways,
    _ending_tokenizer,
    with_bidirectional_attention,
    with_pooling,
)
from trundle.model.load import load
from trundle.model.save import save
from trundle.model.surgery import transformer_of, with_modules
from trundle.records import Lineage

PicoModel = Callable[[str], SentenceTransformer]
END = 3


def language_model(family: str, folder: Path) -> Path:
    """What a user has: a causal LM with a head of its own."""
    model_type, settings = pico.CONFIGS[family]
    size = {"vocab_size": len(pico.tokenizer_for(family)), "tie_word_embeddings": False}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(settings | size)))
    model.save_pretrained(folder)
    pico.tokenizer_for(family).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", sorted(pico.DECODERS))
@pytest.mark.parametrize("mode", ["lasttoken", "weightedmean"])
def test_a_language_model_becomes_an_embedder_without_its_head(family: str, mode: Any, tmp_path: Path):
    source = language_model(family, tmp_path / "lm")
    with safe_open(str(source / "model.safetensors"), "pt") as weights:
        assert any("lm_head" in name for name in weights.keys())  # noqa: SIM118
    model = load(source, pooling=mode)
    saved = save(model, tmp_path / "embedder", lineage=Lineage(source="lm"), card="")
    with safe_open(str(saved / "model.safetensors"), "pt") as weights:
        assert not any("lm_head" in name for name in weights.keys())  # noqa: SIM118
    plain = SentenceTransformer(str(saved), device="cpu")
    np.testing.assert_allclose(plain.encode(pico.TEXTS), model.encode(pico.TEXTS), atol=1e-6)
    ends = [ids[-1] for ids in plain.tokenizer(pico.TEXTS)["input_ids"]]
    assert all(end == END for end in ends) is (mode == "lasttoken")
    # alone or padded beside longer texts, a text has the same vector
    alone = np.concatenate([plain.encode([text]) for text in pico.TEXTS])
    np.testing.assert_allclose(alone, plain.encode(pico.TEXTS), atol=1e-5)


def test_the_end_token_stays_when_a_text_is_truncated(pico_model: PicoModel):
    model = with_pooling(pico_model("qwen2"), "last")
    model.max_seq_length = 6
    ids = model.preprocess([" ".join(pico.TEXTS)])["input_ids"][0].tolist()
    assert len(ids) == 6
    assert ids[-1] == END
    assert pico_model("qwen2").tokenizer("queries")["input_ids"][-1] != END, "the given model is as it was"


def test_a_tokenizer_that_ends_texts_already_is_left_alone(pico_model: PicoModel):
    tokenizer = pico_model("bert").tokenizer
    assert _ending_tokenizer(tokenizer) is tokenizer


def test_a_tokenizer_without_an_end_token_is_rejected(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(pico.save_backbone("llama", str(tmp_path)))
    tokenizer.eos_token = None
    with pytest.raises(BadModel, match="no end token for last-token pooling"):
        _ending_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("mode", "library"), [("mean", "mean"), ("cls", "cls"), ("max", "max"), ("last", "lasttoken")]
)
def test_pooling_is_changed_and_all_else_is_kept(pico_model: PicoModel, mode: Any, library: str):
    given = pico_model("bert")
    model = with_pooling(given, mode)
    assert [type(module) for module in model] == [type(module) for module in given]
    assert model[1].pooling_mode == library
    assert given[1].pooling_mode == "mean"
    assert model.prompts == given.prompts


def test_two_ways_of_pooling_stay_if_a_linear_layer_needs_them(pico_model: PicoModel):
    given = pico_model("bert")
    twice = [given[0], Pooling(32, ("mean", "max"))]
    assert with_pooling(with_modules(given, twice), "last").get_embedding_dimension() == 32
    with pytest.raises(BadModel, match="pooled in several ways"):
        with_pooling(with_modules(given, [*twice, Dense(64, 32)]), "last")


@pytest.mark.parametrize("family", sorted(pico.DECODERS))
def test_bidirectional_decoders_stay_so_after_a_plain_load(
    pico_model: PicoModel, family: str, tmp_path: Path
):
    given = pico_model(family)
    assert not _attends_both_ways(transformer_of(given).model)
    model = with_bidirectional_attention(given)
    assert not _attends_both_ways(transformer_of(given).model)
    saved = save(model, tmp_path / "saved", lineage=Lineage(source=family), card="")
    assert _attends_both_ways(AutoModel.from_pretrained(saved))
    plain = SentenceTransformer(str(saved), device="cpu")
    vectors = plain.encode(pico.TEXTS)
    np.testing.assert_allclose(vectors, model.encode(pico.TEXTS), atol=1e-6)
    assert np.abs(vectors - given.encode(pico.TEXTS)).max() > 1e-3
    alone = np.concatenate([plain.encode([text]) for text in pico.TEXTS])
    np.testing.assert_allclose(alone, vectors, atol=1e-5)


def test_bidirectional_attention_is_rejected_for_an_encoder(pico_model: PicoModel):
    with pytest.raises(BadModel, match="a BERT model has bidirectional attention already"):
        with_bidirectional_attention(pico_model("bert"))

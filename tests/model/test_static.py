"""Static models: token vectors of the model itself, weights by frequency, and linear maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

import pico
from trundle.errors import BadModel
from trundle.methods.depth.depth import _shares_by_rank
from trundle.model.cost import cost, predict
from trundle.model.heads import with_linear_head
from trundle.model.load import load
from trundle.model.save import model_digest
from trundle.model.static import (
    _SIF,
    _frequency_weights,
    _token_vectors,
    static_model,
    static_shape,
    static_table,
    token_counts,
)


def plain(model: SentenceTransformer) -> SentenceTransformer:
    """A static model in which all tokens weigh the same."""
    rows = static_shape(model)[0]
    return static_model(model, np.full(rows, 1 / rows))


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_a_token_has_the_vector_the_model_gives_it_alone(
    family: str, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    """For every token whose text is read as that token and nothing else."""
    model = pico_model(family)
    vectors = _token_vectors(model).numpy()
    tokenizer = model.tokenizer.backend_tokenizer
    texts, ids = [], []
    for token in range(4, tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text.strip() and tokenizer.encode(text, add_special_tokens=False).ids == [token]:
            texts.append(text)
            ids.append(token)
    assert len(ids) > 10
    before_normalising = SentenceTransformer(
        modules=[module for module in model if not isinstance(module, Normalize)], device="cpu"
    )
    np.testing.assert_allclose(vectors[ids], before_normalising.encode(texts), rtol=1e-4, atol=1e-5)


def test_a_text_is_the_mean_of_its_tokens(
    pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    model = pico_model("bert")
    shares = _shares_by_rank(static_shape(model)[0])
    static_model(model, shares).save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    vectors, weights = _token_vectors(model).numpy(), _frequency_weights(shares)
    vectors = (vectors - (shares * weights) @ vectors) * weights[:, None]
    np.testing.assert_allclose(shares @ vectors, 0, atol=1e-6)
    for text in pico.TEXTS:
        ids = model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        mean = vectors[ids].mean(axis=0)
        np.testing.assert_allclose(loaded.encode(text), mean / np.linalg.norm(mean), atol=1e-5)
    assert static_table(load(tmp_path)) is not None


def test_it_truncates_texts_where_the_model_did(pico_model: Callable[[str], SentenceTransformer]) -> None:
    model = pico_model("bert")
    expected = model.encode(["fox " * 500])
    read = plain(model).preprocess(["fox " * 500])["input_ids"]
    assert len(read) == model.max_seq_length - 2
    assert (model.encode(["fox " * 500]) == expected).all()


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=50).filter(any))
def test_frequent_tokens_weigh_less(counts: list[int]) -> None:
    shares = np.asarray(counts) / sum(counts)
    weights = _frequency_weights(shares)
    order = np.argsort(shares, kind="stable")
    assert (np.diff(weights[order]) <= 1e-9 * weights.max()).all()
    assert shares @ weights == pytest.approx(1)
    np.testing.assert_allclose(weights / weights.max(), (_SIF + shares.min()) / (_SIF + shares), rtol=1e-9)


def test_ranks_follow_zipf() -> None:
    shares = _shares_by_rank(1000)
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(shares[0] / shares, np.arange(2, 1002) / 2)


def test_tokens_are_counted_as_the_tokenizer_produces_them(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    model = pico_model("gpt2")
    expected: Counter[int] = Counter()
    for text in pico.TEXTS * 300:
        expected.update(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    counts = token_counts(model, iter(pico.TEXTS * 300))
    assert {token: count for token, count in enumerate(counts.tolist()) if count} == dict(expected)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_linear_map_goes_into_the_table(
    normalise: bool, pico_model: Callable[[str], SentenceTransformer]
) -> None:
    static = plain(pico_model("bert"))
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(20, 32)).astype(np.float32), rng.normal(size=20).astype(np.float32)
    dense = Dense(
        32,
        20,
        activation_function=torch.nn.Identity(),
        init_weight=torch.tensor(weight),
        init_bias=torch.tensor(bias),
    )
    after = [Normalize()] if normalise else []
    expected = SentenceTransformer(modules=[static[0], dense, *after], device="cpu").encode(pico.TEXTS)
    mapped = with_linear_head(static, weight, bias, normalise=normalise)
    assert len(mapped) == 1 + normalise
    np.testing.assert_allclose(mapped.encode(pico.TEXTS), expected, atol=1e-5)
    assert predict(static, dense=(32, 20)).as_json() == cost(mapped).as_json()


def test_a_nonlinear_layer_after_a_table_stays(pico_model: Callable[[str], SentenceTransformer]) -> None:
    bent = SentenceTransformer(modules=[plain(pico_model("bert"))[0], Dense(32, 12)], device="cpu")
    built = with_linear_head(bent, np.ones((30, 12), np.float32), np.ones(30, np.float32), normalise=True)
    assert [type(module).__name__ for module in built] == ["StaticEmbedding", "Dense", "Dense", "Normalize"]
    assert predict(bent, dense=(12, 30)).as_json() == cost(built).as_json()
    assert cost(built).parameters == sum(weight.numel() for weight in built.parameters())


def test_static_models_are_distinguished_by_their_tokenizers(
    pico_model: Callable[[str], SentenceTransformer],
) -> None:
    one, two = plain(pico_model("bert")), plain(pico_model("bert"))
    assert model_digest(one) == model_digest(two)
    vocabulary = two[0].tokenizer.get_vocab()
    two[0].tokenizer = type(two[0].tokenizer).from_str(
        two[0].tokenizer.to_str().replace('"fox"', '"xof"' if "fox" in vocabulary else '"f"')
    )
    assert model_digest(one) != model_digest(two)


def test_a_tokenizer_with_more_tokens_than_its_model(tmp_path: Path) -> None:
    model = pico.model("bert", str(tmp_path), vocab_size=20)
    with pytest.raises(BadModel, match="the model only 20"):
        static_shape(model)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    model = pico.model("bert", str(tmp_path))
    with torch.no_grad():
        model[0].model.embeddings.word_embeddings.weight[17].fill_(torch.nan)
    with pytest.raises(BadModel, match="token 17"):
        _token_vectors(model)

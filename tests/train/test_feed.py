from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import pico
from trundle.errors import BadInput, BadModel
from trundle.model.tokens import check_fast_tokenizer, make_tokeniser
from trundle.train.batches import _AHEAD, _Prefetcher

TEXTS = [*pico.TEXTS, "", " ", "word " * 500, "a\tb\nc"]


def test_the_feed_loads_ahead_in_another_thread():
    loaded: list[int] = []
    ahead = threading.Event()

    def load(number: int) -> tuple[int, str]:
        loaded.append(number)
        if number == 7 + _AHEAD:
            ahead.set()
        return number, threading.current_thread().name

    with _Prefetcher(load, start=7) as feed:
        assert feed.take()[0] == 7
        assert ahead.wait(10), "later batches are loaded before they are asked for"
        with feed.paused():
            so_far = list(loaded)
            number, thread = feed.take()
            assert loaded == so_far, "nothing is loaded in a pause"
        assert number == 8
        assert thread != threading.current_thread().name
        assert feed.take()[0] == 9


def test_an_error_in_loading_reaches_the_training():
    def load(number: int) -> int:
        if number == 1:
            raise BadInput("text 5 is damaged")
        return number

    with _Prefetcher(load, start=0) as feed:
        assert feed.take() == 0
        with pytest.raises(BadInput, match="text 5"):
            feed.take()


def check(model: SentenceTransformer) -> None:
    tokenise = make_tokeniser(model)
    for texts in (TEXTS[:1], [TEXTS[3], TEXTS[1], TEXTS[9]], TEXTS):
        ours, theirs = tokenise(texts), model.preprocess(texts)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value) if torch.is_tensor(value) else ours[name] == value, name


@pytest.mark.parametrize("family", sorted(pico.CONFIGS))
def test_tokens_are_those_of_the_model(
    family: str, pico_model: Callable[[str], SentenceTransformer], monkeypatch: pytest.MonkeyPatch
):
    """By the fast path, which works for every family, without the model's own preprocessing."""
    model = pico_model(family)
    check(model)
    tokenise = make_tokeniser(model)
    monkeypatch.setattr(model, "preprocess", None)
    assert tokenise(TEXTS[:2])["input_ids"].shape[0] == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_truncation_on_either_side(tmp_path: Path, side: str):
    model = pico.model("llama", str(tmp_path))
    model.tokenizer.padding_side = model.tokenizer.truncation_side = side
    model.max_seq_length = 11
    check(model)


def test_a_model_with_its_own_preprocessing_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = pico.model("bert", str(tmp_path))
    theirs = model.preprocess

    def shouting(texts: list[str]) -> dict[str, object]:
        return theirs([text.upper() + "!" for text in texts])

    monkeypatch.setattr(model, "preprocess", shouting)
    check(model)
    static = SentenceTransformer(modules=[StaticEmbedding(pico.wordpiece(), embedding_dim=8)], device="cpu")
    check(static)


def test_the_models_tokenizer_is_not_changed(tmp_path: Path):
    model = pico.model("bert", str(tmp_path))
    model.encode(["a text"])
    before = model.tokenizer.backend_tokenizer.to_str()
    tokenise = make_tokeniser(model)
    model.encode(["a text"])
    tokenise([TEXTS[0], TEXTS[9]])
    assert model.tokenizer.backend_tokenizer.to_str() == before


def test_a_slow_tokenizer_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = pico.model("bert", str(tmp_path))
    monkeypatch.setattr(type(model.tokenizer), "is_fast", False)
    with pytest.raises(BadModel, match=r"tokenizer\.json"):
        check_fast_tokenizer(model)

"""The rebuilt tokenizer against the original in transformers and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

import pico
from trundle.errors import BadModel, ImpossibleCut
from trundle.model.tokenizer import (
    MergeTree,
    _basic_ids,
    _cut_file,
    _named_ids,
    _tokenizer_content,
    _tokens_by_id,
    _with_tokens,
)

TEXTS = [
    *pico.TEXTS,
    "international internationalisation nationality rationalism irrational",
    "lower lowest newer newest wider widest low new wide",
    "unbelievable believers believe; unthinkable thinkers think",
    "def tokenize(text): return [piece for piece in text.split()]",
    "Die Größenverhältnisse ändern sich, naïve cafés bleiben.",
    "東京は日本の首都です。 서울은 한국의 수도입니다.",
]
WORDS = sorted({word for text in TEXTS for word in text.split()})


def sentencepiece_bpe() -> Tokenizer:
    """Like Llama 2 and Gemma: no pre-tokenizer, spaces as ▁, byte fallback, every possible merge."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [token for token, _ in sorted(learned["vocab"].items(), key=lambda item: item[1])]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (token[:cut], token[cut:])
        for token in pieces[259:]
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: (vocab["".join(merge)], vocab[merge[0]], vocab[merge[1]]))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = pico.wordpiece()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.WordPieceTrainer(
            vocab_size=500, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
        ),
    )
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = pico.byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(
        ["<outside>"]
    )  # an added token with an id of its own after the vocabulary, as in Qwen
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 3), ("<s>", 2))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = pico.unigram()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece": wordpiece,
    "byte-level": byte_level,
    "sentencepiece": sentencepiece_bpe,
    "unigram": unigram,
}
KINDS = list(MAKERS)


@cache
def content_of(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(MAKERS[kind]().to_str())
    return content


@cache
def whole(kind: str) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(content_of(kind)))


@cache
def tree_of(kind: str) -> MergeTree:
    return MergeTree(content_of(kind))


def closed(kind: str, wanted: set[int]) -> list[int]:
    content = content_of(kind)
    return sorted(tree_of(kind).with_halves(wanted | _named_ids(content) | _basic_ids(content)))


def small(kind: str, kept: list[int]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(_cut_file(content_of(kind), kept)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return tokens


def some(kind: str, share: float, seed: int) -> set[int]:
    ids = sorted(_tokens_by_id(content_of(kind)))
    return set(np.random.default_rng(seed).choice(ids, int(share * len(ids)), replace=False).tolist())


sentences = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
shares = st.floats(0.05, 0.9)
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=sentences, share=shares, seed=seeds)
def test_text_of_kept_tokens_is_tokenised_as_before(kind: str, text: str, share: float, seed: int) -> None:
    before = whole(kind).encode(text, add_special_tokens=False)
    kept = closed(kind, some(kind, share, seed) | set(before.ids))
    after = small(kind, kept).encode(text, add_special_tokens=False)
    assert after.tokens == before.tokens
    assert [kept[number] for number in after.ids] == before.ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=st.text(max_size=60), share=shares, seed=seeds)
def test_any_text_can_be_tokenised(kind: str, text: str, share: float, seed: int) -> None:
    kept = closed(kind, some(kind, share, seed))
    read = small(kind, kept).encode(text)
    assert all(0 <= number < len(kept) for number in read.ids)
    if kind in ("byte-level", "sentencepiece"):  # these know bytes: nothing is lost and nothing unknown
        whole_text = whole(kind).decode(whole(kind).encode(text).ids)
        assert small(kind, kept).decode(read.ids) == whole_text


def producers(tokenizer: Tokenizer, token: str) -> set[str]:
    """Texts that should give the token: itself, at the start of a text and inside a word."""
    bare = token.removeprefix("##").replace("▁", " ")
    readable = tokenizer.decoder.decode([token]) if tokenizer.decoder else bare
    return {bare, readable, *(f"{letter}{bare}" for letter in "aeinorst1.")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kept_token_can_still_be_produced(kind: str) -> None:
    """For all tokens the whole tokenizer produces from some text, the small one does from the same text."""
    tested = 0
    for seed in range(3):
        kept = closed(kind, some(kind, 0.3, seed))
        cut_one = small(kind, kept)
        for number in kept:
            token = _tokens_by_id(content_of(kind))[number]
            texts = [text for text in producers(whole(kind), token) if token in pieces(whole(kind), text)]
            tested += bool(texts)
            for text in texts:
                before = whole(kind).encode(text, add_special_tokens=False)
                if set(before.ids) <= set(kept):
                    assert token in pieces(cut_one, text), (token, text)
    assert tested > 100


def test_halves_of_a_token_with_several_merges_are_those_the_tokenizer_uses() -> None:
    """Without them, a kept token of a sentencepiece vocabulary could not be produced any more."""
    kind = "sentencepiece"
    content = content_of(kind)
    for number, token in _tokens_by_id(content).items():
        if token not in pieces(whole(kind), token.replace("▁", " ").strip()) or len(token) < 2:
            continue
        alone = small(kind, closed(kind, {number}))
        assert token in pieces(alone, token.replace("▁", " ").strip()), token


def test_without_the_halves_tokens_are_lost() -> None:
    """The test above can fail: a choice that is not closed loses many of its tokens."""
    kind = "byte-level"
    content = content_of(kind)
    kept = sorted(some(kind, 0.3, 1) | _named_ids(content) | _basic_ids(content))
    naive = small(kind, kept)
    tokens = _tokens_by_id(content)
    lost = [
        number
        for number in kept
        for text in [whole(kind).decode([number])]
        if pieces(whole(kind), text) == [tokens[number]] and pieces(naive, text) != [tokens[number]]
    ]
    assert len(lost) > 10


CLASSES: dict[str, tuple[type[PreTrainedTokenizerBase], str, dict[str, Any]]] = {
    "bert": (BertTokenizer, "wordpiece", {}),
    "gpt2": (
        GPT2Tokenizer,
        "byte-level",
        {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"},
    ),
    "roberta": (RobertaTokenizer, "byte-level", {"mask_token": "<unk>"}),
    "llama": (LlamaTokenizer, "sentencepiece", {}),
    "gemma": (
        GemmaTokenizer,
        "sentencepiece",
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<unk>"},
    ),
    "xlm-roberta": (XLMRobertaTokenizer, "unigram", {"mask_token": "<unk>"}),
    "plain": (
        PreTrainedTokenizerFast,
        "byte-level",
        {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"},
    ),
}


def opened(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer of a class of transformers, opened from its files as every user does."""
    made, kind, special = CLASSES[name]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content_of(kind)), encoding="utf-8")
    settings_ = {"tokenizer_class": made.__name__, "model_max_length": 77, "padding_side": "left", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_), encoding="utf-8")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("name", CLASSES)
def test_survives_saving_and_plain_loading(name: str, tmp_path: Path) -> None:
    tokenizer = opened(name, tmp_path / "whole")
    content = _tokenizer_content(tokenizer)
    tree = MergeTree(content)
    wanted = _named_ids(content) | _basic_ids(content) | set(tokenizer.all_special_ids)
    wanted |= set(list(_tokens_by_id(content))[::3])
    kept = sorted(tree.with_halves(wanted))
    cut_one = _with_tokens(tokenizer, kept)
    cut_one.save_pretrained(tmp_path / "small")
    again = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert len(again) == len(cut_one) == len(kept)
    assert again.get_vocab() == cut_one.get_vocab()
    assert type(again) is type(tokenizer)
    assert len(tokenizer) == len(_tokens_by_id(content))
    assert again.model_max_length == 77
    assert again.padding_side == "left"
    for role in ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"):
        assert getattr(again, role) == getattr(tokenizer, role)
    assert [again.convert_ids_to_tokens(number) for number in range(len(kept))] == [
        tokenizer.convert_ids_to_tokens(number) for number in kept
    ]
    assert again.backend_tokenizer.post_processor is not None
    for text in [*TEXTS, "ω ☃ was in no text"]:
        assert again(text)["input_ids"] == cut_one(text)["input_ids"]
        assert all(0 <= number < len(kept) for number in again(text)["input_ids"])
        old, new = tokenizer(text)["input_ids"], again(text)["input_ids"]
        if set(old) <= set(kept):
            assert [kept[number] for number in new] == old
    again.save_pretrained(tmp_path / "twice")
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("small", "twice"))
    assert first == second


def test_settings_without_ids_stay_as_they_are() -> None:
    tokenizer = whole("wordpiece")
    tokenizer.enable_truncation(40, stride=2)
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", direction="left")
    content = json.loads(tokenizer.to_str())
    new = _cut_file(content, closed("wordpiece", set()))
    for part in ("truncation", "padding", "normalizer", "pre_tokenizer", "decoder"):
        assert new[part] == content[part]
    tokenizer.no_truncation()
    tokenizer.no_padding()


def test_ids_named_in_the_file_are_renumbered() -> None:
    content = content_of("byte-level")
    named = sorted(_named_ids(content))
    new = _cut_file(content, closed("byte-level", set()))
    assert {added["content"] for added in new["added_tokens"]} == {
        a["content"] for a in content["added_tokens"]
    }
    assert new["added_tokens"][-1]["content"] == "<outside>"
    assert new["added_tokens"][-1]["id"] == len(closed("byte-level", set())) - 1
    assert named[-1] == len(_tokens_by_id(content)) - 1


def test_the_original_is_not_changed() -> None:
    content = content_of("sentencepiece")
    before = json.dumps(content)
    _cut_file(content, closed("sentencepiece", set()))
    assert json.dumps(content) == before


@pytest.mark.parametrize(
    ("kept", "says"), [([0, 1, 2, 10**6], "no token with id"), ([0, 1], "needed by the tokenizer itself")]
)
def test_impossible_choices_are_rejected(kept: list[int], says: str) -> None:
    with pytest.raises(ImpossibleCut, match=says):
        _cut_file(content_of("wordpiece"), kept)


def test_unknown_tokenizer_models_are_rejected() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(BadModel, match="WordLevel"):
        _cut_file(json.loads(words.to_str()), [0, 1])


def test_slow_tokenizers_are_rejected_with_a_fix() -> None:
    class Slow:
        pass

    with pytest.raises(BadModel, match="slow one"):
        _tokenizer_content(Slow())  # type: ignore[arg-type]


def test_every_kept_token_of_a_real_vocabulary_can_still_be_produced(minilm: Path) -> None:
    """All 8,000 and more: each word alone, each inner piece after the first letter that leads to it."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    content = _tokenizer_content(tokenizer)
    tokens, before = _tokens_by_id(content), tokenizer.backend_tokenizer
    named = _named_ids(content)
    needed = named | _basic_ids(content)
    chosen = np.random.default_rng(0).choice(sorted(tokens), 8000, replace=False).tolist()
    kept = sorted({*needed, *chosen})
    after = _with_tokens(tokenizer, kept).backend_tokenizer
    for either in (before, after):
        either.no_padding()
    produced = 0
    wanted = [number for number in kept if number not in named]
    for start in ("", *"aeinqxz"):
        texts = [start + tokens[number].removeprefix("##") for number in wanted]
        read = before.encode_batch_fast(texts, add_special_tokens=False)
        again = after.encode_batch_fast(texts, add_special_tokens=False)
        done = {number for number, old in zip(wanted, read, strict=True) if number in old.ids}
        for number, new in zip(wanted, again, strict=True):
            assert number not in done or number in [kept[place] for place in new.ids]
        produced += len(done)
        wanted = [number for number in wanted if number not in done]
    assert produced > 0.98 * (len(kept) - len(needed))

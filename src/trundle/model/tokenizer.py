"""Cut the vocabulary of a transformers tokenizer and keep all its settings."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from trundle.errors import BadModel, ImpossibleCut

_Content = Mapping[str, Any]
"""The content of a tokenizer.json."""
_NO_LIMIT = 1_000_000
"""Tokenizers without a length limit report a huge one."""
_MODEL_TYPES = ("WordPiece", "BPE", "Unigram")
_SECOND_COPIES = {"_vocab": "vocab", "_merges": "merges"}
"""Attributes in which some tokenizer classes keep copies of their file's content, and its names there."""


def _model_type(content: _Content) -> str:
    """WordPiece, BPE or Unigram; old files leave the name out."""
    model = content["model"]
    kind = model.get("type")
    if kind is None:
        kind = "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    if kind not in _MODEL_TYPES:
        raise BadModel(f"a {kind} tokenizer can't be cut; use one of {', '.join(_MODEL_TYPES)}")
    return str(kind)


def _tokens_by_id(content: _Content) -> dict[int, str]:
    own = {number: token for token, number in _own_ids(content).items()}
    return own | {added["id"]: added["content"] for added in content["added_tokens"]}


def _named_ids(content: _Content) -> set[int]:
    """The ids that the file itself needs: added tokens, the unknown token, and tokens added around a text."""
    ids = {int(added["id"]) for added in content["added_tokens"]}
    if (unknown := _unknown_id(content, None)) is not None:
        ids.add(unknown)
    if content.get("padding"):
        ids.add(int(content["padding"]["pad_id"]))
    for processor in _processors(content.get("post_processor")):
        ids.update(int(processor[end][1]) for end in ("sep", "cls") if end in processor)
        for special in processor.get("special_tokens", {}).values():
            ids.update(int(number) for number in special["ids"])
    return ids


def _basic_ids(content: _Content) -> set[int]:
    """The tokens that can spell every text: all bytes if there are byte tokens, else all characters."""
    vocab = _own_ids(content)
    if not _knows_bytes(content):
        basic = set(_single_characters(content))
    elif content["model"].get("byte_fallback"):
        basic = {vocab[token] for token in (f"<0x{byte:02X}>" for byte in range(256)) if token in vocab}
    else:
        basic = {vocab[token] for token in ByteLevel.alphabet() if token in vocab}
    least = _least_likely(content)
    return basic if least is None else basic | {least}


def _least_likely(content: _Content) -> int | None:
    """The Unigram piece with the lowest score, which determines the score of unknown characters."""
    if _model_type(content) != "Unigram":
        return None
    scores = [score for _, score in content["model"]["vocab"]]
    return scores.index(min(scores))


def _single_characters(content: _Content) -> dict[int, str]:
    """The tokens of one character, at the start of a word or inside it."""
    prefix = content["model"].get("continuing_subword_prefix") or ""
    suffix = content["model"].get("end_of_word_suffix") or ""
    own = _own_ids(content).items()
    bare = {number: token.removeprefix(prefix).removesuffix(suffix) for token, number in own}
    return {number: text for number, text in bare.items() if len(text) == 1}


def _knows_bytes(content: _Content) -> bool:
    """Whether bytes can spell every text, either as ByteLevel characters or as tokens such as `<0x41>`."""
    if content["model"].get("byte_fallback"):
        return True
    parts = (content.get("pre_tokenizer"), content.get("decoder"), content.get("normalizer"))
    return _model_type(content) == "BPE" and '"ByteLevel"' in json.dumps(parts)


def _unknown_id(content: _Content, named: str | None) -> int | None:
    """The id of the unknown token of the tokenizer's model, or else of the token `named` in the settings."""
    model = content["model"]
    if isinstance(model["vocab"], list):
        unknown = model.get("unk_id")
        return None if unknown is None else int(unknown)
    ids = {token: number for number, token in _tokens_by_id(content).items()}
    return ids.get(model.get("unk_token") or named or "")


def _own_ids(content: _Content) -> dict[str, int]:
    """The tokens of the model's own vocabulary, without added tokens."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):
        return {piece: number for number, (piece, _) in enumerate(vocab)}
    own: dict[str, int] = vocab
    return own


def _cut_file(content: _Content, kept: Sequence[int]) -> dict[str, Any]:
    """The content with only the kept ids; the position of an id in `kept` is its new id."""
    known = _tokens_by_id(content)
    strangers = [number for number in kept if number not in known]
    if strangers:
        raise ImpossibleCut(f"the tokenizer has no token with id {strangers[0]}; keep only ids it has")
    new = {old: position for position, old in enumerate(kept)}
    missing = sorted(_named_ids(content) - new.keys())
    if missing:
        token = known.get(missing[0], missing[0])
        raise ImpossibleCut(f"the token {token!r} is needed by the tokenizer itself; keep id {missing[0]}")
    added = [{**token, "id": new[token["id"]]} for token in content["added_tokens"]]
    padding = content.get("padding")
    return {
        **content,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "padding": None if padding is None else {**padding, "pad_id": new[padding["pad_id"]]},
        "post_processor": _new_processor(content.get("post_processor"), new),
        "model": _new_model(content["model"], _model_type(content), new),
    }


def _read_merge(merge: str | Sequence[str], model: _Content) -> tuple[str, str, str]:
    """The two halves of a merge, in the format of old or new files, and what they make."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _new_model(model: _Content, kind: str, new: Mapping[int, int]) -> dict[str, Any]:
    if kind == "Unigram":
        pieces, unknown = model["vocab"], model.get("unk_id")
        kept = [pieces[old] for old in sorted(new, key=new.__getitem__) if old < len(pieces)]
        return {**model, "vocab": kept, "unk_id": None if unknown is None else new[unknown]}
    vocab = {token: new[number] for token, number in model["vocab"].items() if number in new}
    small = {**model, "vocab": dict(sorted(vocab.items(), key=lambda pair: pair[1]))}
    if kind == "BPE":
        small["merges"] = [merge for merge in model["merges"] if vocab.keys() >= {*_read_merge(merge, model)}]
    return small


def _processors(processor: _Content | None) -> list[_Content]:
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [inner for outer in processor["processors"] for inner in _processors(outer)]
    return [processor]


def _new_processor(processor: _Content | None, new: Mapping[int, int]) -> dict[str, Any] | None:
    if processor is None:
        return None
    if processor["type"] == "Sequence":
        return {**processor, "processors": [_new_processor(inner, new) for inner in processor["processors"]]}
    changed = dict(processor)
    for end in ("sep", "cls"):
        if end in changed:
            token, number = changed[end]
            changed[end] = [token, new[number]]
    if "special_tokens" in changed:
        changed["special_tokens"] = {
            name: {**special, "ids": [new[number] for number in special["ids"]]}
            for name, special in changed["special_tokens"].items()
        }
    return changed


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase | None, rows: float = math.inf) -> dict[str, Any]:
    """The file, without special tokens beyond the `rows` of the embedding, such as Gemma 3's for images."""
    content: dict[str, Any] = json.loads(_backend_of(tokenizer).to_str())
    added = content["added_tokens"]
    content["added_tokens"] = [token for token in added if token["id"] < rows or not token["special"]]
    return content


def _backend_of(tokenizer: PreTrainedTokenizerBase | None) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BadModel(f"{type(tokenizer).__name__} is a slow one; save a tokenizer.json with the model")
    return backend


def _bare_backend(tokenizer: Any, limit: int) -> Tokenizer:
    """A copy of the backend without padding that truncates texts to `limit` tokens, if there is a limit."""
    bare = Tokenizer.from_str(_backend_of(tokenizer).to_str())
    bare.no_padding()
    bare.no_truncation()
    if limit < _NO_LIMIT:
        bare.enable_truncation(limit, direction=tokenizer.truncation_side)
    return bare


def _with_tokens(
    tokenizer: PreTrainedTokenizerBase, kept: Sequence[int], rows: float = math.inf
) -> PreTrainedTokenizerBase:
    small = _cut_file(_tokenizer_content(tokenizer, rows), kept)
    backend = Tokenizer.from_str(json.dumps(small))
    # The library numbers added tokens by its own rule, which may differ from the file.
    expected = {token: number for number, token in _tokens_by_id(small).items()}
    if backend.get_vocab(with_added_tokens=True) != expected:
        raise BadModel("the tokenizer's added tokens can't be renumbered; keep all tokens")
    # Everything is copied except the backend, which the new one replaces.
    new = copy.deepcopy(tokenizer, {id(_backend_of(tokenizer)): backend})
    new.init_kwargs.pop("added_tokens_decoder", None)
    for attribute, name in _SECOND_COPIES.items():
        if hasattr(new, attribute):
            setattr(new, attribute, small["model"].get(name))
    return new


_Halves = tuple[int, int]


class MergeTree:
    """The last merge of every token."""

    def __init__(self, content: _Content) -> None:
        self._model: Any = content["model"]
        self._vocab: Any = self._model["vocab"]
        self._halves: dict[int, _Halves | None] = {}
        self._ranks: dict[tuple[str, str], int] = {}
        self._several: set[int] = set()
        if _model_type(content) == "BPE":
            self._read_merges()
        self._tokens = {number: token for token, number in self._vocab.items()} if self._several else {}

    def halves(self, token: int) -> _Halves | None:
        """Return the ids that a token's last merge joins; None for a token that no merge makes."""
        if token in self._several:
            self._several.discard(token)
            self._halves[token] = self._last_merge(self._tokens[token])
        return self._halves.get(token)

    def with_halves(self, tokens: Iterable[int]) -> set[int]:
        """Return the tokens and all tokens they are merged from."""
        found: set[int] = set()
        waiting = list(tokens)
        while waiting:
            token = waiting.pop()
            if token not in found:
                found.add(token)
                waiting.extend(self.halves(token) or ())
        return found

    def _read_merges(self) -> None:
        """Most vocabularies have one merge per token; those from sentencepiece list every possible one."""
        vocab = self._vocab
        for rank, merge in enumerate(self._model["merges"]):
            left, right, merged = _read_merge(merge, self._model)
            self._ranks.setdefault((left, right), rank)
            made = vocab.get(merged)
            if made is None or left not in vocab or right not in vocab:
                continue
            if made in self._halves:
                self._several.add(made)
            else:
                self._halves[made] = (vocab[left], vocab[right])

    def _last_merge(self, text: str) -> _Halves | None:
        """Merge the characters of a token in the tokenizer's order to find its last merge."""
        pieces, last = list(text), None
        while len(pieces) > 1:
            pairs = enumerate(itertools.pairwise(pieces))
            ranked = [(self._ranks[pair], place) for place, pair in pairs if pair in self._ranks]
            if not ranked:
                return self._halves.get(self._vocab[text])
            _, place = min(ranked)
            last = (pieces[place], pieces[place + 1])
            pieces[place : place + 2] = ["".join(last)]
        return None if last is None else (self._vocab[last[0]], self._vocab[last[1]])


NO_MERGES = MergeTree({"model": {"type": "WordPiece", "vocab": {}}})
"""A tree in which no token needs another one."""

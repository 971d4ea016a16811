"""A tokenizer.json with fewer tokens: new dense ids everywhere an id is written, and only the merges that still work.

What this is not: it decides nothing, and knows no class of transformers. It takes the file's content and the ids to
keep, and gives back content that plain `tokenizers` and `AutoTokenizer` read. Normaliser, pre-tokenizer, decoder and
truncation speak of no ids and stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from trundle.errors import BadModel, ImpossibleCut

Content = Mapping[str, Any]
MODEL_TYPES = ("WordPiece", "BPE", "Unigram")


def model_type(content: Content) -> str:
    """WordPiece, BPE or Unigram; old files leave the name out."""
    model = content["model"]
    kind = model.get("type")
    if kind is None:
        kind = "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    if kind not in MODEL_TYPES:
        raise BadModel(
            f"the tokenizer is a {kind} model, which trundle can't cut; it can cut {', '.join(MODEL_TYPES)}"
        )
    return str(kind)


def tokens_by_id(content: Content) -> dict[int, str]:
    """Every token the file knows, those added beside the model's own vocabulary included."""
    own = {number: token for token, number in _own_ids(content).items()}
    return own | {added["id"]: added["content"] for added in content["added_tokens"]}


def named_ids(content: Content) -> set[int]:
    """The ids the file itself needs: added tokens, the unknown token, and what is put around or after a text."""
    ids = {int(added["id"]) for added in content["added_tokens"]}
    unknown = unknown_id(content, None)
    if unknown is not None:
        ids.add(unknown)
    if content.get("padding"):
        ids.add(int(content["padding"]["pad_id"]))
    for processor in _processors(content.get("post_processor")):
        ids.update(int(processor[end][1]) for end in ("sep", "cls") if end in processor)
        for special in processor.get("special_tokens", {}).values():
            ids.update(int(number) for number in special["ids"])
    return ids


def basic_ids(content: Content) -> set[int]:
    """The pieces everything can be spelled with: all bytes where the tokenizer knows bytes, else all characters."""
    model, vocab = content["model"], _own_ids(content)
    if not knows_bytes(content):
        basic = set(characters(content))
    elif model.get("byte_fallback"):
        basic = {vocab[token] for token in (f"<0x{byte:02X}>" for byte in range(256)) if token in vocab}
    else:
        basic = {vocab[token] for token in ByteLevel.alphabet() if token in vocab}
    least = least_likely(content)
    return basic if least is None else basic | {least}


def least_likely(content: Content) -> int | None:
    """The piece of a Unigram vocabulary that has to stay: an unknown character weighs a fixed bit more than it does."""
    if model_type(content) != "Unigram":
        return None
    scores = [score for _, score in content["model"]["vocab"]]
    return scores.index(min(scores))


def characters(content: Content) -> dict[int, str]:
    """The pieces of one character, at the start of a word or inside it."""
    prefix = content["model"].get("continuing_subword_prefix") or ""
    suffix = content["model"].get("end_of_word_suffix") or ""
    bare = {
        number: token.removeprefix(prefix).removesuffix(suffix) for token, number in _own_ids(content).items()
    }
    return {number: text for number, text in bare.items() if len(text) == 1}


def knows_bytes(content: Content) -> bool:
    """Whether every text can be spelled in bytes: each written as a character of its own, or as `<0x41>`."""
    if content["model"].get("byte_fallback"):
        return True
    parts = (content.get("pre_tokenizer"), content.get("decoder"), content.get("normalizer"))
    return model_type(content) == "BPE" and '"ByteLevel"' in json.dumps(parts)


def unknown_id(content: Content, named: str | None) -> int | None:
    """The id of the unknown token: the tokenizer model's, or the one the tokenizer's settings name."""
    model = content["model"]
    if isinstance(model["vocab"], list):
        unknown = model.get("unk_id")
        return None if unknown is None else int(unknown)
    ids = {token: number for number, token in tokens_by_id(content).items()}
    return ids.get(model.get("unk_token") or named or "")


def _own_ids(content: Content) -> dict[str, int]:
    """The tokens of the model's own vocabulary, without those added beside it."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):
        return {piece: number for number, (piece, _) in enumerate(vocab)}
    own: dict[str, int] = vocab
    return own


def cut_file(content: Content, kept: Sequence[int]) -> dict[str, Any]:
    """The content with only the kept ids; the place of an id in `kept` is its new id."""
    known = tokens_by_id(content)
    strangers = [number for number in kept if number not in known]
    if strangers:
        raise ImpossibleCut(f"the tokenizer has no token with id {strangers[0]}; keep only ids it has")
    new = {old: position for position, old in enumerate(kept)}
    missing = sorted(named_ids(content) - new.keys())
    if missing:
        raise ImpossibleCut(
            f"the token {known.get(missing[0], missing[0])!r} is needed by the tokenizer itself; keep id {missing[0]}"
        )
    return {
        **content,
        "added_tokens": sorted(
            ({**added, "id": new[added["id"]]} for added in content["added_tokens"]),
            key=lambda added: added["id"],
        ),
        "padding": _new_padding(content.get("padding"), new),
        "post_processor": _new_processor(content.get("post_processor"), new),
        "model": _new_model(content["model"], model_type(content), new),
    }


def merge_parts(merge: str | Sequence[str]) -> tuple[str, str]:
    """The two halves of a merge, as old and new files write it."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def merged(left: str, right: str, model: Content) -> str:
    """What a merge makes: its halves joined, without the mark of a word's inside."""
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _new_model(model: Content, kind: str, new: Mapping[int, int]) -> dict[str, Any]:
    if kind == "Unigram":
        pieces = [(new[number], piece) for number, piece in enumerate(model["vocab"]) if number in new]
        unknown = model.get("unk_id")
        return {
            **model,
            "vocab": [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])],
            "unk_id": None if unknown is None else new[unknown],
        }
    vocab = {token: new[number] for token, number in model["vocab"].items() if number in new}
    small = {**model, "vocab": dict(sorted(vocab.items(), key=lambda pair: pair[1]))}
    if kind == "BPE":
        small["merges"] = [
            merge
            for merge in model["merges"]
            for left, right in [merge_parts(merge)]
            if left in vocab and right in vocab and merged(left, right, model) in vocab
        ]
    return small


def _new_padding(padding: Content | None, new: Mapping[int, int]) -> dict[str, Any] | None:
    return None if padding is None else {**padding, "pad_id": new[padding["pad_id"]]}


def _processors(processor: Content | None) -> list[Content]:
    if processor is None:
        return []
    if processor["type"] == "Sequence":
        return [inner for outer in processor["processors"] for inner in _processors(outer)]
    return [processor]


def _new_processor(processor: Content | None, new: Mapping[int, int]) -> dict[str, Any] | None:
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

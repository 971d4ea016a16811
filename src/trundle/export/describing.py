"""What the runtime must be told of a SentenceTransformer, and the files it needs beside the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer

from trundle.errors import BadModel
from trundle.model import normalises, static_table
from trundle.runtime.describe import Description

TOKENIZER = "tokenizer.json"
OWN_TOKENIZER = "encoder_tokenizer.json"
"""For a model that changes its tokenizer as it is opened, so that the file in its folder does not tell all."""

MARK = "marked place"

UNLIMITED = 1_000_000
"""Tokens of a text that a model without a limit reads; the rest is left out."""

NOT_TOKENIZING = {"padding", "truncation"}
"""How the tokenizer was last asked to fill up and cut; the runtime asks in its own way."""


def describe(model: SentenceTransformer) -> Description:
    """Everything but the graphs."""
    if any(isinstance(module, Pooling) and not module.include_prompt for module in model) and any(
        model.prompts.values()
    ):
        raise BadModel(
            "the model leaves its prompts out of pooling, which a graph of token ids can't know; "
            "set include_prompt to true"
        )
    static = static_table(model)
    width = model.get_embedding_dimension()
    longest = (
        model.max_seq_length
        if static is None
        else (static.tokenizer.truncation or {}).get("max_length", UNLIMITED)
    )
    if width is None or longest is None:
        raise BadModel(
            "the model does not say how wide its vectors are and how many tokens it takes; set both"
        )
    before, after = chat_frame(model)
    if (before or after) and any(model.prompts.values()):
        raise BadModel(
            "the model has both a chat template and prompts, which can't be told to a graph; remove its prompts"
        )
    return Description(
        before=before,
        after=after,
        dimensions=width,
        normalised=normalises(model),
        max_tokens=longest,
        special_tokens=static is None,
        pad_id=0 if static is not None else int(model.tokenizer.pad_token_id or 0),
        prompts={name: prompt or "" for name, prompt in model.prompts.items()},
        parameters=sum(weight.numel() for weight in model.parameters()),
        default_prompt=model.default_prompt_name,
    )


def chat_frame(model: SentenceTransformer) -> tuple[str, str]:
    """What the model's chat template puts before and after a text; nothing where it has none."""
    features = model.preprocess([MARK])
    if features.get("modality") != "message":
        return "", ""
    rendered = str(model.tokenizer.decode(features["input_ids"][0].tolist()))
    before, mark, after = rendered.partition(MARK)
    if not mark:
        raise BadModel("the model's chat template changes the text itself; remove chat_template.jinja")
    return before, after


def place_tokenizer(model: SentenceTransformer, folder: Path) -> str:
    """The name of a file in `folder` that reads texts as the model does; written if there is none yet."""
    own = model.tokenizer
    backend = own if isinstance(own, Tokenizer) else getattr(own, "backend_tokenizer", None)
    if backend is None:
        raise BadModel(
            "the model's tokenizer is not one of the tokenizers library; save it as tokenizer.json"
        )
    content = _what_it_does(json.loads(backend.to_str()))
    for name in (TOKENIZER, OWN_TOKENIZER):
        path = folder / name
        if path.is_file() and _what_it_does(json.loads(path.read_text(encoding="utf-8"))) == content:
            return name
    name = OWN_TOKENIZER if (folder / TOKENIZER).is_file() else TOKENIZER
    (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return name


def _what_it_does(tokenizer: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key in NOT_TOKENIZING else value for key, value in tokenizer.items()}


def write_standalone(model: SentenceTransformer, folder: Path) -> None:
    """The standard folder without its torch weights: what a machine that only encodes needs."""
    model.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
    for weights in folder.rglob("*.safetensors*"):
        weights.unlink()

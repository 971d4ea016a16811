"""Pico models: one tiny model per family, made from its config, with a tokenizer trained on a few lines.

They are built offline in milliseconds and go through the same code as the large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    MT5EncoderModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5EncoderModel,
)

TRAINED = Path(__file__).parent / "trained"
"""Two tokenizers, by `make.py` there: trained anew, they differ in every process."""

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a small model that shares the frame of a large one",
    "queries are short",
    "documents are longer and say more about the thing that was asked for, with commas, and full stops.",
    "how do I keep my index when the model changes?",
    "Größe, naïve café, 東京 and emoji 🙂 appear in real text",
    "12 layers, 768 wide, 109 million parameters",
]

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "small", "model", "shares", "large"]


def different_texts(count: int) -> list[str]:
    """Texts that every pico tokenizer distinguishes; some would not know a number at the end of a text."""
    found = [f"{text} {one} {two}" for one in WORDS for two in WORDS for text in TEXTS]
    assert count <= len(found)
    return found[:count]


LAYERS = 4
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
GQA = COMMON | SPECIAL | {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": LAYERS, "d_ff": 48, "pad_token_id": 0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", COMMON),
    "roberta": ("roberta", COMMON | SPECIAL),
    "xlm-roberta": ("xlm-roberta", COMMON | SPECIAL),
    "camembert": ("camembert", COMMON | SPECIAL),
    "mpnet": ("mpnet", COMMON | SPECIAL),
    "distilbert": (
        "distilbert",
        {"dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    ),
    "modernbert": (
        "modernbert",
        COMMON
        | SPECIAL
        | {"cls_token_id": 2, "sep_token_id": 3, "global_attn_every_n_layers": 3, "local_attention": 8},
    ),
    "ernie": ("ernie", COMMON),
    "electra": ("electra", COMMON | {"embedding_size": 24}),
    "deberta": (
        "deberta-v2",
        COMMON
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
        | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    ),
    "nomic": ("nomic_bert", COMMON),
    "gte": ("gte", COMMON | SPECIAL),
    "jina": ("jina_embeddings_v3", COMMON | SPECIAL),
    "eurobert": ("eurobert", COMMON | SPECIAL | {"mask_token_id": 1}),
    "t5": ("t5", T5),
    "mt5": ("mt5", T5 | {"feed_forward_proj": "gated-gelu"}),
    "llama": ("llama", GQA),
    "mistral": ("mistral", GQA | {"sliding_window": 16}),
    "qwen2": ("qwen2", GQA),
    "qwen3": ("qwen3", GQA | {"head_dim": 16}),
    "gemma3": ("gemma3_text", GQA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "phi3": ("phi3", GQA),
    "gpt2": ("gpt2", SPECIAL | {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}),
}

LAYOUTS = ("bert", "mpnet", "distilbert", "modernbert", "qwen3", "gemma3", "phi3", "gpt2")
LAYOUTS += ("electra", "deberta", "nomic", "t5")
"""One family of each layout; the others have BERT's, Nomic's, T5's or Qwen3's."""
ENCODERS = {"t5": T5EncoderModel, "mt5": MT5EncoderModel}
DECODERS = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2"}


def wordpiece() -> Tokenizer:
    """What BERT, DistilBERT and MPNet use."""
    return Tokenizer.from_file(str(TRAINED / "wordpiece.json"))


def byte_level() -> Tokenizer:
    """What GPT-2, Qwen, Llama 3 and ModernBERT use."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """What XLM-R and its multilingual descendants use."""
    return Tokenizer.from_file(str(TRAINED / "unigram.json"))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bert": wordpiece,
    "distilbert": wordpiece,
    "mpnet": wordpiece,
    "xlm-roberta": unigram,
    "t5": unigram,
}


@cache
def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    build = TOKENIZERS.get(family, byte_level)
    if build is wordpiece:
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=build(), model_max_length=48, **names)


def backbone(family: str, **changes: Any) -> PreTrainedModel:
    """A bare transformers model of the family, with every parameter away from its neutral start."""
    model_type, settings = CONFIGS[family]
    config = AutoConfig.for_model(
        model_type, **(settings | {"vocab_size": len(tokenizer_for(family))} | changes)
    )
    torch.manual_seed(7)
    model = ENCODERS.get(model_type, AutoModel.from_config)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def save_backbone(family: str, folder: str, **changes: Any) -> str:
    """A bare transformers folder: what the door receives for an encoder or a decoder LLM."""
    backbone(family, **changes).save_pretrained(folder)
    tokenizer_for(family).save_pretrained(folder)
    return folder


def model(family: str, folder: str, *, normalize: bool = True, **changes: Any) -> SentenceTransformer:
    """A sentence-transformers model of the family, built by the library alone."""
    transformer = Transformer(save_backbone(family, folder, **changes))
    pooling = Pooling(transformer.get_embedding_dimension(), "weightedmean" if family in DECODERS else "mean")
    return SentenceTransformer(
        modules=[transformer, pooling, *([Normalize()] if normalize else [])], device="cpu"
    )

"""A model without layers: one vector a token, and a text is their mean. The far end of depth.

The vectors start as what the model itself gives for each token alone, less what all texts share, so they are in its own
space; frequent tokens, which say little, are weighed down. A linear map of a mean is the mean of the mapped vectors, so
whatever maps such a model into another space goes into its table and costs nothing later.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor

from trundle.errors import BadModel
from trundle.model.layout import layout_of
from trundle.model.surgery import transformer_of, with_modules
from trundle.progress import SILENT, Progress

_TOKENS_AT_ONCE = 1024
_TEXTS_AT_ONCE = 1000
_SIF = 1e-3
"""A token this frequent counts half as much as a rare one."""
_PROBE = "a"


def static_table(model: SentenceTransformer) -> StaticEmbedding | None:
    """The table of a static model; None for any other model."""
    first = model[0] if len(model) else None
    return first if isinstance(first, StaticEmbedding) else None


def static_shape(model: SentenceTransformer) -> tuple[int, int]:
    """Rows and columns of the table a static model made from this one would have."""
    rows = 1 + max(_tokenizer(model).get_vocab(with_added_tokens=True).values())
    known = layout_of(transformer_of(model).model).sizes["vocab"]
    if rows > known:
        raise BadModel(
            f"the tokenizer knows {rows} tokens and the model only {known}; give them the same vocabulary"
        )
    return rows, model.get_embedding_dimension() or 0


def static_model(
    model: SentenceTransformer, shares: NDArray[np.float64], *, progress: Progress = SILENT
) -> SentenceTransformer:
    """The mean of the model's own vectors for single tokens, given how much of all text each token makes up.

    What all texts have in common is taken off first: a token alone has much of it, a whole text little.
    """
    vectors = _token_vectors(model, progress=progress).double()
    weights = torch.from_numpy(_frequency_weights(shares))
    table = (vectors - (torch.from_numpy(shares) * weights) @ vectors) * weights[:, None]
    return static_with(model, table)


def static_with(model: SentenceTransformer, table: Tensor) -> SentenceTransformer:
    """A static model that reads like this one and has these vectors for its tokens."""
    dtype = transformer_of(model).model.dtype
    modules: list[Any] = [StaticEmbedding(_tokenizer(model), embedding_weights=table.to(dtype))]
    if isinstance(model[-1], Normalize):
        modules.append(Normalize())
    return with_modules(model, modules)


def _with_mapped_table(
    table: StaticEmbedding, weight: NDArray[np.float32], bias: NDArray[np.float32]
) -> StaticEmbedding:
    """The same table after a linear map."""
    old = table.embedding.weight.detach()
    mapped = old.float() @ torch.from_numpy(weight).to(old.device).T + torch.from_numpy(bias).to(old.device)
    return StaticEmbedding(
        Tokenizer.from_str(table.tokenizer.to_str()), embedding_weights=mapped.to(old.dtype)
    )


def _token_vectors(model: SentenceTransformer, *, progress: Progress = SILENT) -> Tensor:
    """The model's vector for every token of its tokenizer, alone between the special tokens a text would have.

    Taken before the model normalises: how long a token's vector is tells how much it should count.
    """
    rows, width = static_shape(model)
    bare = with_modules(model, [module for module in model if not isinstance(module, Normalize)])
    before, after = _surroundings(model)
    like = model.preprocess([_PROBE])
    vectors = torch.empty(rows, width)
    with progress.task("token vectors", rows) as advance, torch.inference_mode():
        for start in range(0, rows, _TOKENS_AT_ONCE):
            ids = torch.arange(start, min(start + _TOKENS_AT_ONCE, rows))
            columns = [torch.full_like(ids, token) for token in before]
            columns += [ids, *(torch.full_like(ids, token) for token in after)]
            given = torch.stack(columns, dim=1).to(model.device)
            features = {name: value for name, value in like.items() if not torch.is_tensor(value)}
            features |= {
                name: torch.zeros_like(given) for name, value in like.items() if torch.is_tensor(value)
            }
            features |= {"input_ids": given, "attention_mask": torch.ones_like(given)}
            found = bare.eval()(features)["sentence_embedding"][:, :width]
            vectors[start : start + len(ids)] = found.float().cpu()
            advance(len(ids))
    if not torch.isfinite(vectors).all():
        token = int(torch.isfinite(vectors).all(dim=1).int().argmin())
        raise BadModel(f"the model gives a vector with NaN or infinity for token {token}; check its weights")
    return vectors


def token_counts(model: SentenceTransformer, texts: Iterable[str]) -> NDArray[np.int64]:
    """How often each token occurs in texts, as a static model would read them."""
    tokenizer, (rows, _) = _tokenizer(model), static_shape(model)
    counts = np.zeros(rows, np.int64)
    stream = iter(texts)
    while batch := list(islice(stream, _TEXTS_AT_ONCE)):
        read = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in read), np.int64)
        counts += np.bincount(ids, minlength=rows)
    return counts


def _frequency_weights(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """SIF's a / (a + p) for tokens that make up a share p of all text, scaled so that text weighs 1 on the mean."""
    weights: NDArray[np.float64] = _SIF / (_SIF + shares)
    return weights / float(shares @ weights)


def shares_by_rank(rows: int) -> NDArray[np.float64]:
    """Zipf's law for a vocabulary in which frequent tokens come first: the r-th makes up a share ~ 1 / r."""
    shares: NDArray[np.float64] = 1 / np.arange(2, rows + 2, dtype=np.float64)
    return shares / float(shares.sum())


def _tokenizer(model: SentenceTransformer) -> Tokenizer:
    """A tokenizer of the static model's own, which reads as much of a text as the model does."""
    tokenizer: Any = transformer_of(model).tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise BadModel("the model's tokenizer is not a fast one; save it with a tokenizer.json first")
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    if (limit := model.max_seq_length) is not None and limit < 1_000_000:
        own.enable_truncation(
            int(limit) - own.num_special_tokens_to_add(False), direction=tokenizer.truncation_side
        )
    return own


def _surroundings(model: SentenceTransformer) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    tokenizer: Any = transformer_of(model).tokenizer
    encoded = tokenizer(_PROBE, return_special_tokens_mask=True)
    ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    inside = [place for place, is_special in enumerate(special) if not is_special]
    return ids[: inside[0]], ids[inside[-1] + 1 :]

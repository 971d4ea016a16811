"""Static models: one vector per token and no layers; the vector of a text is the mean of its tokens' vectors.

The vectors are initialised with what the model itself computes for each token alone, minus the mean common to
all texts, so they lie in its vector space; frequent tokens get smaller weights. A linear map of a mean is the
mean of the mapped vectors, so a map into another space is applied to the table and costs nothing later.
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
from trundle.model.tokenizer import _NO_LIMIT, _backend_of, _bare_backend
from trundle.progress import SILENT, Progress

_TOKENS_AT_ONCE = 1024
_TEXTS_AT_ONCE = 1000
_SIF = 1e-3
"""A token with this share of all text has half the weight of a rare one."""
_PROBE = "a"


def static_table(model: SentenceTransformer) -> StaticEmbedding | None:
    """Return the table of a static model; None for any other model."""
    first = model[0] if len(model) else None
    return first if isinstance(first, StaticEmbedding) else None


def static_shape(model: SentenceTransformer) -> tuple[int, int]:
    """Return the rows and columns of the table of a static model made from this one."""
    rows = 1 + max(_tokenizer(model).get_vocab(with_added_tokens=True).values())
    known = layout_of(transformer_of(model).model).sizes["vocab"]
    if rows > known:
        raise BadModel(f"the tokenizer has {rows} tokens, but the model only {known}; use its own tokenizer")
    return rows, model.get_embedding_dimension() or 0


def static_model(
    model: SentenceTransformer, shares: NDArray[np.float64], *, progress: Progress = SILENT
) -> SentenceTransformer:
    """Return a static model of the model's vectors for single tokens, given their shares of all text."""
    vectors = _token_vectors(model, progress=progress).double()
    weights = torch.from_numpy(_frequency_weights(shares))
    # The mean common to all texts is subtracted: it is large in a single token and small in a complete text.
    table = (vectors - (torch.from_numpy(shares) * weights) @ vectors) * weights[:, None]
    return static_with(model, table)


def static_with(model: SentenceTransformer, table: Tensor) -> SentenceTransformer:
    """Return a static model with this model's tokenizer and these token vectors."""
    dtype = transformer_of(model).model.dtype
    modules: list[Any] = [StaticEmbedding(_tokenizer(model), embedding_weights=table.to(dtype))]
    if isinstance(model[-1], Normalize):
        modules.append(Normalize())
    return with_modules(model, modules)


def _with_mapped_table(
    table: StaticEmbedding, weight: NDArray[np.float32], bias: NDArray[np.float32]
) -> StaticEmbedding:
    old = table.embedding.weight.detach()
    mapped = old.float() @ torch.from_numpy(weight).to(old.device).T + torch.from_numpy(bias).to(old.device)
    tokenizer = Tokenizer.from_str(table.tokenizer.to_str())
    return StaticEmbedding(tokenizer, embedding_weights=mapped.to(old.dtype))


def _token_vectors(model: SentenceTransformer, *, progress: Progress = SILENT) -> Tensor:
    rows, width = static_shape(model)
    # Vectors are not normalised, because the length of a token's vector is its weight in the mean.
    bare = with_modules(model, [module for module in model if not isinstance(module, Normalize)])
    before, after = _surroundings(model)
    like = model.preprocess([_PROBE])
    constants = {name: value for name, value in like.items() if not torch.is_tensor(value)}
    vectors = torch.empty(rows, width)
    with progress.task("token vectors", rows) as advance, torch.inference_mode():
        for start in range(0, rows, _TOKENS_AT_ONCE):
            ids = torch.arange(start, min(start + _TOKENS_AT_ONCE, rows))
            columns = [torch.full_like(ids, token) for token in before]
            columns += [ids, *(torch.full_like(ids, token) for token in after)]
            given = torch.stack(columns, dim=1).to(model.device)
            tensors = {name: torch.zeros_like(given) for name in like.keys() - constants.keys()}
            tensors |= {"input_ids": given, "attention_mask": torch.ones_like(given)}
            found = bare.eval()(constants | tensors)["sentence_embedding"][:, :width]
            vectors[start : start + len(ids)] = found.float().cpu()
            advance(len(ids))
    finite = torch.isfinite(vectors).all(dim=1)
    if not finite.all():
        token = int(finite.int().argmin())
        raise BadModel(f"the model gives a vector with NaN or infinity for token {token}; check its weights")
    return vectors


def token_counts(model: SentenceTransformer, texts: Iterable[str]) -> NDArray[np.int64]:
    """Count each token in texts, as the tokenizer of a static model splits them."""
    tokenizer, (rows, _) = _tokenizer(model), static_shape(model)
    counts = np.zeros(rows, np.int64)
    stream = iter(texts)
    while batch := list(islice(stream, _TEXTS_AT_ONCE)):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64)
        counts += np.bincount(ids, minlength=rows)
    return counts


def _frequency_weights(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """SIF weights a / (a + p) for tokens with a share p of all text, with a mean of 1 over text."""
    weights: NDArray[np.float64] = _SIF / (_SIF + shares)
    return weights / float(shares @ weights)


def _tokenizer(model: SentenceTransformer) -> Tokenizer:
    """A copy of the model's tokenizer that truncates at the same number of text tokens."""
    tokenizer: Any = transformer_of(model).tokenizer
    special = _backend_of(tokenizer).num_special_tokens_to_add(False)
    limit = _NO_LIMIT if model.max_seq_length is None else int(model.max_seq_length)
    return _bare_backend(tokenizer, limit - special if limit < _NO_LIMIT else limit)


def _surroundings(model: SentenceTransformer) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    tokenizer: Any = transformer_of(model).tokenizer
    encoded = tokenizer(_PROBE, return_special_tokens_mask=True)
    ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    inside = [place for place, is_special in enumerate(special) if not is_special]
    return ids[: inside[0]], ids[inside[-1] + 1 :]

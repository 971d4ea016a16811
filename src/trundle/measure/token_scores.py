"""What makes a token worth keeping: each score is a number per token id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from trundle.errors import BadModel
from trundle.measure.token_counts import Documents, TokenCounts, terms_of
from trundle.model.limits import LONGEST
from trundle.model.surgery import transformer_of
from trundle.progress import SILENT, Progress

ATTENTION_BATCH = 16

Scores = NDArray[np.float64]


def tfidf_scores(chunks: Iterable[Documents], counts: TokenCounts) -> Scores:
    """Each token's mean tf-idf weight: smooth idf, every text's weights scaled to length 1."""
    size = len(counts.documents)
    idf = np.log((1 + counts.texts) / (1 + counts.documents)) + 1
    scores = np.zeros(size)
    for chunk in chunks:
        documents, terms, term_counts = terms_of(chunk, size)
        weights = term_counts * idf[terms]
        lengths = np.sqrt(np.bincount(documents, weights**2))
        scores += np.bincount(terms, weights / lengths[documents], minlength=size)
    return scores / max(counts.texts, 1)


def attention_scores(
    model: SentenceTransformer, texts: Sequence[str], size: int, progress: Progress = SILENT
) -> Scores:
    """The attention each token receives where it occurs: summed over a text's tokens, averaged over heads and layers.

    Dividing by how often it occurs keeps common tokens from winning by number alone, as the paper does.
    """
    transformer = transformer_of(model)
    received, occurrences = np.zeros(size), np.zeros(size)
    usual = transformer.model.config._attn_implementation
    transformer.model.set_attn_implementation("eager")
    try:
        with progress.task("attention", len(texts)) as advance, torch.inference_mode():
            for start in range(0, len(texts), ATTENTION_BATCH):
                batch = list(texts[start : start + ATTENTION_BATCH])
                ids, amounts = _received(model, batch)
                received += np.bincount(ids, amounts, minlength=size)[:size]
                occurrences += np.bincount(ids, minlength=size)[:size]
                advance(len(batch))
    finally:
        transformer.model.set_attn_implementation(usual)
    return received / np.maximum(occurrences, 1)


def _received(model: SentenceTransformer, texts: list[str]) -> tuple[NDArray[np.int64], Scores]:
    """The tokens of some texts, no longer than is measured elsewhere, and the attention each got."""
    transformer = transformer_of(model)
    limit = int(min(model.max_seq_length or LONGEST, LONGEST))
    features = {
        name: value.to(model.device)
        for name, value in transformer.preprocess(texts, max_length=limit).items()
        if isinstance(value, torch.Tensor)
    }
    layers = transformer.model(**features, output_attentions=True).attentions
    if not layers:
        raise BadModel("the model does not tell its attention; choose another score, such as tfidf")
    mask = features["attention_mask"].bool()
    total = sum(layer.float().mean(dim=1) for layer in layers) / len(layers)
    per_token = (total * mask[:, :, None]).sum(dim=1)
    return features["input_ids"][mask].cpu().numpy(), per_token[mask].cpu().double().numpy()

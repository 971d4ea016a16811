"""Labelled samples as a Fisher pass takes them: every text belongs to one sample, and what counts as a rival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.data.tuples import Example
from trundle.model.tokenise import Features
from trundle.train.tuple_batches import Prompts, make_chunker, relate


@dataclass(frozen=True, kw_only=True)
class Part:
    """Texts that go through the model together, and the sample each belongs to."""

    features: Features
    owners: Tensor


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """A few samples that are each other's rivals: query i, its document i, then hard negatives with their owners.

    `query_rows` and `document_rows` say where a text is found in the joined results of its parts.
    """

    queries: tuple[Part, ...]
    documents: tuple[Part, ...]
    query_rows: Tensor
    document_rows: Tensor
    owners: Tensor
    """The sample of each document."""
    excluded: Tensor
    """(samples, documents): right answers of a query that are not its own document, and so no rivals."""

    @property
    def size(self) -> int:
        """How many samples."""
        return len(self.query_rows)


def make_sample_loader(
    model: SentenceTransformer, prompts: Mapping[str, Prompts], *, negatives: int = 1, texts_at_once: int = 32
) -> Callable[[Sequence[Example]], SampleBatch]:
    """How samples of one source become a batch; texts of similar length go through the model together."""
    chunked = make_chunker(model, texts_at_once)

    def load(samples: Sequence[Example]) -> SampleBatch:
        prompt = prompts[samples[0].source]
        hard = [(owner, text) for owner, one in enumerate(samples) for text in one.negatives[:negatives]]
        documents = [sample.positive for sample in samples] + [text for _, text in hard]
        owners = np.asarray([*range(len(samples)), *(owner for owner, _ in hard)])
        query_parts, query_rows = _parts(
            chunked, [sample.query for sample in samples], np.arange(len(samples)), prompt.query
        )
        document_parts, document_rows = _parts(chunked, documents, owners, prompt.document)
        return SampleBatch(
            queries=query_parts,
            documents=document_parts,
            query_rows=query_rows,
            document_rows=document_rows,
            owners=torch.from_numpy(owners),
            excluded=_excluded(samples, documents, negatives),
        )

    return load


def _parts(
    chunked: Callable[..., tuple[tuple[Features, ...], Tensor]],
    texts: Sequence[str],
    owners: np.ndarray[tuple[int], np.dtype[np.int64]],
    prompt: str,
) -> tuple[tuple[Part, ...], Tensor]:
    features, rows = chunked(texts, prompt)
    order = torch.argsort(rows)
    by_place = torch.from_numpy(owners)[order]
    sizes = [len(part["input_ids"]) for part in features]
    parts = [
        Part(features=one, owners=of) for one, of in zip(features, torch.split(by_place, sizes), strict=True)
    ]
    return tuple(parts), rows


def _excluded(samples: Sequence[Example], documents: Sequence[str], negatives: int) -> Tensor:
    """Where a document is known to answer a query without being its own, or is the query itself."""
    found = relate(samples, negatives=negatives)
    place = {text: number for number, text in enumerate(found.documents)}
    places = np.asarray([place[text] for text in documents])
    excluded = found.excluded[:, places] | (places[None, :] == found.answers[:, None])
    own = np.arange(len(samples))
    excluded[own, own] = False
    return torch.from_numpy(excluded)

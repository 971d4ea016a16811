"""Labelled tuples as a training task: their batches, and losses that bring correct pairs close together.

A text that occurs twice in a batch is encoded once. A document that is known to answer a query is never its
negative, whichever tuple it is from; otherwise repeated questions and shared passages would push correct
answers away.

With `mini_batch`, each chunk of a batch is encoded without keeping activations, and again in the backward
pass. The loss sees all vectors at once, so the gradients are the same in the memory of one chunk (gradient
caching).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trundle.data.examples import Example
from trundle.embedder import LONGEST
from trundle.errors import BadInput
from trundle.methods.contrast import ContrastOptions
from trundle.methods.training import Prompts
from trundle.model.heads import prompt_tokens
from trundle.model.tokens import Features, make_tokeniser
from trundle.train.batches import Batches, ByGroup, Indices
from trundle.train.loop import TrainingTask

TEMPERATURE = 0.05
_TEXTS_ON_GPU = 256
"""Texts per forward pass, at least: with a small model, a GPU spends its time on launching kernels."""
_TOKENS_IN_GRAPH, _TEXTS_IN_GRAPH = 16_384, 64
"""Tokens per forward pass in a CUDA graph, and texts at least: more are no faster and take more memory."""
_RANKING_WEIGHT = 20.0
"""Weight of InfoNCE relative to AnglE in `infonce+angle`."""


class _TokenisedTexts(NamedTuple):
    """Texts as chunks for the model, and the row of each text in the joined results."""

    features: tuple[Features, ...]
    rows: Tensor


class _TupleBatch(NamedTuple):
    """One batch: its queries, its documents, and which belong together.

    `answers[i]` is the document of query i; `excluded[i, j]` is true if document j is another correct
    answer to it, or the same text. `pairs` are (query, document), with label 1 if correct and 0 if not.
    """

    queries: _TokenisedTexts
    documents: _TokenisedTexts
    answers: Tensor
    excluded: Tensor
    pairs: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class _ContrastLoss:
    """The loss of a batch of tuples; with `distil`, the squared error of their cosines in the teacher."""

    objective: str
    temperature: float
    cached: bool
    teacher: SentenceTransformer | None

    def __call__(self, model: nn.Module, batch: _TupleBatch) -> Tensor:
        queries, documents = self._encode(model, batch.queries), self._encode(model, batch.documents)
        if self.objective == "infonce":
            return self._ranking(queries, documents, batch)
        left, right = queries[batch.pairs[:, 0]], documents[batch.pairs[:, 1]]
        if self.objective == "distil":
            assert self.teacher is not None
            with torch.no_grad():
                teacher = self.teacher.eval()
                asked, found = self._encode(teacher, batch.queries), self._encode(teacher, batch.documents)
            theirs = _cosines(asked[batch.pairs[:, 0]], found[batch.pairs[:, 1]])
            return functional.mse_loss(_cosines(left, right), theirs)
        loss = _cosine if self.objective == "cosine" else _angle
        ordered = loss(left, right, batch.labels, temperature=self.temperature)
        if self.objective == "infonce+angle":
            return _RANKING_WEIGHT * self._ranking(queries, documents, batch) + ordered
        return ordered

    def _ranking(self, queries: Tensor, documents: Tensor, batch: _TupleBatch) -> Tensor:
        return _infonce(
            queries, documents, batch.answers, excluded=batch.excluded, temperature=self.temperature
        )

    def _encode(self, model: nn.Module, texts: _TokenisedTexts) -> Tensor:
        def vectors_of(features: Features) -> Tensor:
            vectors: Tensor = model(dict(features))["sentence_embedding"]
            return vectors

        vectors = [
            checkpoint(vectors_of, features, use_reentrant=False)
            if self.cached and torch.is_grad_enabled()
            else vectors_of(features)
            for features in texts.features
        ]
        return torch.cat(vectors)[texts.rows]


def make_contrast_task(
    student: SentenceTransformer,
    examples: Sequence[Example],
    validation: Sequence[Example],
    options: ContrastOptions,
    *,
    prompts: Mapping[str, Prompts],
    teacher: SentenceTransformer | None = None,
    seed: int = 0,
    captured: bool = False,
) -> TrainingTask[_TupleBatch]:
    """Makes batches of tuples from one source each, with the loss of `options`; `prompts` are by source.

    `captured`: the backbone will be inside `captured_backbone`, which saves memory itself.
    """
    if len(examples) < 2:
        raise BadInput(f"{len(examples)} labelled tuple is too few to train on; pass at least 2")
    size, on_gpu = options.batch_size, torch.accelerator.is_available()
    default = max(size, _TEXTS_ON_GPU) if on_gpu else size
    if captured:
        default = max(_TEXTS_IN_GRAPH, _TOKENS_IN_GRAPH // (student.max_seq_length or LONGEST))
    chunk = options.mini_batch or default

    def batches(of: Sequence[Example]) -> Batches[_TupleBatch]:
        numbers = {source: number for number, source in enumerate(dict.fromkeys(e.source for e in of))}
        order = ByGroup([numbers[example.source] for example in of], batch_size=size, seed=seed)
        load = _make_tuple_loader(student, of, prompts, chunk=chunk, negatives=options.negatives)
        return Batches(order=order, load=load)

    loss = _ContrastLoss(
        objective=options.objective,
        temperature=options.temperature,
        cached=options.mini_batch is not None and not captured,
        teacher=teacher,
    )
    return TrainingTask(
        name="contrast",
        losses=(loss,),
        batches=batches(examples),
        validation=batches(validation) if validation else None,
    )


class _Relations(NamedTuple):
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    query_of: Indices
    """The query of each tuple."""
    answers: Indices
    """The document that answers each tuple."""
    excluded: NDArray[np.bool_]
    wrong: tuple[tuple[int, int], ...]
    """Incorrect (tuple, document) pairs: hard negatives, or a document of another tuple without them."""


def relate(examples: Sequence[Example], *, negatives: int | None = None) -> _Relations:
    """Finds the distinct texts of a batch and their relations; uses up to `negatives` hard ones per tuple."""
    hard = [example.negatives[:negatives] for example in examples]
    queries = {text: place for place, text in enumerate(dict.fromkeys(e.query for e in examples))}
    texts = [example.positive for example in examples] + [text for texts in hard for text in texts]
    documents = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    query_of = np.asarray([queries[example.query] for example in examples])
    answers = np.asarray([documents[example.positive] for example in examples])
    correct = np.zeros((len(queries), len(documents)), dtype=bool)
    correct[query_of, answers] = True
    for text, place in queries.items():
        if text in documents:
            correct[place, documents[text]] = True
    excluded = correct[query_of]
    wrong = [
        (row, documents[text])
        for row, texts in enumerate(hard)
        for text in texts
        if not excluded[row, documents[text]]
    ]
    without = set(range(len(examples))) - {row for row, _ in wrong}
    for row in sorted(without):
        others = np.flatnonzero(~excluded[row])
        if len(others):
            wrong.append((row, int(others[row % len(others)])))
    excluded[np.arange(len(examples)), answers] = False
    return _Relations(tuple(queries), tuple(documents), query_of, answers, excluded, tuple(wrong))


def _make_tuple_loader(
    model: SentenceTransformer,
    examples: Sequence[Example],
    prompts: Mapping[str, Prompts],
    *,
    chunk: int,
    negatives: int | None = None,
) -> Callable[[Indices], _TupleBatch]:
    chunked = make_chunker(model, chunk)

    def load(indices: Indices) -> _TupleBatch:
        chosen = [examples[index] for index in indices]
        found = relate(chosen, negatives=negatives)
        prompt = prompts[chosen[0].source]
        queries, documents = chunked(found.queries, prompt.query), chunked(found.documents, prompt.document)
        right = np.stack([np.arange(len(chosen)), found.answers], axis=1)
        wrong = np.asarray(found.wrong, dtype=np.int64).reshape(-1, 2)
        return _TupleBatch(
            queries=_TokenisedTexts(queries.features, queries.rows[found.query_of]),
            documents=documents,
            answers=torch.from_numpy(found.answers),
            excluded=torch.from_numpy(found.excluded),
            pairs=torch.from_numpy(np.concatenate([right, wrong])),
            labels=torch.from_numpy(np.repeat(np.asarray([1, 0], np.float32), [len(right), len(wrong)])),
        )

    return load


def make_chunker(model: SentenceTransformer, size: int) -> Callable[[Sequence[str], str], _TokenisedTexts]:
    """Returns a function that tokenises texts with a prompt, in chunks of `size` texts of similar length."""
    tokenise = make_tokeniser(model)
    leaves_prompts_out = any(isinstance(module, Pooling) and not module.include_prompt for module in model)

    def chunked(texts: Sequence[str], prompt: str) -> _TokenisedTexts:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        order = np.argsort(lengths, kind="stable")
        unpooled = prompt_tokens(model, prompt) if prompt and leaves_prompts_out else 0
        parts = []
        for start in range(0, len(texts), size):
            chosen = [texts[place] for place in order[start : start + size]]
            features = tokenise([prompt + text for text in chosen])
            if unpooled:
                _check_tokens_are_left(features, unpooled, chosen)
                features["prompt_length"] = unpooled
            parts.append(features)
        rows = np.empty(len(texts), np.int64)
        rows[order] = np.arange(len(texts))
        return _TokenisedTexts(tuple(parts), torch.from_numpy(rows))

    return chunked


def _check_tokens_are_left(features: Features, unpooled: int, texts: Sequence[str]) -> None:
    left = features["attention_mask"].sum(dim=1) - unpooled
    if int(left.min()) < 1:  # its vector would be zero
        text = texts[int(left.argmin())][:60]
        raise BadInput(
            f"{text!r} has no tokens to pool after its prompt; shorten the prompt or raise max_length"
        )


def _infonce(
    queries: Tensor,
    documents: Tensor,
    answers: Tensor,
    *,
    excluded: Tensor | None = None,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """The mean cross-entropy of finding document `answers[i]` for query i by cosine over temperature."""
    with torch.autocast(queries.device.type, enabled=False):
        scores = directions(queries) @ directions(documents).T / temperature
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return functional.cross_entropy(scores, answers)


def _cosine(left: Tensor, right: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """CoSENT: pairs ordered by their cosine."""
    return _ordering(_cosines(left, right) / temperature, labels)


def _cosines(left: Tensor, right: Tensor) -> Tensor:
    return (directions(left) * directions(right)).sum(dim=-1)


def _angle(left: Tensor, right: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """AnglE: pairs ordered by the angle between complex vectors, whose gradient does not saturate.

    The similarity is |cos(x, y) + Σ(bc − ad)/(‖x‖‖y‖)| with the halves as x = a + ib, y = c + id.
    """
    if left.shape[-1] % 2:
        raise BadInput(f"the angle loss halves vectors, and {left.shape[-1]} is odd; use infonce or cosine")
    x, y = directions(left), directions(right)
    (a, b), (c, d) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    similarity = ((x * y).sum(dim=-1) + (b * c - a * d).sum(dim=-1)).abs()
    return _ordering(similarity / temperature, labels)


def _ordering(scores: Tensor, labels: Tensor) -> Tensor:
    """log(1 + Σ exp(s_i − s_j)) over all pairs of scores with label_i < label_j."""
    differences = scores[:, None] - scores[None, :]
    counted = labels[:, None] < labels[None, :]
    terms = differences.masked_fill(~counted, -torch.inf).flatten()
    return torch.cat([terms.new_zeros(1), terms]).logsumexp(dim=0)


def directions(vectors: Tensor) -> Tensor:
    """Normalises vectors in full precision: half precision can't distinguish the cosines of similar texts."""
    return functional.normalize(vectors.float(), dim=-1)

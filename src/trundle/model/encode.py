"""A SentenceTransformer seen as texts → array, with bad texts named instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from tokenizers import Tokenizer
from torch import Tensor

from trundle.embedder import Embedder, Encode, Vectors, check_texts, check_vectors
from trundle.errors import BadInput, BadModel
from trundle.methods.contract import LONGEST
from trundle.model.device import _too_large, dropping, free_gpu_memory
from trundle.model.heads import _pools_prompts, _Role, prompts_by_role
from trundle.progress import SILENT, Progress

Features = dict[str, Any]
"""What a SentenceTransformer takes."""

_NO_LIMIT = 1_000_000
"""Tokenizers without a length limit state an absurd one."""

_SAMPLES = ("query: 12 plain words?", "tabs\tand  spaces ", "Größe 東京 🙂", "[MASK] <s> </s> <pad>", "")


def check_fast_tokenizer(model: SentenceTransformer) -> None:
    """Refuse a tokenizer written in Python: it would hold up the training."""
    if not getattr(model.tokenizer, "is_fast", True):
        raise BadModel("the model's tokenizer is not a fast one; save it with a tokenizer.json first")


def make_tokeniser(model: SentenceTransformer) -> Callable[[list[str]], Features]:
    """What the model takes for texts. Costly to make and cheap to use: make it once."""
    return find_short_cut(model) or model.preprocess


def find_short_cut(model: SentenceTransformer) -> ShortCut | None:
    """The fast way, where it gives exactly what the model's own preprocessing gives, which is tried out first."""
    tokenizer = model.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    longest = min(tokenizer.model_max_length, _NO_LIMIT // 100)
    samples = ["a", "Some more words, ünlike the first.", "long " * longest, *_SAMPLES]
    expected = model.preprocess(samples)
    short_cut = ShortCut(tokenizer, expected)
    return short_cut if _alike(short_cut(samples), expected) else None


class ShortCut:
    """A tokenizer of its own, whose tokens go straight into one array."""

    def __init__(self, tokenizer: Any, like: Mapping[str, Any]) -> None:
        self._rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._rust.no_padding()
        self._rust.no_truncation()
        if tokenizer.model_max_length < _NO_LIMIT:
            self._rust.enable_truncation(tokenizer.model_max_length, direction=tokenizer.truncation_side)
        self._pad = tokenizer.pad_token_id
        self._left = tokenizer.padding_side == "left"
        self._has_types = "token_type_ids" in like
        self._constants = {name: value for name, value in like.items() if not torch.is_tensor(value)}

    def __call__(self, texts: list[str]) -> Features:
        """Tokenise and pad."""
        tokens, lengths = self.flat(texts)
        return self.features(torch.from_numpy(tokens), lengths.cumsum() - lengths, lengths)

    def flat(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All tokens in one row, and how many each text has."""
        rows = [encoding.ids for encoding in self._rust.encode_batch_fast(texts)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    def features(self, tokens: Tensor, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Features:
        """The texts that begin at `starts` in the row of tokens, padded, on the device of the tokens."""
        width = int(lengths.max())
        first, count = (torch.from_numpy(array).to(tokens.device)[:, None] for array in (starts, lengths))
        places = torch.arange(width, device=tokens.device)[None, :]
        if self._left:
            places = places - (width - count)
        real = (places >= 0) & (places < count)
        where = (first + places).clamp(0, len(tokens) - 1)
        features = {
            "input_ids": torch.where(real, tokens[where].long(), self._pad),
            "attention_mask": real.long(),
        }
        if self._has_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        return features | self._constants


def _alike(ours: Features, theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        for name, value in ours.items()
    )


_CHUNK = 4096
"""Texts between two reports of progress."""

_GPU_CHARACTERS = 1 << 17
"""Characters in one batch on a GPU, padding included: enough to keep it busy."""
_GPU_TEXTS = 1024
_CPU_BATCH, _GPU_BATCH = 32, 256
"""Texts a teacher encodes at once, at least."""


def embedder(
    model: SentenceTransformer,
    *,
    name: str = "model",
    batch_size: int = 32,
    half_on_gpu: bool = False,
    progress: Progress = SILENT,
) -> Embedder:
    """The model's three roles, each with the model's own prompt for it.

    `half_on_gpu` computes in half precision where there is a GPU: for vectors that are stored so anyway. A model whose
    inner numbers are too large for that is computed in full from the first chunk on in which it shows.
    """
    on_gpu = _on_gpu(model)
    half = half_on_gpu and on_gpu and model.dtype == torch.float32
    prompts = prompts_by_role(model)

    @cache
    def tokenise() -> Callable[[list[str]], Features]:
        return make_tokeniser(model)

    def role(role: _Role, encode: Callable[..., Vectors]) -> Encode:
        straight = _has_one_way(model) and (not prompts[role] or _pools_prompts(model))

        def run_chunk(texts: list[str]) -> Vectors:
            if straight:
                prompted = [prompts[role] + text for text in texts]
                return _encode(model, tokenise(), prompted, on_gpu=on_gpu, batch_size=batch_size)
            vectors = encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)
            return np.asarray(vectors, dtype=np.float32)

        def run_half(texts: list[str]) -> Vectors:
            nonlocal half
            with torch.autocast("cuda", dtype=torch.float16, enabled=half):
                vectors = run_chunk(texts)
            if not half or np.isfinite(vectors).all():
                return vectors
            half = False
            return run_chunk(texts)

        def run(texts: Sequence[str]) -> Vectors:
            check_texts(texts)
            with progress.task(f"{name}: encoding", len(texts)) as advance:
                parts = []
                for start in range(0, len(texts), _CHUNK):
                    chunk = list(texts[start : start + _CHUNK])
                    parts.append(run_half(chunk))
                    advance(len(chunk))
            if not parts:
                return np.zeros((0, model.get_embedding_dimension() or 0), dtype=np.float32)
            return _check_embeddings(np.concatenate(parts), texts, name)

        return run

    return Embedder(
        name=name,
        text=role("text", model.encode),
        query=role("query", model.encode_query),
        document=role("document", model.encode_document),
    )


def labelling_embedder(model: SentenceTransformer, *, name: str, progress: Progress = SILENT) -> Embedder:
    """The model as a teacher of many texts; whoever labels with it asks it so, and gets the same vectors."""
    batch_size = _GPU_BATCH if _on_gpu(model) else _CPU_BATCH
    return embedder(model, name=name, batch_size=batch_size, half_on_gpu=True, progress=progress)


def _on_gpu(model: SentenceTransformer) -> bool:
    return model.device.type == "cuda"


def _has_one_way(model: SentenceTransformer) -> bool:
    """Whether queries and documents go the same way through the model, and all of the vector is used."""
    return model.truncate_dim is None and not any(isinstance(module, Router) for module in model)


@torch.inference_mode()
def _encode(
    model: SentenceTransformer,
    tokenise: Callable[[list[str]], Features],
    texts: list[str],
    *,
    on_gpu: bool,
    batch_size: int,
) -> Vectors:
    """What the library's encode gives; but a GPU is never waited for before the end, so it works while we tokenise.

    A batch that does not fit into its memory is halved, and so is what all later ones may hold.
    """
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    found: list[Tensor] = []
    start, room = 0, sys.maxsize
    while start < len(order):
        longest = max(len(texts[order[start]]), 1)
        size = max(batch_size, min(_GPU_TEXTS, _GPU_CHARACTERS // longest)) if on_gpu else batch_size
        rows = order[start : start + max(1, min(size, room // longest))]
        features = tokenise([texts[number] for number in rows])
        try:
            outputs = model(batch_to_device(features, model.device))
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                mend = "shorten it, or hide the GPU with CUDA_VISIBLE_DEVICES= before the command"
                raise _too_large(f"a text of {longest:,} characters", mend) from error
            room = longest * (len(rows) // 2)
            free_gpu_memory()
            continue
        found.append(outputs["sentence_embedding"].float())
        start += len(rows)
    vectors = np.empty((len(texts), found[0].shape[1]), dtype=np.float32)
    vectors[order] = torch.cat(found).cpu().numpy()
    return vectors


def _check_embeddings(vectors: Vectors, texts: Sequence[str], name: str) -> Vectors:
    check_vectors(vectors, texts, name)
    empty = ~vectors.any(axis=1)
    if empty.any():
        number = int(np.argmax(empty))
        raise BadInput(f"text {number + 1} ({texts[number][:60]!r}) has nothing to embed; leave it out")
    return vectors


_BATCH = 32


@torch.no_grad()
def read_through(
    model: SentenceTransformer,
    texts: Sequence[str],
    before: Callable[[Tensor], None],
    *,
    label: str,
    progress: Progress = SILENT,
) -> None:
    """Run texts of like length together, cut after 512 tokens; `before` each batch hear which positions are tokens, not padding."""
    ordered, takes = sorted(texts, key=len), model.max_seq_length
    model.max_seq_length = min(takes or LONGEST, LONGEST)
    try:
        with dropping(model, False), progress.task(label, len(ordered)) as advance:
            for start in range(0, len(ordered), _BATCH):
                chosen = ordered[start : start + _BATCH]
                features = batch_to_device(model.preprocess(chosen), model.device)
                before(features["attention_mask"].flatten().bool())
                model(features)
                advance(len(chosen))
    finally:
        model.max_seq_length = takes

"""Run a SentenceTransformer: tokenise, encode texts to arrays, and handle the limits of a device."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from trundle.embedder import LONGEST, Embedder, Vectors, check_texts, check_vectors
from trundle.errors import BadInput, BadModel
from trundle.model.heads import _pools_prompts, _Role, prompts_by_role
from trundle.model.tokenizer import _NO_LIMIT, _bare_backend
from trundle.progress import SILENT, Progress

Features = dict[str, Any]
"""The input of a SentenceTransformer's forward pass."""

_SAMPLES = ("query: 12 plain words?", "tabs\tand  spaces ", "Größe 東京 🙂", "[MASK] <s> </s> <pad>", "")
_BATCH = 32
_CHUNK = 4096
"""Texts between two progress reports."""
_GPU_CHARACTERS = 1 << 17
"""Characters per batch on a GPU, including padding: enough to use it fully."""
_GPU_TEXTS = 1024
_CPU_LABELLING_BATCH, _GPU_LABELLING_BATCH = 32, 256
"""The least number of texts per batch that a teacher encodes."""


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has bf16 units: every current GPU, and processors with AMX."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())


def free_gpu_memory() -> None:
    """Release unused GPU memory, including that of reference cycles, which training leaves behind."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def explain_out_of_memory(what: str, fix: str) -> Iterator[None]:
    """Turn a GPU out-of-memory error into one that says `what` did not fit and how to `fix` it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BadInput(f"{what} needs more memory than the GPU has left; {fix}") from error


@contextmanager
def sound_gradients() -> Iterator[None]:
    """Disable cuDNN's attention kernels: with a mask, gradients may be NaN (pytorch/pytorch issue 196678)."""
    before: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def dropping(model: nn.Module, drops: bool) -> Iterator[None]:
    """Enable or disable dropout inside the block; afterwards each module has its previous training mode."""
    before = {module: module.training for module in model.modules()}
    model.train(drops)
    try:
        yield
    finally:
        for module, trained in before.items():
            module.training = trained


def check_fast_tokenizer(model: SentenceTransformer) -> None:
    """Reject a tokenizer written in Python, because it would slow training down."""
    if not getattr(model.tokenizer, "is_fast", True):
        raise BadModel("the model's tokenizer is not a fast one; save it with a tokenizer.json first")


def make_tokeniser(model: SentenceTransformer) -> Callable[[list[str]], Features]:
    """Return a function from texts to the model's input. Making it is slow, so make it once."""
    return find_short_cut(model) or model.preprocess


def find_short_cut(model: SentenceTransformer) -> ShortCut | None:
    """Return a fast tokeniser if it gives exactly the output of the model's own preprocessing on samples."""
    tokenizer = model.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    longest = min(tokenizer.model_max_length, _NO_LIMIT // 100)
    samples = ["a", "Some more words, ünlike the first.", "long " * longest, *_SAMPLES]
    expected = model.preprocess(samples)
    short_cut = ShortCut(tokenizer, expected)
    found = short_cut(samples)
    same = found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]
        for name, value in found.items()
    )
    return short_cut if same else None


class ShortCut:
    """A copy of a tokenizer that writes its tokens directly into one array."""

    def __init__(self, tokenizer: Any, like: Mapping[str, Any]) -> None:
        self._rust = _bare_backend(tokenizer, tokenizer.model_max_length)
        self._pad = tokenizer.pad_token_id
        self._left = tokenizer.padding_side == "left"
        self._has_types = "token_type_ids" in like
        self._constants = {name: value for name, value in like.items() if not torch.is_tensor(value)}

    def __call__(self, texts: list[str]) -> Features:
        """Tokenise and pad."""
        tokens, lengths = self.flat(texts)
        return self.features(torch.from_numpy(tokens), lengths.cumsum() - lengths, lengths)

    def flat(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return all tokens in one array, and the number of tokens of each text."""
        rows = [encoding.ids for encoding in self._rust.encode_batch_fast(texts)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    def features(self, tokens: Tensor, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Features:
        """Return the padded texts that begin at `starts` in the array of tokens, on its device."""
        first, count = (torch.from_numpy(array).to(tokens.device) for array in (starts, lengths))
        return self.gather(tokens, first, count, int(lengths.max()))

    def gather(self, tokens: Tensor, starts: Tensor, lengths: Tensor, width: int) -> Features:
        """Return texts padded or cut to `width`; everything stays on the device of the tokens."""
        count = lengths.clamp(max=width)[:, None]
        places = torch.arange(width, device=tokens.device)[None, :]
        if self._left:
            places = places - (width - count)
        real = (places >= 0) & (places < count)
        where = (starts[:, None] + places).clamp(0, len(tokens) - 1)
        features = {
            "input_ids": torch.where(real, tokens[where].long(), self._pad),
            "attention_mask": real.long(),
        }
        if self._has_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        return features | self._constants


def embedder(
    model: SentenceTransformer,
    *,
    name: str = "model",
    batch_size: int = _BATCH,
    half_on_gpu: bool = False,
    progress: Progress = SILENT,
) -> Embedder:
    """Return the model as an Embedder with three roles, each with the model's own prompt for it.

    `half_on_gpu` computes in half precision on a GPU, and in full precision from the first overflow on.
    """
    on_gpu = _on_gpu(model)
    half = half_on_gpu and on_gpu and model.dtype == torch.float32
    prompts, pools_prompts = prompts_by_role(model), _pools_prompts(model)
    routed = model.truncate_dim is not None or any(isinstance(module, Router) for module in model)
    library: dict[_Role, Callable[..., Any]] = {
        "text": model.encode,
        "query": model.encode_query,
        "document": model.encode_document,
    }
    tokenise = cache(lambda: make_tokeniser(model))

    def encode_chunk(role: _Role, texts: list[str]) -> Vectors:
        if not routed and (pools_prompts or not prompts[role]):
            prompted = [prompts[role] + text for text in texts]
            return _encode(model, tokenise(), prompted, on_gpu=on_gpu, batch_size=batch_size)
        vectors = library[role](texts, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32)

    def encode(role: _Role, texts: Sequence[str]) -> Vectors:
        nonlocal half
        check_texts(texts)
        parts = []
        with progress.task(f"{name}: encoding", len(texts)) as advance:
            for start in range(0, len(texts), _CHUNK):
                chunk = list(texts[start : start + _CHUNK])
                with torch.autocast("cuda", dtype=torch.float16, enabled=half):
                    vectors = encode_chunk(role, chunk)
                if half and not np.isfinite(vectors).all():
                    half = False
                    vectors = encode_chunk(role, chunk)
                parts.append(vectors)
                advance(len(chunk))
        if not parts:
            return np.zeros((0, model.get_embedding_dimension() or 0), dtype=np.float32)
        found = np.concatenate(parts)
        check_vectors(found, texts, name)
        if (empty := ~found.any(axis=1)).any():
            number = int(np.argmax(empty))
            raise BadInput(f"text {number + 1} ({texts[number][:60]!r}) has nothing to embed; remove it")
        return found

    roles = {role: partial(encode, role) for role in prompts}
    return Embedder(name=name, text=roles["text"], query=roles["query"], document=roles["document"])


def labelling_embedder(model: SentenceTransformer, *, name: str, progress: Progress = SILENT) -> Embedder:
    """Return the model as a teacher for many texts; every caller that labels gets the same vectors."""
    batch_size = _GPU_LABELLING_BATCH if _on_gpu(model) else _CPU_LABELLING_BATCH
    return embedder(model, name=name, batch_size=batch_size, half_on_gpu=True, progress=progress)


def _on_gpu(model: SentenceTransformer) -> bool:
    return model.device.type == "cuda"


@torch.inference_mode()
def _encode(
    model: SentenceTransformer,
    tokenise: Callable[[list[str]], Features],
    texts: list[str],
    *,
    on_gpu: bool,
    batch_size: int,
) -> Vectors:
    """The vectors of the library's encode, without waiting for the GPU until the end."""
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    found: list[Tensor] = []
    start, most_characters = 0, sys.maxsize
    while start < len(order):
        longest = max(len(texts[order[start]]), 1)
        size = max(batch_size, min(_GPU_TEXTS, _GPU_CHARACTERS // longest)) if on_gpu else batch_size
        rows = order[start : start + max(1, min(size, most_characters // longest))]
        features = tokenise([texts[number] for number in rows])
        try:
            outputs = model(batch_to_device(features, model.device))
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                what = f"a text of {longest:,} characters needs more memory than the GPU has left"
                raise BadInput(f"{what}; shorten it, or hide the GPU with CUDA_VISIBLE_DEVICES=") from error
            most_characters = longest * (len(rows) // 2)  # halves this batch and limits all later ones
            free_gpu_memory()
            continue
        found.append(outputs["sentence_embedding"].float())
        start += len(rows)
    vectors = np.empty((len(texts), found[0].shape[1]), dtype=np.float32)
    vectors[order] = torch.cat(found).cpu().numpy()
    return vectors


@torch.no_grad()
def read_through(
    model: SentenceTransformer,
    texts: Sequence[str],
    before: Callable[[Tensor], None],
    *,
    label: str,
    progress: Progress = SILENT,
) -> None:
    """Run texts of up to 512 tokens, for hooks on the model; `before` gets the token mask of each batch."""
    ordered, limit = sorted(texts, key=len), model.max_seq_length
    model.max_seq_length = min(limit or LONGEST, LONGEST)
    try:
        with dropping(model, False), progress.task(label, len(ordered)) as advance:
            for start in range(0, len(ordered), _BATCH):
                chosen = ordered[start : start + _BATCH]
                features = batch_to_device(model.preprocess(chosen), model.device)
                before(features["attention_mask"].flatten().bool())
                model(features)
                advance(len(chosen))
    finally:
        model.max_seq_length = limit

"""Run a SentenceTransformer: tokenise, encode texts to arrays, and handle the limits of a device."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from trundle.embedder import LONGEST, Embedder, Vectors, check_texts, check_vectors, is_sound
from trundle.errors import BadInput, BadModel
from trundle.model.anatomy import _BY_MODEL_TYPE
from trundle.model.heads import _pools_prompts, _Role, prompts_by_role
from trundle.model.tokenizer import _NO_LIMIT, _bare_backend
from trundle.progress import SILENT, Advance, Progress, ahead

Features = dict[str, Any]
"""The input of a SentenceTransformer's forward pass."""

_SAMPLES = ("query: 12 plain words?", "tabs\tand  spaces ", "Größe 東京 🙂", "[MASK] <s> </s> <pad>", "")
_BATCH, _GPU_BATCH = 32, 256
_CHUNK, _GPU_CHUNK = 4096, 1 << 17
"""Texts whose vectors are computed together; they are sorted by length."""
_TOKENS_PER_BATCH = 98_304
"""Tokens per batch on a GPU, including padding: enough to use it fully."""
_FIRST_SLICE, _SLICE = 2048, 1 << 14
"""Texts tokenised at once for a GPU; it waits for the first slice, so that one is small."""
_TEXTS_PER_CALL = 1 << 16
"""Texts that a teacher on a GPU encodes at once."""
_PIECE = 1024
"""Texts whose tokens are copied at once: other threads wait meanwhile."""
_SWITCH_SECONDS = 2e-5
"""How long a tokenising thread may keep the interpreter from the thread that feeds the GPU."""


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has bf16 units: GPUs since 2020, and processors with AMX."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()


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
    """Disable cuDNN's attention kernels: with a mask, gradients may be NaN (pytorch/pytorch issue 196678).

    They also prepare each new shape of a batch for long.
    """
    before: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def fused_attention(model: nn.Module) -> Iterator[None]:
    """Inside the block, compute attention with the fused kernel in families that the library runs without it.

    They add a bias by relative position to the attention scores; the kernel takes it as part of its mask.
    """
    with ExitStack() as undo:
        for backbone in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
            family = _BY_MODEL_TYPE.get(backbone.config.model_type)
            if family is None or family.unfused_attention is None or backbone.base_model is not backbone:
                continue
            encoder: Any = backbone.get_submodule(family.blocks.rpartition(".")[0])
            if "forward" in vars(encoder):  # by a block around this one
                continue
            encoder.compute_position_bias = lambda *_: None
            undo.callback(delattr, encoder, "compute_position_bias")
            blocks = backbone.get_submodule(family.blocks).children()
            attentions = [block.get_submodule(family.unfused_attention) for block in blocks]
            for module in (encoder, *attentions):
                module.forward = MethodType(_bias_in_mask if module is encoder else _fused, module)
                undo.callback(delattr, module, "forward")
        yield


def _bias_in_mask(encoder: Any, states: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Any:
    # The library's own function may compute this on the CPU, which a CUDA graph can't hold.
    places = torch.arange(states.shape[1], device=states.device)
    buckets = encoder.relative_position_bucket(places[None, :] - places[:, None])
    bias = encoder.relative_attention_bias(buckets).permute(2, 0, 1)[None]
    mask = bias if attention_mask is None else bias + attention_mask
    return type(encoder).forward(encoder, states, mask, **more)


def _fused(attention: Any, states: Tensor, mask: Tensor, *_: Any, output_attentions: bool = False) -> Any:
    if output_attentions:  # the kernel does not return them
        return type(attention).forward(attention, states, mask, output_attentions=True)
    shape = (*states.shape[:-1], -1, attention.attention_head_size)
    query, key, value = (
        matrix(states).view(shape).transpose(1, 2) for matrix in (attention.q, attention.k, attention.v)
    )
    dropout = attention.dropout.p if attention.dropout.training else 0.0
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return (attention.o(mixed.transpose(1, 2).flatten(2)),)


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
        self._longest = tokenizer.model_max_length
        self._left = tokenizer.padding_side == "left"
        self._has_types = "token_type_ids" in like
        self._constants = {name: value for name, value in like.items() if not torch.is_tensor(value)}

    def __call__(self, texts: list[str]) -> Features:
        """Tokenise and pad."""
        tokens, lengths = self.flat(texts)
        return self.features(torch.from_numpy(tokens), lengths.cumsum() - lengths, lengths)

    def flat(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return all tokens in one array, and the number of tokens of each text."""
        tokens, lengths = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for start in range(0, len(texts), _PIECE):
            rows = [each.ids for each in self._rust.encode_batch_fast(texts[start : start + _PIECE])]
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            tokens.append(np.fromiter(chain.from_iterable(rows), np.int32, int(lengths[-1].sum())))
        return np.concatenate(tokens), np.concatenate(lengths)

    def aligned(self, width: int) -> int:
        """Return the next multiple of 8, which GPU kernels need, unless that is more than the model takes."""
        return min(-(-width // 8) * 8, max(width, int(self._longest)))

    def features(
        self,
        tokens: Tensor,
        starts: NDArray[np.int64] | Tensor,
        lengths: NDArray[np.int64] | Tensor,
        width: int | None = None,
    ) -> Features:
        """Return the texts that begin at `starts` in the array of tokens, on its device, padded to `width`.

        The default is the longest length. Pass a width if the lengths are on a GPU: reading them would wait.
        """
        width = int(lengths.max()) if width is None else width
        first, count = (torch.as_tensor(array).to(tokens.device)[:, None] for array in (starts, lengths))
        count = count.clamp(max=width)
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


def embedder(
    model: SentenceTransformer,
    *,
    name: str = "model",
    batch_size: int = _BATCH,
    half_on_gpu: bool = False,
    progress: Progress = SILENT,
) -> Embedder:
    """Return the model as an Embedder with three roles, each with the model's own prompt for it.

    `half_on_gpu` computes in half precision on a GPU, with a copy of the weights that is made on first use,
    and in full precision from the first overflow on.
    """
    on_gpu = _on_gpu(model)
    least = max(batch_size, _GPU_BATCH) if on_gpu else batch_size
    half_copy = cache(lambda: _half_copy(model))
    half = half_on_gpu and on_gpu and model.dtype == torch.float32
    prompts, pools_prompts = prompts_by_role(model), _pools_prompts(model)
    routed = model.truncate_dim is not None or any(isinstance(module, Router) for module in model)
    library = {"text": "encode", "query": "encode_query", "document": "encode_document"}
    tokenise = cache(lambda: make_tokeniser(model))

    def encode_chunk(used: SentenceTransformer, role: _Role, texts: list[str], advance: Advance) -> Vectors:
        if routed or (prompts[role] and not pools_prompts):
            by_library = getattr(used, library[role])
            vectors = by_library(texts, batch_size=least, show_progress_bar=False, convert_to_numpy=True)
            advance(len(texts))
            return np.asarray(vectors, dtype=np.float32)
        prompted = [prompts[role] + text for text in texts] if prompts[role] else texts
        tokeniser = tokenise()
        with fused_attention(used):
            if on_gpu and isinstance(tokeniser, ShortCut):
                return _encode_by_tokens(used, tokeniser, prompted, advance)
            return _encode(used, tokeniser, prompted, advance, batch_size=least)

    def encode(role: _Role, texts: Sequence[str]) -> Vectors:
        nonlocal half
        check_texts(texts)
        model.eval()
        parts, size, sound = [], _GPU_CHUNK if on_gpu and not routed else _CHUNK, True
        with progress.task(f"{name}: encoding", len(texts)) as advance:
            for start in range(0, len(texts), size):
                chunk = list(texts[start : start + size])
                used = half_copy() if half else model
                vectors = encode_chunk(used or model, role, chunk, advance)
                if not is_sound(vectors):
                    sound = False
                    if half and not np.isfinite(vectors).all():
                        half = False
                        half_copy.cache_clear()
                        advance(-len(chunk))
                        vectors = encode_chunk(model, role, chunk, advance)
                parts.append(vectors)
        if not parts:
            return np.zeros((0, model.get_embedding_dimension() or 0), dtype=np.float32)
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if sound:
            return found
        check_vectors(found, texts, name)
        if (empty := ~found.any(axis=1)).any():
            number = int(np.argmax(empty))
            raise BadInput(f"text {number + 1} ({texts[number][:60]!r}) has nothing to embed; remove it")
        return found

    roles = {role: partial(encode, role) for role in prompts}
    return Embedder(
        name=name,
        text=roles["text"],
        query=roles["query"],
        document=roles["document"],
        texts_per_call=_TEXTS_PER_CALL if on_gpu else None,
    )


def labelling_embedder(model: SentenceTransformer, *, name: str, progress: Progress = SILENT) -> Embedder:
    """Return the model as a teacher for many texts; every caller that labels gets the same vectors."""
    return embedder(model, name=name, half_on_gpu=True, progress=progress)


def _on_gpu(model: SentenceTransformer) -> bool:
    return model.device.type == "cuda"


def _half_copy(model: SentenceTransformer) -> SentenceTransformer | None:
    """Return a copy whose transformer computes in half precision, or None if the GPU has no memory for it.

    Buffers stay in float32, because rotary frequencies need it, and so does what follows the transformer.
    """
    copied: dict[int, Any] = {id(model.tokenizer): model.tokenizer}
    try:
        for weight in model[0].parameters():
            copied[id(weight)] = nn.Parameter(weight.detach().half(), requires_grad=False)
        twin: Any = copy.deepcopy(model, copied)
    except torch.OutOfMemoryError:
        return None
    twin[0].forward = MethodType(_float_outputs, twin[0])
    return cast("SentenceTransformer", twin)


def _float_outputs(module: Any, features: Features, **more: Any) -> Features:
    found: Features = type(module).forward(module, features, **more)
    halves = {name: value for name, value in found.items() if getattr(value, "dtype", None) == torch.float16}
    return found | {name: value.float() for name, value in halves.items()}


@torch.inference_mode()
def _encode(
    model: SentenceTransformer,
    tokenise: Callable[[list[str]], Features],
    texts: list[str],
    advance: Advance,
    *,
    batch_size: int,
) -> Vectors:
    """The vectors of the library's encode, in batches of texts."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    found: list[Tensor] = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        features = tokenise([texts[number] for number in rows])
        found.append(model(batch_to_device(features, model.device))["sentence_embedding"].float())
        advance(len(rows))
    vectors = np.empty((len(texts), found[0].shape[1]), dtype=np.float32)
    vectors[order] = torch.cat(found).cpu().numpy()
    return vectors


@torch.inference_mode()
def _encode_by_tokens(
    model: SentenceTransformer, short_cut: ShortCut, texts: Sequence[str], advance: Advance
) -> Vectors:
    """The vectors of the library's encode, in batches of tokens, while a thread tokenises the next texts."""
    device, most_tokens = model.device, _TOKENS_PER_BATCH
    found: Tensor | None = None
    with sound_gradients(), ExitStack() as stack:
        # Each operation on a GPU gives way to a thread that computes; without this, for 5 ms.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)
        for flat, numbers in stack.enter_context(ahead(_tokenised(short_cut, texts))):
            tokens, placed = flat.to(device), numbers.to(device)
            lengths, start = numbers[2].tolist(), 0
            while start < len(lengths):
                width = short_cut.aligned(lengths[start])
                end = min(start + max(1, most_tokens // width), len(lengths))
                rows, starts, counts = placed[:, start:end]
                try:
                    outputs = model(short_cut.features(tokens, starts, counts, width))
                    vectors = outputs["sentence_embedding"].float()
                    found = vectors.new_empty((len(texts), vectors.shape[1])) if found is None else found
                    found[rows] = vectors
                except torch.OutOfMemoryError as error:
                    if end - start == 1:
                        what = f"a text of {width:,} tokens needs more memory than the GPU has left"
                        raise BadInput(
                            f"{what}; shorten it, or hide the GPU with CUDA_VISIBLE_DEVICES="
                        ) from error
                    most_tokens = width * ((end - start) // 2)  # halves this batch and limits all later ones
                    free_gpu_memory()
                    continue
                advance(end - start)
                start = end
    assert found is not None
    if not found.is_cuda:
        return found.numpy()
    # Pinned memory is several times as fast to copy to, and torch keeps it for the next call.
    host = torch.empty_like(found, device="cpu", pin_memory=True)
    return host.copy_(found).numpy().copy()


def _tokenised(short_cut: ShortCut, texts: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of some texts in one array, and for each text its number, first token and length.

    The longest texts come first; those of one array are sorted by their number of tokens.
    """
    order = np.argsort(-np.fromiter(map(len, texts), np.int64, len(texts)), kind="stable")
    start, size = 0, _FIRST_SLICE
    while start < len(order):
        rows = order[start : start + size]
        flat, lengths = short_cut.flat([texts[row] for row in rows])
        numbers = np.stack([rows, lengths.cumsum() - lengths, lengths])
        yield torch.from_numpy(flat), torch.from_numpy(numbers[:, np.argsort(-lengths, kind="stable")])
        start, size = start + size, min(2 * size, _SLICE)


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

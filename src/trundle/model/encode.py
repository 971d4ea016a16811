"""Run a SentenceTransformer: encode texts to arrays, and handle the limits of a device."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from trundle.embedder import (
    LONGEST,
    Embedder,
    Role,
    Tokens,
    TwoSteps,
    Vectors,
    check_texts,
    check_vectors,
    is_sound,
)
from trundle.errors import BadInput
from trundle.model.anatomy import _BY_MODEL_TYPE
from trundle.model.heads import _pools_prompts, prompts_by_role
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of
from trundle.model.tokens import Features, ShortCut, _by_length, _tokenise_ahead, _TokenSlice, make_tokeniser
from trundle.progress import SILENT, Advance, Progress

_BATCH, _GPU_BATCH = 32, 256
_CHUNK, _GPU_CHUNK = 4096, 1 << 17
"""Texts whose vectors are computed together; they are sorted by length."""
_TOKENS_PER_BATCH = 98_304
"""Tokens per batch on a GPU, including padding: enough to use it fully."""
_TEXTS_PER_CALL = 1 << 16
"""Texts that a teacher on a GPU encodes at once."""
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
def _without_key_values(backbone: PreTrainedModel) -> Iterator[None]:
    """Inside the block, a decoder keeps no keys and values: a layer that runs twice would add them twice."""
    config: Any = backbone.config
    keeps = getattr(config, "use_cache", False)
    if keeps:
        config.use_cache = False
    try:
        yield
    finally:
        if keeps:
            config.use_cache = keeps


@contextmanager
def fast_forward(model: nn.Module) -> Iterator[None]:
    """Inside the block, use the fused attention kernel in every family, and keep no keys and values.

    Some families add a bias by relative position to the attention scores, and the library runs them without
    the kernel; it takes the bias as part of its mask. Only generation needs keys and values of earlier calls.
    """
    with ExitStack() as undo:
        for backbone in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
            undo.enter_context(_without_key_values(backbone))
            family = _BY_MODEL_TYPE.get(backbone.config.model_type)
            if family is None or family.unfused_attention is None or backbone.base_model is not backbone:
                continue
            encoder: Any = backbone.get_submodule(family.blocks.rpartition(".")[0])
            if "forward" in vars(encoder):  # by a block around this one
                continue
            # The library then makes a mask of booleans; its mask for other attention copies from the CPU,
            # which a CUDA graph can't hold.
            config: Any = backbone.config
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = "sdpa"
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
    mask = encoder.relative_attention_bias(buckets).permute(2, 0, 1)[None].contiguous()
    if attention_mask is not None:
        mask = mask.masked_fill(~attention_mask, torch.finfo(mask.dtype).min)
    # The kernel takes no other mask: torch would compute without it and say nothing.
    return type(encoder).forward(encoder, states, mask.contiguous(), **more)


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
def _plain_attention(model: SentenceTransformer) -> Iterator[None]:
    """Inside the block, attention is two matmuls and a softmax, which runtimes fuse and which it returns."""
    if static_table(model) is not None:
        yield
        return
    backbone = transformer_of(model).model
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("eager")
    try:
        yield
    finally:
        backbone.set_attn_implementation(before)


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
    runner = _Runner(model, name, batch_size, half_on_gpu, progress)
    roles = {role: partial(runner.encode, role) for role in runner.prompts}
    return Embedder(
        name=name,
        text=roles["text"],
        query=roles["query"],
        document=roles["document"],
        texts_per_call=_TEXTS_PER_CALL if runner.on_gpu else None,
        two_steps=runner.two_steps,
    )


class _Runner:
    """Encodes texts in the way that is fastest for a model and its device."""

    def __init__(
        self, model: SentenceTransformer, name: str, batch_size: int, half_on_gpu: bool, progress: Progress
    ) -> None:
        self.model, self.name, self.progress = model, name, progress
        self.on_gpu = _on_gpu(model)
        self.batch_size = max(batch_size, _GPU_BATCH) if self.on_gpu else batch_size
        self.prompts, self._pools_prompts = prompts_by_role(model), _pools_prompts(model)
        self._routed = model.truncate_dim is not None or any(isinstance(module, Router) for module in model)
        self._half = half_on_gpu and self.on_gpu and model.dtype == torch.float32

    @cached_property
    def _half_model(self) -> SentenceTransformer | None:
        return _half_copy(self.model)

    @cached_property
    def _tokeniser(self) -> Callable[[list[str]], Features]:
        return make_tokeniser(self.model)

    def _by_library(self, role: Role) -> bool:
        return self._routed or bool(self.prompts[role] and not self._pools_prompts)

    def encode(self, role: Role, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts in one role."""
        check_texts(texts)
        parts, size = [], _GPU_CHUNK if self.on_gpu and not self._routed else _CHUNK
        with self.progress.task(f"{self.name}: encoding", len(texts)) as advance:
            for start in range(0, len(texts), size):
                chunk = list(texts[start : start + size])
                compute = partial(self._encode_chunk, role=role, texts=chunk, advance=advance)
                parts.append(self._in_best_precision(compute, partial(advance, -len(chunk))))
        if not parts:
            return np.zeros((0, self.model.get_embedding_dimension() or 0), dtype=np.float32)
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if is_sound(found):
            return found
        check_vectors(found, texts, self.name)
        if (empty := ~found.any(axis=1)).any():
            number = int(np.argmax(empty))
            raise BadInput(f"text {number + 1} ({texts[number][:60]!r}) has nothing to embed; remove it")
        return found

    def _in_best_precision(
        self, compute: Callable[[SentenceTransformer], Vectors], before_retry: Callable[[], object]
    ) -> Vectors:
        """Compute with the copy in half precision, and with the model itself from the first overflow on."""
        self.model.eval()
        if (used := self._half_model if self._half else None) is not None:
            with fast_forward(used):
                vectors = compute(used)
            if is_sound(vectors) or np.isfinite(vectors).all():
                return vectors
            self._half = False
            del self._half_model, used
            before_retry()
        with fast_forward(self.model):
            return compute(self.model)

    def _encode_chunk(
        self, used: SentenceTransformer, *, role: Role, texts: list[str], advance: Advance
    ) -> Vectors:
        if self._by_library(role):
            encode = getattr(used, {"text": "encode"}.get(role, f"encode_{role}"))
            vectors = encode(
                texts, batch_size=self.batch_size, show_progress_bar=False, convert_to_numpy=True
            )
            advance(len(texts))
            return np.asarray(vectors, dtype=np.float32)
        prompt, tokeniser = self.prompts[role], self._tokeniser
        prompted = [prompt + text for text in texts] if prompt else texts
        if self.on_gpu and isinstance(tokeniser, ShortCut):
            with _tokenise_ahead(tokeniser, prompted) as slices:
                return _encode_by_tokens(used, tokeniser, slices, len(texts), advance)
        return _encode(used, tokeniser, prompted, advance, batch_size=self.batch_size)

    def two_steps(self) -> TwoSteps | None:
        """Return the steps by tokens, if texts of all roles can be encoded so."""
        if not self.on_gpu or any(map(self._by_library, self.prompts)):
            return None
        if not isinstance(short_cut := self._tokeniser, ShortCut):
            return None

        def tokenise(texts: Sequence[str], roles: Sequence[Role]) -> Tokens:
            check_texts(texts)
            prompts = self.prompts
            return short_cut.flat([prompts[role] + text for text, role in zip(texts, roles, strict=True)])

        def encode(tokens: Tokens) -> Vectors:
            slices, count = [_by_length(tokens)], len(tokens[1])
            return self._in_best_precision(
                lambda used: _encode_by_tokens(used, short_cut, slices, count, lambda _units: None),
                lambda: None,
            )

        return TwoSteps(tokenise=tokenise, encode=encode)


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
    model: SentenceTransformer,
    short_cut: ShortCut,
    slices: Iterable[_TokenSlice],
    count: int,
    advance: Advance,
) -> Vectors:
    """The vectors of the library's encode, in batches of tokens, while other threads tokenise and write."""
    device, most_tokens = model.device, _TOKENS_PER_BATCH
    found: Tensor | None = None
    with sound_gradients(), ExitStack() as stack:
        # Each operation on a GPU gives way to a thread that computes; without this, for 5 ms.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)
        for flat, numbers in slices:
            tokens, placed = flat.to(device), numbers.to(device)
            lengths, start = numbers[2].tolist(), 0
            while start < len(lengths):
                width = short_cut.aligned(lengths[start])
                end = min(start + max(1, most_tokens // width), len(lengths))
                rows, starts, counts = placed[:, start:end]
                try:
                    outputs = model(short_cut.features(tokens, starts, counts, width))
                    vectors = outputs["sentence_embedding"].float()
                    found = vectors.new_empty((count, vectors.shape[1])) if found is None else found
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
    # Pinned memory is several times as fast to copy to, and torch uses it again once the array is gone.
    return torch.empty_like(found, device="cpu", pin_memory=True).copy_(found).numpy()


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
                before(features["attention_mask"].bool())
                model(features)
                advance(len(chosen))
    finally:
        model.max_seq_length = limit

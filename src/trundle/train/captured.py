"""CUDA graphs: of any function, and of a backbone's passes over batches of changing shapes.

Launching the kernels of a small model takes longer than running them. Inside `captured_backbone` each batch
is padded to one of a few shapes, and each shape has two graphs, for the forward and the backward pass.
Gradients are those of plain steps, dropout included. Without a GPU the same functions run directly: tests
compare them with plain ones.

A loss that needs the vectors of several batches runs all their forward passes before the first backward one.
With memory to spare, activations are kept until then: a batch has a slot among those in flight, and each slot
has graphs of its own. Otherwise the backward graph runs forward again first, and activations are in
memory for one batch at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from trundle.model.encode import free_gpu_memory

_Replay = Callable[[], None]

_FREE_SHARE, _SLOTS = 0.5, 8
"""Activations are kept while this share of a GPU's memory is free, which leaves room for the optimizer and
for another batch, and for so many batches at most, because each of them takes time to capture."""
_WARM_UP = 2
"""Runs before a capture, in which libraries choose their kernels and compiled blocks are compiled."""
_FINEST = 16
"""Sizes up to four times this are padded to a multiple of it; above, to a quarter of a power of two."""


class _CaptureFailed(Exception):
    """The model can't be captured in a graph; plain steps still work."""


def _run_beside(run: _Replay, device: torch.device) -> None:
    """Runs on another stream, as torch asks for before a capture."""
    if device.type != "cuda":
        run()
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def _capture(
    run: _Replay, device: torch.device, pool: Any, *, mode: Literal["global", "thread_local"] = "global"
) -> _Replay:
    """Returns a function that replays `run`. While it captures in another mode, other threads may copy."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _CaptureFailed(str(error).splitlines()[0]) from error
    return graph.replay


@contextmanager
def captured_backbone(
    backbone: PreTrainedModel,
    *,
    longest: int,
    say: Callable[[str], None],
    of: nn.Module | None = None,
    keep: bool = True,
) -> Iterator[None]:
    """Inside this context, the backbone's passes with gradients are graphs, which pad behind the texts.

    Texts have at most `longest` tokens. `of` is the module that has the weights, if it is another. `keep`
    keeps activations for the backward pass if the GPU has the memory. If a capture fails, it says so, and the
    backward pass recomputes the forward one.
    """
    before = vars(backbone).get("forward")
    captured = _CapturedBackbone(backbone, list((of or backbone).parameters()), longest, say, keep=keep)
    backbone.forward = captured
    try:
        yield
    finally:
        del backbone.forward
        if before is not None:
            backbone.forward = before
        captured.release()


class _InFlight:
    """Held by the autograd node of a batch; dies with it if there is no backward pass."""


@dataclass(kw_only=True, eq=False)
class _Slot:
    """A slot among the batches in flight; its graphs share memory, because only one of them is in use."""

    pool: Any = None
    batch: weakref.ref[_InFlight] | None = None

    @property
    def taken(self) -> bool:
        """Whether a batch waits here for its backward pass."""
        return self.batch is not None and self.batch() is not None


@dataclass(kw_only=True)
class _Passes:
    """The graphs of one shape, and the tensors that they read and write."""

    inputs: dict[str, Tensor]
    slot: _Slot | None
    """Where activations are kept; None if the backward graph recomputes them."""
    states: Tensor = field(init=False)
    gradient: Tensor = field(init=False)
    forward: _Replay = field(init=False)
    backward: _Replay = field(init=False)

    def fill(self, inputs: dict[str, Tensor]) -> None:
        """Copies a batch into the graphs' input; the rest is padding."""
        for name, given in inputs.items():
            rows, width = given.shape
            padded = self.inputs[name]
            padded.zero_()
            padded[:rows, :width].copy_(given, non_blocking=True)
        self.inputs["attention_mask"][rows:, 0] = 1  # a row without tokens may become NaN


class _CapturedBackbone:
    """Takes the place of a backbone's forward function."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        weights: Sequence[nn.Parameter],
        longest: int,
        say: Callable[[str], None],
        *,
        keep: bool,
    ) -> None:
        self._backbone, self._weights, self._longest, self._say = backbone, weights, longest, say
        self._forward: Callable[..., Any] = backbone.forward
        self._passes: dict[Any, _Passes] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        """The graphs add to these."""
        self._keeps = keep
        self._slots: list[_Slot] = []
        self._recomputing = _Slot()
        self._failed = False

    def __call__(self, **inputs: Any) -> Any:
        texts = {name: one for name, one in inputs.items() if isinstance(one, Tensor)}
        on_gpu = texts["input_ids"].is_cuda
        if not torch.is_grad_enabled():
            # Compiling the blocks once more, without gradients, would take longer than all validations.
            with torch.compiler.set_stance("force_eager") if on_gpu else nullcontext():
                return self._forward(**inputs)
        settings = {name: one for name, one in inputs.items() if name not in texts}
        device = texts["input_ids"].device
        passes = None if self._failed else self._passes_of(texts, settings, device)
        if passes is None:
            return checkpoint(self._forward, use_reentrant=False, **inputs)
        anchor = torch.zeros((), device=device, requires_grad=True)
        states: Any = _Replayed.apply(anchor, self, passes, texts)  # type: ignore[no-untyped-call]
        return BaseModelOutput(last_hidden_state=states)

    def release(self) -> None:
        """Frees the graphs, except those that a backward pass still needs."""
        self._passes, self._slots, self._recomputing = {}, [], _Slot()
        free_gpu_memory()

    def _passes_of(
        self, texts: dict[str, Tensor], settings: dict[str, Any], device: torch.device
    ) -> _Passes | None:
        """Returns the graphs of the texts' shape; None if they can't be captured."""
        rows, width = texts["input_ids"].shape
        shape = _padded(rows), max(width, min(_padded(width), self._longest))
        bf16 = torch.is_autocast_enabled(device.type)
        while not self._failed:
            slot = self._free_slot() if self._keeps else None
            key = (shape, bf16, self._backbone.training, slot, *sorted(settings.items()))
            if key in self._passes:
                return self._passes[key]
            inputs = {name: one.new_zeros(shape) for name, one in texts.items()}
            passes = _Passes(inputs=inputs, slot=slot)
            run = partial(self._run, inputs, settings, bf16=bf16)
            try:
                self._capture_passes(passes, run, texts, device)
                if slot is None or _has_memory(device):
                    self._passes[key] = passes
                    return passes
            except (_CaptureFailed, torch.OutOfMemoryError) as error:
                if slot is None:
                    self._failed = True
                    self._say(f"steps can't be captured as CUDA graphs, so they are slower: {error}")
            self._keeps = False
            del passes  # after the except block, whose traceback holds tensors
            self.release()
        return None

    def _free_slot(self) -> _Slot | None:
        free = next((slot for slot in self._slots if not slot.taken), None)
        if free is None and len(self._slots) < _SLOTS:
            free = _Slot()
            self._slots.append(free)
        return free

    def _run(self, inputs: dict[str, Tensor], settings: dict[str, Any], *, bf16: bool) -> Tensor:
        # Every replay must cast the weights again.
        kind = inputs["input_ids"].device.type
        with torch.enable_grad(), torch.autocast(kind, torch.bfloat16, enabled=bf16, cache_enabled=False):
            states: Tensor = self._forward(**inputs, **settings).last_hidden_state
        return states

    def _capture_passes(
        self, passes: _Passes, run: Callable[[], Tensor], texts: dict[str, Tensor], device: torch.device
    ) -> None:
        self.attach_gradients()
        before = {weight: weight.grad.clone() for weight in self._weights if weight.grad is not None}
        rng = _random_state(device)
        passes.fill(texts)
        kept: list[Tensor] = []

        def forward() -> None:
            states = run()
            passes.states.copy_(states.detach())
            if passes.slot is not None:
                kept[:] = [states]

        def backward() -> None:
            torch.autograd.backward(run() if passes.slot is None else kept.pop(), passes.gradient)

        def warm_up() -> None:
            states = run()
            passes.states, passes.gradient = torch.empty_like(states), torch.zeros_like(states)
            torch.autograd.backward(states, passes.gradient)

        try:
            for _ in range(_WARM_UP):
                _run_beside(warm_up, device)
            self._gradients = {weight: weight.grad for weight in self._weights if weight.grad is not None}
            slot = passes.slot or self._recomputing
            if slot.pool is None and device.type == "cuda":
                slot.pool = torch.cuda.graph_pool_handle()
            passes.forward = _capture(forward, device, slot.pool, mode="thread_local")
            passes.backward = _capture(backward, device, slot.pool, mode="thread_local")
        finally:
            for weight in self._weights:
                if weight.grad is not None:
                    weight.grad.copy_(before[weight]) if weight in before else weight.grad.zero_()
            _set_random_state(rng, device)

    def attach_gradients(self) -> None:
        """Makes the weights' gradients those that the graphs add to; an optimizer may have removed them."""
        for weight, gradient in self._gradients.items():
            if weight.grad is not gradient:
                gradient.zero_() if weight.grad is None else gradient.copy_(weight.grad)
                weight.grad = gradient


class _Replayed(torch.autograd.Function):
    """Replays the graphs of a shape. The backward pass adds to the weights' gradients itself."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, captured: _CapturedBackbone, passes: _Passes, texts: dict[str, Tensor]
    ) -> Tensor:
        ctx.captured, ctx.passes, ctx.texts = captured, passes, texts
        passes.fill(texts)
        if passes.slot is None:
            ctx.rng = _random_state(passes.states.device)
        else:
            ctx.in_flight = _InFlight()
            passes.slot.batch = weakref.ref(ctx.in_flight)
        passes.forward()
        rows, width = texts["input_ids"].shape
        return passes.states[:rows, :width].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        passes: _Passes = ctx.passes
        slot = passes.slot
        if slot and (slot.batch is None or slot.batch() is not ctx.in_flight):
            raise RuntimeError("the activations of a captured batch serve one backward pass only")
        rows, width = gradient.shape[:2]
        passes.gradient.zero_()
        passes.gradient[:rows, :width].copy_(gradient)
        ctx.captured.attach_gradients()
        if slot:
            passes.backward()
            slot.batch = None
            return None, None, None, None
        passes.fill(ctx.texts)
        now = _random_state(gradient.device)
        _set_random_state(ctx.rng, gradient.device)  # the same dropout as before
        passes.backward()
        _set_random_state(now, gradient.device)
        return None, None, None, None


def _has_memory(device: torch.device) -> bool:
    """Whether enough of a GPU's memory is free for activations to be kept."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return free >= _FREE_SHARE * total


def _padded(size: int) -> int:
    step = max(_FINEST, (1 << (size - 1).bit_length()) // 4)
    return -(-size // step) * step


def _random_state(device: torch.device) -> Tensor:
    """Returns the state of the device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: Tensor, device: torch.device) -> None:
    """Restores the state of the device's generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)

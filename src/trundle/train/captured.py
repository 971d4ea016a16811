"""CUDA graphs: of any function, and of a backbone's passes over batches of changing shapes.

Launching the kernels of a small model takes longer than running them. Inside `captured_backbone` each batch
is padded to one of a few shapes, and each shape has two graphs: one runs forward, the other forward again
and backward. So activations are kept for one batch at a time, however many vectors a loss needs, and
gradients are those of plain steps, dropout included. Without a GPU the same functions run directly: tests
compare them with plain ones.
"""

from __future__ import annotations

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
    backbone: PreTrainedModel, *, longest: int, say: Callable[[str], None], of: nn.Module | None = None
) -> Iterator[None]:
    """Inside this context, the backbone's passes with gradients are graphs, which pad behind the texts.

    Texts have at most `longest` tokens. `of` is the module that has the weights, if it is another. If a
    capture fails, it says so, and the backward pass recomputes the forward one.
    """
    before = vars(backbone).get("forward")
    captured = _CapturedBackbone(backbone, list((of or backbone).parameters()), longest, say)
    backbone.forward = captured
    try:
        yield
    finally:
        del backbone.forward
        if before is not None:
            backbone.forward = before
        captured.release()


@dataclass(kw_only=True)
class _Passes:
    """The graphs of one shape, and the tensors that they read and write."""

    inputs: dict[str, Tensor]
    states: Tensor = field(init=False)
    gradient: Tensor = field(init=False)
    forward: _Replay = field(init=False)
    backward: _Replay = field(init=False)

    def fill(self, inputs: dict[str, Tensor]) -> None:
        """Copies a batch into the graphs' input; the rest is padding."""
        for name, given in inputs.items():
            rows, width = given.shape
            place = self.inputs[name]
            place.zero_()
            place[:rows, :width].copy_(given, non_blocking=True)
        self.inputs["attention_mask"][rows:, 0] = 1  # a row without tokens may become NaN


class _CapturedBackbone:
    """Takes the place of a backbone's forward function."""

    def __init__(
        self,
        backbone: PreTrainedModel,
        weights: Sequence[nn.Parameter],
        longest: int,
        say: Callable[[str], None],
    ) -> None:
        self._backbone, self._weights, self._longest, self._say = backbone, weights, longest, say
        self._forward: Callable[..., Any] = backbone.forward
        self._passes: dict[Any, _Passes] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        """The graphs add to these."""
        self._pool: Any = None
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
        self._passes, self._pool = {}, None
        free_gpu_memory()

    def _passes_of(
        self, texts: dict[str, Tensor], settings: dict[str, Any], device: torch.device
    ) -> _Passes | None:
        """Returns the graphs of the texts' shape; None if they can't be captured."""
        rows, width = texts["input_ids"].shape
        shape = _padded(rows), max(width, min(_padded(width), self._longest))
        bf16 = torch.is_autocast_enabled(device.type)
        key = (shape, bf16, self._backbone.training, *sorted(settings.items()))
        if key not in self._passes:
            inputs = {name: one.new_zeros(shape) for name, one in texts.items()}
            run = partial(self._run, inputs, settings, bf16=bf16)
            try:
                self._passes[key] = self._make_passes(run, inputs, texts, device)
            except (_CaptureFailed, torch.OutOfMemoryError) as error:
                self._failed = True
                self._say(f"steps can't be captured as CUDA graphs, so they are slower: {error}")
        if self._failed:  # after the except block, whose traceback holds tensors
            self.release()
        return self._passes.get(key)

    def _run(self, inputs: dict[str, Tensor], settings: dict[str, Any], *, bf16: bool) -> Tensor:
        # Every replay must cast the weights again.
        kind = inputs["input_ids"].device.type
        with torch.enable_grad(), torch.autocast(kind, torch.bfloat16, enabled=bf16, cache_enabled=False):
            states: Tensor = self._forward(**inputs, **settings).last_hidden_state
        return states

    def _make_passes(
        self,
        run: Callable[[], Tensor],
        inputs: dict[str, Tensor],
        texts: dict[str, Tensor],
        device: torch.device,
    ) -> _Passes:
        self.attach_gradients()
        before = {weight: weight.grad.clone() for weight in self._weights if weight.grad is not None}
        rng = _random_state(device)
        passes = _Passes(inputs=inputs)
        passes.fill(texts)

        def forward() -> None:
            passes.states.copy_(run().detach())

        def backward() -> None:
            torch.autograd.backward(run(), passes.gradient)

        def warm_up() -> None:
            states = run()
            passes.states, passes.gradient = torch.empty_like(states), torch.zeros_like(states)
            torch.autograd.backward(states, passes.gradient)

        try:
            for _ in range(_WARM_UP):
                _run_beside(warm_up, device)
            self._gradients = {weight: weight.grad for weight in self._weights if weight.grad is not None}
            if self._pool is None and device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            passes.forward = _capture(forward, device, self._pool, mode="thread_local")
            passes.backward = _capture(backward, device, self._pool, mode="thread_local")
        finally:
            for weight in self._weights:
                if weight.grad is not None:
                    weight.grad.copy_(before[weight]) if weight in before else weight.grad.zero_()
            _set_random_state(rng, device)
        return passes

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
        ctx.rng = _random_state(passes.states.device)
        passes.forward()
        rows, width = texts["input_ids"].shape
        return passes.states[:rows, :width].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        passes: _Passes = ctx.passes
        device = gradient.device
        rows, width = gradient.shape[:2]
        passes.fill(ctx.texts)
        passes.gradient.zero_()
        passes.gradient[:rows, :width].copy_(gradient)
        ctx.captured.attach_gradients()
        now = _random_state(device)
        _set_random_state(ctx.rng, device)  # the same dropout as before
        passes.backward()
        _set_random_state(now, device)
        return None, None, None, None


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

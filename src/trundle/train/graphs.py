"""Training steps on a GPU as CUDA graphs: the host only copies positions and replays.

Launching the kernels of a small model takes longer than running them. So each padded length gets one graph
that gathers a batch from the texts in the GPU's memory, runs the model forward and backward and adds to the
gradients; one more graph clips them and updates the weights. Between the two, several processes average their
gradients. Without a GPU the same functions run directly: tests compare them with the plain trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.model.encode import free_gpu_memory, sound_gradients
from trundle.train.batches import _IN_PARTS, Batches, ByBucket, _LoadedPart
from trundle.train.captured import (
    _WARM_UP,
    _capture,
    _CaptureFailed,
    _random_state,
    _run_beside,
    _set_random_state,
)
from trundle.train.trainer import _Loss, _Trainer

_B = TypeVar("_B")

_IN_FLIGHT = 16
"""Steps that the host may be ahead of the GPU."""
_HISTORY = 4096
"""Steps whose losses the GPU keeps until they are read."""


@dataclass(frozen=True)
class _Part:
    """The graph of one padded length, and the positions it reads."""

    positions: Tensor
    replay: Callable[[], None]


class _GraphTrainer(_Trainer[_B]):
    """Makes the steps of `_Trainer` with batches of positions that are gathered on the device."""

    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[_Loss[_B]],
        batches: Batches[_B],
        *,
        accumulate: int = 1,
        **settings: Any,
    ) -> None:
        assert batches.gather is not None
        assert isinstance(batches.order, ByBucket)
        super().__init__(model, losses, **settings)
        self._module.caches_casts = False  # every replay must cast the weights again
        self._gather, self._order = batches.gather, batches.order
        self._texts = batches.order.batch_size // self.processes
        self._accumulate = accumulate
        self._restored: Mapping[str, Any] | None = None
        self._made, self._unread = 0, 0
        numbers = torch.zeros(2, dtype=torch.float32, device=self.device)
        self._rate, self._loss = numbers[0], numbers[1]
        self._history = torch.zeros(_HISTORY, 2, device=self.device)
        self._place = torch.zeros(1, dtype=torch.long, device=self.device)
        self._parts: dict[tuple[int, bool], _Part] = {}
        """By padded length, and whether the weights are exact."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _prepared(self) -> nn.Module:
        return self._module.to(self.device)  # gradients are averaged here, not by a wrapper

    def prepare(self, say: Callable[[str], None]) -> None:
        """Captures the graphs, the longest texts first; raises `_CaptureFailed` if that is not possible."""
        self._module.train(self._dropout)
        rng = _random_state(self.device)
        pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        most = math.inf  # tokens in a part
        computings = {self.exact, False}
        with sound_gradients():
            for width, exact in product(reversed(self._order.widths), computings):
                self.exact = exact
                while (part := self._part(width, size := self._fitting(width, most), pool)) is None:
                    if most == math.inf:
                        say(_IN_PARTS)
                    most = width * size - 1
                self._parts[width, exact] = part
            self.exact = max(computings)
            _set_random_state(rng, self.device)
            self._make_optimizer()
            self._update = _capture(self._step_weights, self.device, pool)

    def _fitting(self, width: int, most: float) -> int:
        """The texts of a part with at most so many tokens, of which several make up a batch."""
        parts = (self._texts // size for size in range(1, self._texts + 1) if self._texts % size == 0)
        return next((texts for texts in parts if texts * width <= most), 1)

    def _part(self, width: int, size: int, pool: Any) -> _Part | None:
        """Captures the gradients of `size` texts; returns None if they do not fit into memory."""
        positions = torch.from_numpy(self._order.batch(0)[:size].copy()).to(self.device)
        # With padding, as transformers does not check in a capture whether a mask is needed.
        positions[0] = self._order.shortest
        share = size / self._texts / self._accumulate

        def run() -> None:
            with self.computing():
                loss = self._module(self._gather(positions, width), 0) * share
                loss.backward()
            self._loss.add_(loss.detach())

        try:
            for _ in range(_WARM_UP):
                _run_beside(run, self.device)
            replay = _capture(run, self.device, pool)
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise _CaptureFailed("the GPU has no memory for them") from error
            replay = None
        # After the except block, because its traceback holds the tensors that did not fit.
        self._clear_gradients()
        if replay is None:
            free_gpu_memory()
        return None if replay is None else _Part(positions, replay)

    def _clear_gradients(self) -> None:
        for weight in self._weights:
            if weight.grad is not None:
                weight.grad.zero_()
        self._loss.zero_()

    def _make_optimizer(self) -> None:
        """Makes the optimizer of the weights that got a gradient, with its state and a rate on the device."""
        weights = [weight for weight in self._weights if weight.grad is not None]
        if not weights:
            raise BadInput("no weight of the model gets a gradient; check the loss")
        self._weights = weights
        self._optimizer = self._new_optimizer(lr=self._rate, fused=True, capturable=self.on_gpu)
        self._rate.zero_()
        self._optimizer.step()  # makes the moments: zero gradients and a zero rate change nothing
        for state in self._optimizer.state.values():
            state["step"].zero_()
        if self._restored is not None:
            super().restore(self._restored)
            self._restored = None
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate

    def _step_weights(self) -> None:
        norm = self._loss
        if (most := self._updates.clip_norm) is not None:
            norm = nn.utils.clip_grad_norm_(self._weights, most, foreach=True)
        self._optimizer.step()
        self._history.index_copy_(0, self._place, torch.stack([self._loss, norm])[None])
        self._place.add_(1).remainder_(_HISTORY)
        self._clear_gradients()

    def load(self, batches: Batches[_B], number: int) -> _LoadedPart[Any]:  # noqa: ARG002
        """Loads the positions of this process's part of a batch."""
        positions = torch.from_numpy(self._order.batch(number)[self.rank :: self.processes].copy())
        part = (self._order.width(number), positions.pin_memory() if self.on_gpu else positions)
        return _LoadedPart(part=part, weight=1.0, texts=self._order.batch_size)

    def step(self, loaded: Sequence[_LoadedPart[Any]], rate: float) -> None:
        """Makes one optimizer step; the host waits only when it is far ahead."""
        if self.model.training is not self._dropout:  # after a validation; a graph has kept the mode
            self._module.train(self._dropout)
        self._rate.fill_(rate)
        with nullcontext() if self.on_gpu else sound_gradients():
            for width, positions in (one.part for one in loaded):
                part = self._parts[width, self.exact]
                for piece in positions.view(-1, len(part.positions)):
                    part.positions.copy_(piece, non_blocking=True)
                    part.replay()
        if self.processes > 1:
            self._average_gradients()
        self._update()
        self._made, self._unread = self._made + 1, self._unread + 1
        if self.on_gpu and self._made % _IN_FLIGHT == 0:
            torch.cuda.synchronize(self.device)

    def _average_gradients(self) -> None:
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        flat /= self.processes
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def mean_loss(self, step: int) -> float:
        """Returns the mean loss of the steps since the last call, up to `step`; rejects NaN and infinity."""
        end = int(self._place)
        rows = self._history.roll(-end, 0)[-min(self._unread, _HISTORY) :]
        self._losses, self._norms = list(rows[:, 0]), list(rows[:, 1])
        self._unread = 0
        return super().mean_loss(step)

    def validate(self, held_out: Sequence[tuple[_B, int]], step: int) -> float:
        # Compiling the blocks once more, without gradients, would take longer than all validations.
        with torch.compiler.set_stance("force_eager") if self.on_gpu else nullcontext():
            return super().validate(held_out, step)

    def state(self) -> dict[str, Any]:
        """Returns what the next steps depend on; before `prepare`, what was restored."""
        return dict(self._restored) if self._restored is not None else super().state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keeps the state until `prepare`, which makes the optimizer."""
        self._restored = state

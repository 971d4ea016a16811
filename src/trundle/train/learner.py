"""A module that learns: one optimizer step, one look at held-out batches, on whatever device there is.

What this is not: it has no idea of time, order or disk. The loop tells it when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import gather_object, recursively_apply, send_to_device
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.model.encode import free_gpu_memory, multiplies_bf16, sound_gradients
from trundle.train.batches import Batches, _Divider, _load_part, _Loaded
from trundle.train.checkpoint import _copies, _put_back

_B = TypeVar("_B")
_Precision = Literal["fp32", "bf16"]


def precision_for(wanted: Literal["auto", "fp32", "bf16"]) -> _Precision:
    """auto: bf16 where there are units for it, fp32 elsewhere."""
    if wanted != "auto":
        return wanted
    there = torch.accelerator.is_available() or multiplies_bf16(torch.device("cpu"))
    return "bf16" if there else "fp32"


class _Objective(nn.Module, Generic[_B]):
    """The objective as a module's forward, so that several processes meet in one backward pass."""

    def __init__(
        self, model: nn.Module, objectives: Sequence[Callable[[_B], Tensor]], device: str, *, bf16: bool
    ) -> None:
        super().__init__()
        self.model = model
        self._objectives = objectives
        self._device = device
        self._bf16 = bf16

    def forward(self, batch: _B, number: int) -> Tensor:
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bf16):
            return self._objectives[number](batch).float()


class _Learner(Generic[_B]):
    """A model with its objectives and optimizer, in one or several processes.

    The losses of several objectives are added, but each is taken back before the next is begun: the same gradients in the
    memory of one.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[Callable[[_B], Tensor]],
        *,
        precision: _Precision,
        weight_decay: float,
        clip_norm: float | None,
        dropout: bool,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
        divider: _Divider[_B] | None = None,
    ) -> None:
        # A backbone may hold weights that its objective never reaches, such as a pooler nobody asks.
        parallel = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
        on_cpu = not torch.accelerator.is_available()
        self._accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[parallel])
        self.device: torch.device = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.processes: int = self._accelerator.num_processes
        self.model = model
        self._module = _Objective(model, objectives, self.device.type, bf16=precision == "bf16").train(
            dropout
        )
        self._numbers = range(len(objectives))
        self._parallel = self._accelerator.prepare_model(self._module)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = _adamw(self._weights, weight_decay, self.device)
        self._clip_norm = clip_norm
        self._dropout = dropout
        self.computing = computing
        # Where several processes meet in a backward pass, one of them can't begin anew.
        self._divider = divider if self.processes == 1 else None
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def load(self, batches: Batches[_B], number: int) -> _Loaded[_B]:
        """What this process needs of a batch, in memory that a GPU can fetch from by itself."""
        loaded = _load_part(batches, number, rank=self.rank, processes=self.processes)
        if self.device.type != "cuda":
            return loaded
        return replace(loaded, part=recursively_apply(_pinned, loaded.part))

    def load_all(self, batches: Batches[_B]) -> list[tuple[_B, int]]:
        """What this process needs of one epoch, each batch with its number of texts."""
        mine = range(batches.order.per_epoch)
        if batches.size is None:
            mine = mine[self.rank :: self.processes]
        return [(batches.load(texts), len(texts)) for texts in map(batches.order.batch, mine)]

    def step(self, loaded: _Loaded[_B], rate: float) -> None:
        """One optimizer step. Nothing here waits for the device: the losses are read later, many at once."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self.model.training is not self._dropout:
            self._module.train(self._dropout)
        torch.clear_autocast_cache()  # inside a caller's own autocast it would hold the weights of the last step
        with sound_gradients(), self.computing():
            on_device = send_to_device(loaded.part, self.device, non_blocking=True)
            losses = self._gradients(on_device, loaded.weight)
        if self._clip_norm is not None:
            self._norms.append(self._accelerator.clip_grad_norm_(self._weights, self._clip_norm))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum())

    def _gradients(self, batch: _B, weight: float) -> list[Tensor]:
        """Take them in as few parts as memory allows; the losses, which add up to the batch's."""
        divider = self._divider
        while True:
            parts = [(batch, 1.0)] if divider is None else divider.parts(batch)
            try:
                return [loss for part, share in parts for loss in self._backward(part, weight * share)]
            except torch.OutOfMemoryError:
                if divider is None or not divider.give_way(batch):
                    raise
            # Behind the except: until here its traceback held the tensors that had no room.
            self._optimizer.zero_grad()
            torch.clear_autocast_cache()
            free_gpu_memory()

    def _backward(self, part: _B, weight: float) -> list[Tensor]:
        losses = []
        for number in self._numbers:
            last = number == self._numbers[-1]
            with nullcontext() if last else self._accelerator.no_sync(self._parallel):
                loss = self._parallel(part, number) * weight
                if loss.requires_grad:
                    self._accelerator.backward(loss)
            losses.append(loss.detach())
        return losses

    def mean_loss(self, step: int) -> float:
        """The mean loss of the steps since it was last asked for, up to `step`; one that went wrong is named."""
        losses: list[float] = self._accelerator.reduce(torch.stack(self._losses), "mean").tolist()
        norms = torch.stack(self._norms).tolist() if self._norms else losses
        for number, values in enumerate(zip(losses, norms, strict=True), start=step - len(losses) + 1):
            if not all(map(math.isfinite, values)):
                raise BadInput(
                    f"the loss or its gradient became NaN or infinite at step {number}; "
                    "try a lower learning rate, a longer warm-up or fp32, and look for damaged targets"
                )
        self._losses, self._norms = [], []
        return sum(losses) / len(losses)

    def validate(self, held_out: Sequence[tuple[_B, int]], step: int) -> float:
        """The mean loss over the texts of all processes' held-out batches, without dropout."""
        self._module.eval()
        torch.clear_autocast_cache()
        total = torch.zeros(2, device=self.device)
        with torch.no_grad(), self.computing():
            for batch, texts in held_out:
                on_device = send_to_device(batch, self.device)
                loss = torch.stack([self._module(on_device, number) for number in self._numbers]).sum()
                total += torch.stack([loss * texts, torch.full_like(loss, texts)])
        summed, count = self._accelerator.reduce(total, "sum").tolist()
        if not math.isfinite(summed):
            raise BadInput(
                f"the validation loss is NaN or infinite at step {step}; look for damaged texts or targets"
            )
        return float(summed / count)

    def state(self) -> dict[str, Any]:
        """All that decides how the training goes on: weights, optimizer, and every process's dice."""
        dice = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            dice["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "weights": _copies(self.model),
            "optimizer": self._optimizer.state_dict(),
            "dice": gather_object([dice]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a stored state; one that was made without a GPU knows nothing of its dice."""
        _put_back(self.model, state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        dice = state["dice"][self.rank]
        torch.set_rng_state(dice["cpu"])
        if self.device.type == "cuda" and "cuda" in dice:
            torch.cuda.set_rng_state(dice["cuda"], self.device)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


def _adamw(
    weights: Sequence[nn.Parameter], weight_decay: float, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW; biases and norms, which have one axis, are not pulled to zero."""
    if not weights:
        raise BadInput("every weight of the model is frozen; leave some of them to train")
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, fused=device.type in ("cpu", "cuda"))


_Shape = Callable[[int, int], float]
"""(step, steps) → share of the peak learning rate; steps count from 0, the last is steps − 1."""


def _constant(step: int, steps: int) -> float:
    """The peak rate all the way."""
    return 1.0


def linear(*, end: float = 0.0) -> _Shape:
    """A straight line from the peak down to `end` of it at the very last step."""

    def shape(step: int, steps: int) -> float:
        return 1.0 + (end - 1.0) * step / max(1, steps - 1)

    return shape


def leaf_cycles(epoch_steps: int, *, epochs: int = 10, cycles: int = 3, end: float = 0.1) -> _Shape:
    """LEAF's saw: down to `end` over `epochs` epochs, one stair per epoch, then back up, `cycles` times.

    Another number of steps gets the nearest number of whole cycles, stretched, so that it always ends low. A run
    shorter than one cycle has too few epochs for stairs and goes down a little at every step.
    """
    descent = linear(end=end)

    def shape(step: int, steps: int) -> float:
        cycle_steps = epochs * epoch_steps
        if steps < cycle_steps:
            return descent(step, steps)
        fitting = min(cycles, round(steps / cycle_steps))
        cycle = step * fitting // steps
        first, after = (-(-number * steps // fitting) for number in (cycle, cycle + 1))
        stairs = round((after - first) / epoch_steps)
        return descent((step - first) * stairs // (after - first), stairs)

    return shape


def _learning_rate(step: int, steps: int, *, peak: float, warmup: int, shape: _Shape) -> float:
    """The rate of one step: up in a straight line during the warm-up, then the shape over the steps that follow.

    A run too short for its warm-up spends half of itself on it.
    """
    warmup = min(warmup, steps // 2)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * shape(step - warmup, steps - warmup)


def _steps_that_fit(done: int, *, seconds_left: float, seconds_per_step: float) -> int:
    """How many steps there are in all, if the time that is left is used up at the present speed."""
    return done + max(0, int(seconds_left / max(seconds_per_step, 1e-9)))

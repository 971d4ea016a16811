"""What the loop calls: optimizer steps and validations on any device, learning rates, and checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import gather_object, recursively_apply, send_to_device
from torch import Tensor, nn
from torch.optim import AdamW

from trundle.errors import BadInput
from trundle.folders import atomic_folder, write_atomic
from trundle.model.encode import free_gpu_memory, multiplies_bf16, sound_gradients
from trundle.records import TRAINING_LOG_FILE, TrainingRecord, training_log_up_to
from trundle.train.batches import Batches, BatchSplitter, _load_part, _LoadedPart

_B = TypeVar("_B")
_Precision = Literal["fp32", "bf16"]
_OptimizerName = Literal["adamw", "muon"]
_Loss = Callable[[nn.Module, _B], Tensor]
_CHECKPOINTS = "checkpoints"
_STATE_FILE = "state.pt"


def precision_for(wanted: Literal["auto", "fp32", "bf16"]) -> _Precision:
    """Resolves auto: bf16 if the device has units for it, otherwise fp32."""
    if wanted != "auto":
        return wanted
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "bf16" if multiplies_bf16(found or torch.device("cpu")) else "fp32"


@dataclass(frozen=True, kw_only=True)
class _Updates:
    """How gradients change the weights."""

    optimizer: _OptimizerName = "adamw"
    weight_decay: float
    clip_norm: float | None


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How the model computes in steps and validations, where that differs from how it is stored."""

    context: Callable[[], AbstractContextManager[None]] = nullcontext
    """Model and gradients are computed in it. It may replace weights; optimizer steps change the own ones."""
    begin: Callable[[], None] = lambda: None
    """Called once if the first steps ignored the context, before the first one that does not."""
    kept: Sequence[Tensor] = ()
    """What the context reads and `begin` writes, always in place; checkpoints contain it."""


class _LossModule(nn.Module, Generic[_B]):
    """The losses as a module's forward pass, so that several processes synchronise in its backward pass."""

    def __init__(self, model: nn.Module, losses: Sequence[_Loss[_B]], device: str, *, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self._losses = losses
        self._device = device
        self._bf16 = bf16
        self.caches_casts = True

    def forward(self, batch: _B, number: int) -> Tensor:
        cache = self.caches_casts
        with torch.autocast(self._device, torch.bfloat16, enabled=self._bf16, cache_enabled=cache):
            return self._losses[number](self.model, batch).float()


class _Trainer(Generic[_B]):
    """A model with its losses and optimizer, in one or several processes.

    Several losses are added, but the backward pass of each runs before the next forward pass: the same
    gradients in the memory of one.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[_Loss[_B]],
        *,
        precision: _Precision,
        updates: _Updates,
        dropout: bool,
        computing: Computing | None = None,
        splitter: BatchSplitter[_B] | None = None,
    ) -> None:
        # A backbone may hold weights that the loss never reaches, such as an unused pooler.
        parallel = DistributedDataParallelKwargs(find_unused_parameters=True, broadcast_buffers=False)
        on_cpu = not torch.accelerator.is_available()
        self._accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[parallel])
        self.device: torch.device = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.processes: int = self._accelerator.num_processes
        self.model = model
        self._module = _LossModule(model, losses, self.device.type, bf16=precision == "bf16").train(dropout)
        self._numbers = range(len(losses))
        self._parallel = self._prepared()
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not self._weights:
            raise BadInput("every weight of the model is frozen; leave some of them to train")
        self._updates = updates
        fused = self.device.type in ("cpu", "cuda")
        self._optimizer = self._new_optimizer(fused=fused)
        self._dropout = dropout
        self._computing = computing or Computing()
        for tensor in self._computing.kept:
            tensor.data = tensor.data.to(self.device)
        self.exact = False
        """Whether steps and validations ignore `computing`."""
        # Processes synchronise in the backward pass, so one of them can't repeat it alone.
        self._splitter = splitter if self.processes == 1 else None
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def computing(self) -> AbstractContextManager[None]:
        """Returns the context of the next step or validation."""
        return nullcontext() if self.exact else self._computing.context()

    def leave_exact(self) -> None:
        """Uses `computing` from here on; all processes begin with the weights of the first."""
        self.exact = False
        self._computing.begin()
        if self.processes > 1:
            for tensor in (*self.model.parameters(), *self._computing.kept):
                torch.distributed.broadcast(tensor.data, 0)

    def _prepared(self) -> Any:
        return self._accelerator.prepare_model(self._module)

    def _new_optimizer(self, **adamw: Any) -> AdamW | _Muon:
        matrices = _linear_weights(self.model) if self._updates.optimizer == "muon" else set()
        others = [weight for weight in self._weights if weight not in matrices]
        decay = self._updates.weight_decay
        found = AdamW(_decay_groups(others, decay), **adamw)
        if not matrices:
            return found
        chosen = [weight for weight in self._weights if weight in matrices]
        return _Muon(chosen, found, weight_decay=decay)

    def load(self, batches: Batches[_B], number: int) -> _LoadedPart[_B]:
        """Loads this process's part of a batch, into pinned memory if the device is a GPU."""
        loaded = _load_part(batches, number, rank=self.rank, processes=self.processes)
        on_gpu = self.device.type == "cuda"
        return replace(loaded, part=recursively_apply(_pinned, loaded.part)) if on_gpu else loaded

    def load_all(self, batches: Batches[_B]) -> list[tuple[_B, int]]:
        mine = range(batches.order.per_epoch)
        if batches.size is None:
            mine = mine[self.rank :: self.processes]
        return [(batches.load(texts), len(texts)) for texts in map(batches.order.batch, mine)]

    def step(self, loaded: Sequence[_LoadedPart[_B]], rate: float) -> None:
        """Makes one optimizer step with the mean gradient of these batches.

        It does not wait for the device: losses are read later, many at once.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self.model.training is not self._dropout:
            self._module.train(self._dropout)
        torch.clear_autocast_cache()  # inside a caller's autocast it would hold the weights of the last step
        with sound_gradients(), self.computing():
            losses = self._gradients(loaded)
        if (most := self._updates.clip_norm) is not None:
            self._norms.append(self._accelerator.clip_grad_norm_(self._weights, most))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum())

    def _gradients(self, loaded: Sequence[_LoadedPart[_B]]) -> list[Tensor]:
        """Computes gradients in as few parts as memory allows; returns losses that add up to the step's."""
        splitter = self._splitter
        while True:
            losses = []
            try:
                for number, one in enumerate(loaded, start=1):
                    batch = send_to_device(one.part, self.device, non_blocking=True)
                    weight, last = one.weight / len(loaded), number == len(loaded)
                    for part, share in [(batch, 1.0)] if splitter is None else splitter.parts(batch):
                        losses += self._backward(part, weight * share, last=last)
                return losses
            except torch.OutOfMemoryError:
                if splitter is None or not splitter.lower_limit(batch):
                    raise
            # After the except block, because its traceback holds the tensors that did not fit.
            self._optimizer.zero_grad()
            torch.clear_autocast_cache()
            free_gpu_memory()

    def _backward(self, part: _B, weight: float, *, last: bool) -> list[Tensor]:
        """Adds to the gradients; processes synchronise in the last backward pass of a step."""
        losses = []
        for number in self._numbers:
            syncs = last and number == self._numbers[-1]
            with nullcontext() if syncs else self._accelerator.no_sync(self._parallel):
                loss = self._parallel(part, number) * weight
                if loss.requires_grad:
                    self._accelerator.backward(loss)
            losses.append(loss.detach())
        return losses

    def mean_loss(self, step: int) -> float:
        """Returns the mean loss of the steps since the last call, up to `step`; rejects NaN and infinity."""
        losses: list[float] = self._accelerator.reduce(torch.stack(self._losses), "mean").tolist()
        norms = torch.stack(self._norms).tolist() if self._norms else losses
        for number, values in enumerate(zip(losses, norms, strict=True), start=step - len(losses) + 1):
            if not all(map(math.isfinite, values)):
                raise BadInput(
                    f"the loss or its gradient became NaN or infinite at step {number}; "
                    "try a lower learning rate, a longer warm-up or fp32"
                )
        self._losses, self._norms = [], []
        return sum(losses) / len(losses)

    def validate(self, held_out: Sequence[tuple[_B, int]], step: int) -> float:
        """Returns the mean loss over the texts of all processes' held-out batches, without dropout."""
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
            raise BadInput(f"the validation loss is NaN or infinite at step {step}; check texts and targets")
        return float(summed / count)

    def state(self) -> dict[str, Any]:
        """Returns what the next steps depend on: weights, optimizer, RNG states and what is `kept`."""
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "weights": _copies(self.model),
            "kept": [tensor.clone() for tensor in self._computing.kept],
            "optimizer": self._optimizer.state_dict(),
            "rng": gather_object([rng]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a stored state; one that was stored without a GPU has no RNG state for it."""
        _put_back(self.model, state["weights"])
        for tensor, stored in zip(self._computing.kept, state["kept"], strict=True):
            tensor.copy_(stored)
        self._optimizer.load_state_dict(state["optimizer"])
        rng = state["rng"][self.rank]
        torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], self.device)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()


def _decay_groups(weights: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """The groups of AdamW: biases and norms, which have one axis, do not decay."""
    return [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]


def _linear_weights(model: nn.Module) -> set[nn.Parameter]:
    """The matrices that multiply, without tables of tokens and positions."""
    tables = {
        module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    return {weight for weight in model.parameters() if weight.ndim == 2 and weight not in tables}


class _Muon:
    """Orthogonal steps of matrices (Muon, https://kellerjordan.github.io/posts/muon/), AdamW for the rest.

    Matrices of one shape are computed together. A step is as long as one of AdamW's
    (https://arxiv.org/abs/2502.16982), so that both have one learning rate.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: AdamW, *, weight_decay: float) -> None:
        self._others, self._weight_decay = others, weight_decay
        self._momenta = [(weight, torch.zeros_like(weight)) for weight in matrices]
        self.param_groups, self.state = others.param_groups, others.state

    @torch.no_grad()
    def step(self) -> None:
        """Makes a step of every weight that has a gradient."""
        rate = self.param_groups[0]["lr"]
        moving = [(weight, momentum) for weight, momentum in self._momenta if weight.grad is not None]
        for shape in dict.fromkeys(weight.shape for weight, _ in moving):
            weights, momenta = zip(*(pair for pair in moving if pair[0].shape == shape), strict=True)
            gradients = torch.stack([weight.grad for weight in weights])
            torch._foreach_lerp_(momenta, gradients.unbind(), 1 - _MOMENTUM)
            steps = _orthogonal(gradients.lerp_(torch.stack(momenta), _MOMENTUM))
            steps *= -rate * _MUON_LENGTH * max(shape) ** 0.5
            torch._foreach_mul_(weights, 1 - rate * self._weight_decay)
            torch._foreach_add_(weights, steps.unbind())
        self._others.step()

    def zero_grad(self) -> None:
        """Removes the gradients."""
        self._others.zero_grad()
        for weight, _ in self._momenta:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next steps depend on."""
        return {"others": self._others.state_dict(), "momenta": [momentum for _, momentum in self._momenta]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` has returned."""
        self._others.load_state_dict(state["others"])
        self.param_groups, self.state = self._others.param_groups, self._others.state
        for (_, own), stored in zip(self._momenta, state["momenta"], strict=True):
            own.copy_(stored)


_MOMENTUM = 0.95
_MUON_LENGTH = 0.2
"""Of a step, times the root of the longer side: the usual size of AdamW's."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def _orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, by five Newton-Schulz iterations."""
    tall = matrices.shape[1] > matrices.shape[2]
    found = (matrices.mT if tall else matrices).bfloat16()
    found = found / (found.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, second, third = _NEWTON_SCHULZ
    for _ in range(5):
        square = found @ found.mT
        found = first * found + (second * square + third * square @ square) @ found
    nearest: Tensor = found.mT if tall else found
    return nearest.float()


Schedule = Callable[[int, int], float]
"""(step, steps) → share of the peak learning rate; steps count from 0, the last is steps − 1."""


def _constant(_step: int, _steps: int) -> float:
    return 1.0


def linear(*, end: float = 0.0) -> Schedule:
    """A linear decrease from the peak to `end` of it at the last step."""

    def schedule(step: int, steps: int) -> float:
        return 1.0 + (end - 1.0) * step / max(1, steps - 1)

    return schedule


def cosine(*, end: float = 0.0) -> Schedule:
    """Half a cosine from the peak to `end` of it at the last step."""

    def schedule(step: int, steps: int) -> float:
        return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))

    return schedule


def leaf_cycles(epoch_steps: int, *, epochs: int = 10, cycles: int = 3, end: float = 0.1) -> Schedule:
    """LEAF's schedule: `cycles` times down to `end` over `epochs` epochs, constant within an epoch.

    Another number of steps gets the closest number of complete cycles, stretched, so that it always ends
    low. A run shorter than one cycle decreases at every step.
    """
    descent = linear(end=end)

    def schedule(step: int, steps: int) -> float:
        cycle_steps = epochs * epoch_steps
        if steps < cycle_steps:
            return descent(step, steps)
        fitting = min(cycles, round(steps / cycle_steps))
        cycle = step * fitting // steps
        first, after = (-(-number * steps // fitting) for number in (cycle, cycle + 1))
        levels = round((after - first) / epoch_steps)
        return descent((step - first) * levels // (after - first), levels)

    return schedule


def _learning_rate(step: int, steps: int, *, peak: float, warmup: int, schedule: Schedule) -> float:
    """The rate of one step: a linear warm-up for at most half of the run, then the schedule."""
    warmup = min(warmup, steps // 2)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * schedule(step - warmup, steps - warmup)


def _steps_that_fit(done: int, *, seconds_left: float, seconds_per_step: float) -> int:
    """The total number of steps if the remaining time is used up at the present speed."""
    return done + max(0, int(seconds_left / max(seconds_per_step, 1e-9)))


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Copies every tensor that training can change to main memory; frozen weights are left out."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    return {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in chain(trained, model.named_buffers())
    }


def _put_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrites weights in place, so that an optimizer keeps its references to the tensors."""
    places = dict(chain(model.named_parameters(), model.named_buffers()))
    with torch.no_grad():
        for name, tensor in weights.items():
            places[name].copy_(tensor)


def has_checkpoint(folder: Path) -> bool:
    """Whether a training in this folder can be resumed."""
    return any((folder / _CHECKPOINTS).glob("step-*"))


def _write_checkpoint(folder: Path, step: int, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint, then deletes the older ones, so that there is always a complete one."""
    place = folder / _CHECKPOINTS / f"step-{step:09d}"
    with atomic_folder(place, replace=True, marks=(_STATE_FILE,)) as scratch:
        try:
            torch.save(dict(content), scratch / _STATE_FILE)
        except RuntimeError as error:  # raised by torch's writer if the disk is full
            raise OSError(str(error).splitlines()[0]) from error
    for old in place.parent.iterdir():
        if old != place and old.is_dir():
            shutil.rmtree(old)


def _read_checkpoint(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the newest checkpoint, or None; rejects one that was made with other settings."""
    places = sorted((folder / _CHECKPOINTS).glob("step-*"))
    if not places:
        return None
    file = places[-1] / _STATE_FILE
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        stored = content["identity"]
    except Exception as error:
        raise BadInput(f"{file} is damaged; delete {folder / _CHECKPOINTS} and run again") from error
    for name, value in identity.items():
        if stored.get(name) != value:
            before = stored.get(name)
            raise BadInput(f"{folder} was started with {name} {before}, not {value}; choose another folder")
    return content


def _keep_metrics(folder: Path, *, up_to: int) -> None:
    """Drop the lines after step `up_to`, and one a kill cut short: the resumed run writes them again."""
    path = folder / TRAINING_LOG_FILE
    if path.is_file():
        write_atomic(path, training_log_up_to(path.read_text(encoding="utf-8"), up_to))


def _add_metrics(folder: Path, record: TrainingRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TRAINING_LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(record.as_line())

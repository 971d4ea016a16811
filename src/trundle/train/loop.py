"""The training loop: a model, a task (loss and data) and settings go in, the best weights come out.

It runs on the CPU, on a GPU, or in several processes (`accelerate launch`, `torchrun`). An interrupted run
resumes from its last checkpoint with the same resulting weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from trundle.model.encode import fast_forward
from trundle.progress import SILENT, Progress
from trundle.records import TrainingRecord
from trundle.train.batches import Batches, _LoadedPart, _Prefetcher
from trundle.train.captured import _CaptureFailed
from trundle.train.graphs import _GraphTrainer
from trundle.train.trainer import (
    Computing,
    Schedule,
    _add_metrics,
    _constant,
    _copies,
    _keep_metrics,
    _learning_rate,
    _Loss,
    _OptimizerName,
    _Precision,
    _put_back,
    _read_checkpoint,
    _steps_that_fit,
    _Trainer,
    _Updates,
    _write_checkpoint,
)

_B = TypeVar("_B")
_Ended = Literal["steps", "minutes", "patience", "sufficient"]

_SETTLED = 2
"""Steps before the speed is measured: the first ones are slow."""
_WATCHED = 20
"""Steps after each of which the fit to a time budget is computed again; later only now and then."""
_UNKNOWN_STEPS = 10**9
_VALIDATIONS = 20
"""Validations in a run of given time, at most."""
_SAVED_AFTER = 120.0
"""Seconds after which a run writes a checkpoint, unless its steps decide."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask(Generic[_B]):
    """What is trained: the loss and the data, and what runs with them."""

    name: str = "training"
    losses: Sequence[_Loss[_B]]
    """Each takes the model and a batch (tensors in dicts, tuples or lists) and returns its mean loss.
    Several losses are added, with one graph in memory at a time; one without a graph is only added."""
    batches: Batches[_B]
    validation: Batches[_B] | None = None
    """One epoch is measured before the first step, every `validate_every` steps and at the end."""
    on_validation: Callable[[int, float], Mapping[str, float]] | None = None
    """Takes the step and the validation loss, and returns additional metrics for the training log."""
    computing: Computing | None = None
    """How the model computes; the first steps ignore it if the settings say so."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a run goes. It needs `steps`, `minutes` or both; with both, it ends with the first one reached."""

    steps: int | None = None
    minutes: float | None = None
    accumulate: int = 1
    """Batches per step; their gradients are averaged."""
    learning_rate: float = 1e-4
    warmup: int = 0
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    precision: _Precision = "fp32"
    dropout: bool = True
    validate_every: int = 500
    checkpoint_every: int | None = None
    """Steps between checkpoints. Without it, one is written every two minutes; always one at the end."""
    record_every: int = 20
    patience: int | None = None
    """The run ends after this number of validations without a better one."""
    sufficient_loss: float | None = None
    """If the first validation loss is not above this, the run makes no step."""
    far_loss: float | None = None
    """If the first validation loss is below this, the learning rate is lower in proportion."""
    optimizer: _OptimizerName = "adamw"
    exact_share: float = 0.0
    """The share of the steps, before all others, that ignore the task's `computing`."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class _TrainResult:
    """How a run went; the weights are in the model that was passed."""

    steps: int
    loss: float
    validation: float | None
    best_step: int
    seconds: float
    ended: _Ended


@dataclass(kw_only=True)
class _RunState:
    """How far a run is, without its tensors."""

    step: int = 0
    steps: int
    seconds: float = 0.0
    loss: float = math.nan
    best: float = math.inf
    best_step: int = 0
    stale: int = 0
    rate_share: float = 1.0
    """Of the learning rate, by the first validation loss."""
    exact: bool = False
    """Whether the next step ignores the task's `computing`."""


def train(
    model: torch.nn.Module,
    task: TrainingTask[_B],
    settings: TrainSettings,
    *,
    schedule: Schedule = _constant,
    folder: Path | None = None,
    deadline: float = math.inf,
    progress: Progress = SILENT,
    clock: Callable[[], float] = time.monotonic,
) -> _TrainResult:
    """Trains `model` in place; leaves it with the best weights by validation, or the last ones without it.

    `schedule` scales the learning rate. `deadline`, a time of the clock, ends a run with `minutes` earlier.
    Checkpoints and metrics are written to `folder`; if it has a checkpoint, the run resumes from it. A batch
    that does not fit into memory is processed in parts if its `Batches` have a splitter. Returns how the run
    went.
    """
    options: dict[str, Any] = {
        "precision": settings.precision,
        "updates": _Updates(
            optimizer=settings.optimizer, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm
        ),
        "dropout": settings.dropout,
        "computing": task.computing,
    }
    plain = partial(_Trainer, model, task.losses, splitter=task.batches.splitter, **options)
    if task.batches.gather is None:
        trainer = plain()
    else:
        trainer = _GraphTrainer(model, task.losses, task.batches, accumulate=settings.accumulate, **options)
    run = _TrainingRun(
        deadline=deadline,
        trainer=trainer,
        task=task,
        settings=settings,
        schedule=schedule,
        folder=folder,
        progress=progress if trainer.rank == 0 else SILENT,
        clock=clock,
        held_out=[] if task.validation is None else trainer.load_all(task.validation),
        state=_RunState(steps=settings.steps or _UNKNOWN_STEPS, exact=settings.exact_share > 0),
    )
    devices = [trainer.device.index or 0] if trainer.device.type == "cuda" else []
    with torch.random.fork_rng(devices), fast_forward(model):
        torch.manual_seed(settings.seed + trainer.rank)
        run.resume()
        trainer.exact = run.state.exact
        if isinstance(trainer, _GraphTrainer):
            try:
                with run.progress.task("capturing steps", None):
                    trainer.prepare(run.progress.say)
            except _CaptureFailed as error:
                run.progress.say(f"steps can't be captured as CUDA graphs, so they are slower: {error}")
                run.trainer = plain()
                run.trainer.restore(trainer.state())
                run.trainer.exact = run.state.exact
        return run.go()


@dataclass(kw_only=True, eq=False)
class _TrainingRun(Generic[_B]):
    """One call of `train`: its inputs and its progress."""

    deadline: float
    trainer: _Trainer[_B]
    task: TrainingTask[_B]
    settings: TrainSettings
    schedule: Schedule
    folder: Path | None
    progress: Progress
    clock: Callable[[], float]
    held_out: list[tuple[_B, int]]
    state: _RunState
    best_weights: dict[str, Tensor] | None = None
    texts: int = 0
    validated: int = 0
    """The step of the last validation."""
    validation_seconds: float = 0.0
    """Duration of the last validation."""
    validating: float = 0.0
    """Duration of all validations since the speed is measured."""

    def resume(self) -> None:
        if self.folder is None:
            return
        content = _read_checkpoint(self.folder, self._identity())
        if content is not None:
            self.state = _RunState(**content["state"])
            self.best_weights = content["best_weights"]
            self.trainer.restore(content["trainer"])
        if self.trainer.rank == 0:
            _keep_metrics(self.folder, up_to=self.state.step if content else -1)

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        order = self.task.batches.order
        counts = {"processes": self.trainer.processes, "batches per epoch": order.per_epoch}
        return asdict(self.settings) | counts

    def go(self) -> _TrainResult:
        state, settings, name = self.state, self.settings, self.task.name
        self.started = self.clock() - state.seconds  # capturing is no training
        self.first, self.written = state.step, self._elapsed()
        self.saved = self.written
        by_clock = settings.steps is None
        shown, label, total = 0, name, settings.steps
        if by_clock:
            shown, label = int(self.written), f"{name}, seconds"
            total = max(0, math.ceil(60 * (settings.minutes or 0)) - shown)
        start = state.step * settings.accumulate
        with _Prefetcher(self._load, start=start) as batches, self.progress.task(label, total) as advance:
            if state.step == 0 and self.held_out:
                self.trainer.exact = False  # as it would be used now
                self._write_down(self._validate())
                self.trainer.exact = state.exact
                if settings.far_loss is not None:
                    state.rate_share = min(1.0, state.best / settings.far_loss)
            if self._ended() == "sufficient":
                self.progress.say(f"{name}: validation loss already {state.best:.4f}; nothing is trained")
            while self._ended() is None:
                if state.exact and state.step >= settings.exact_share * state.steps:
                    with batches.paused():
                        self._leave_exact()
                if settings.minutes is not None:
                    self._fit(settings.minutes * 60)
                self._step([batches.take() for _ in range(settings.accumulate)])
                last = state.step >= state.steps
                validate = self.held_out and (last or self._is_due())
                record = last or validate or state.step % settings.record_every == 0
                regular = settings.checkpoint_every and state.step % settings.checkpoint_every == 0
                asks = record or self.trainer.processes == 1  # several have to agree, which takes time
                save = self.folder and (last or regular or (asks and self._is_late()))
                if record or save:
                    state.loss = self.trainer.mean_loss(state.step)
                    with batches.paused():
                        self._write_down(self._validate() if validate else {})
                if save:
                    self._save()
                reached = int(self._elapsed()) if by_clock else state.step
                advance(reached - shown)
                shown = reached
        if state.exact and state.step:  # the time was over sooner than expected
            self._leave_exact()
        if self.best_weights is not None:
            _put_back(self.trainer.model, self.best_weights)
        self.trainer.model.eval()
        return _TrainResult(
            steps=state.step,
            loss=state.loss,
            validation=state.best if self.held_out else None,
            best_step=state.best_step if self.held_out else state.step,
            seconds=self._elapsed(),
            ended=self._ended() or "steps",
        )

    def _ended(self) -> _Ended | None:
        sufficient = self.settings.sufficient_loss
        if self.state.step == 0 and sufficient is not None and self.state.best <= sufficient:
            return "sufficient"
        if self.settings.patience is not None and self.state.stale >= self.settings.patience:
            return "patience"
        if self.state.step >= self.state.steps:
            return "steps" if self.state.steps == self.settings.steps else "minutes"
        return None

    def _leave_exact(self) -> None:
        """Computes as the task says from here on, at another speed and with another best loss."""
        self.trainer.leave_exact()
        self.state.exact, self.state.best = False, math.inf
        if self.held_out:
            self._write_down(self._validate())
        self.first = self.state.step

    def _is_due(self) -> bool:
        """Whether to validate: at regular steps, or in a run of given time at most so many times."""
        state, every = self.state, self.settings.validate_every
        if self.settings.minutes is None or state.steps == _UNKNOWN_STEPS:
            return state.step % every == 0
        apart = max(every, state.steps // _VALIDATIONS)
        return state.step % every == 0 and state.step - self.validated >= apart

    def _is_late(self) -> bool:
        """Whether the last checkpoint is too old; all processes agree on it."""
        agreed = [self._elapsed() - self.saved > _SAVED_AFTER]
        broadcast_object_list(agreed)
        return agreed[0]

    def _elapsed(self) -> float:
        return self.clock() - self.started

    def _load(self, number: int) -> _LoadedPart[_B]:
        return self.trainer.load(self.task.batches, number)

    def _step(self, loaded: Sequence[_LoadedPart[_B]]) -> None:
        state, warmup = self.state, self.settings.warmup
        peak = state.rate_share * self.settings.learning_rate
        self.rate = _learning_rate(state.step, state.steps, peak=peak, warmup=warmup, schedule=self.schedule)
        self.trainer.step(loaded, self.rate)
        self.state.step += 1
        self.texts += sum(part.texts for part in loaded)

    def _fit(self, budget: float) -> None:
        """Sets the number of steps to what the time allows, so that the learning rate still ends low."""
        state, settings = self.state, self.settings
        if state.step - self.first <= _SETTLED:
            self.settled, self.validating = (state.step, self._elapsed()), 0.0
        elif state.step - self.first <= _WATCHED or state.step % settings.record_every == 0:
            step, seconds = self.settled
            per_step = (self._elapsed() - seconds - self.validating) / (state.step - step)
            per_step += self.validation_seconds / settings.validate_every
            left = min(budget - self._elapsed(), self.deadline - self.clock()) - self.validation_seconds
            agreed = [_steps_that_fit(state.step, seconds_left=left, seconds_per_step=per_step)]
            broadcast_object_list(agreed)
            state.steps = min(max(agreed[0], state.step + 1), settings.steps or _UNKNOWN_STEPS)

    def _validate(self) -> dict[str, Any]:
        """Measures the validation loss and additional metrics; keeps a copy of the best weights."""
        state, began = self.state, self.clock()
        self.validated = state.step
        found = self.trainer.validate(self.held_out, state.step)
        if not self.trainer.exact:
            state.stale += 1
            if found < state.best:
                state.best, state.best_step, state.stale = found, state.step, 0
                self.best_weights = _copies(self.trainer.model)
        measures: dict[str, float] = {}
        if self.task.on_validation is not None and self.trainer.rank == 0:
            with self.trainer.computing():
                measures = dict(self.task.on_validation(state.step, found))
        loss = f"loss {state.loss:.4f}, " if math.isfinite(state.loss) else ""
        best = "with exact weights" if self.trainer.exact else f"best {state.best:.4f}"
        self.progress.say(f"step {state.step:,}: {loss}validation {found:.4f}, {best}")
        self.validation_seconds = self.clock() - began
        self.validating += self.validation_seconds
        return {"validation": found, "measures": measures}

    def _write_down(self, found: dict[str, Any]) -> None:
        """Writes one line of the training log; the speed is that of the steps alone."""
        state, now = self.state, self._elapsed()
        stepping = now - self.written - (self.validation_seconds if found else 0.0)
        record = TrainingRecord(
            step=state.step,
            epoch=state.step * self.settings.accumulate / self.task.batches.order.per_epoch,
            loss=state.loss if math.isfinite(state.loss) else None,  # none is known before the first record
            lr=self.rate if state.step else None,
            seconds=now,
            texts_per_second=self.texts / stepping if self.texts and stepping > 0 else None,
            **found,
        )
        if self.folder is not None and self.trainer.rank == 0:
            _add_metrics(self.folder, record)
        self.texts, self.written = 0, now

    def _save(self) -> None:
        self.state.seconds = self.saved = self._elapsed()
        content = {
            "identity": self._identity(),
            "state": asdict(self.state),
            "trainer": self.trainer.state(),
            "best_weights": self.best_weights,
        }
        if self.folder is not None and self.trainer.rank == 0:
            _write_checkpoint(self.folder, self.state.step, content)

"""The one training loop: a module, an objective and batches go in, the best weights come out.

It runs on the CPU, on a GPU, or in several processes (`accelerate launch`, `torchrun`), and a run that was killed goes
on from its last checkpoint to the same weights.

What this is not: it knows no method. What is learned is in the objective, from which texts is in the batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.progress import SILENT, Progress
from trundle.records import TrainingRecord
from trundle.train.batches import Batches, _Feed, _Loaded
from trundle.train.checkpoint import (
    _add_metrics,
    _check_unused,
    _copies,
    _keep_metrics,
    _put_back,
    _read_checkpoint,
    _write_checkpoint,
)
from trundle.train.learner import _constant, _Learner, _learning_rate, _Precision, _Shape, _steps_that_fit

_B = TypeVar("_B")
_Ended = Literal["steps", "minutes", "patience", "there"]
_OnValidation = Callable[[int, float], Mapping[str, float]]

_SETTLED = 2
"""Steps before the speed is measured: the first ones are slow."""
_WATCHED = 20
"""Steps in which the fit to a time budget is renewed every time; later on only now and then."""
_UNKNOWN_STEPS = 10**9
_SAVED_AFTER = 120.0
"""Seconds after which a slow run keeps a checkpoint, however few steps that were."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a run goes. One of `steps` and `minutes` must be given; with both, whichever is reached first.

    `patience` is the number of validations in a row without a better one after which the run ends.
    """

    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 1e-4
    warmup: int = 0
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    precision: _Precision = "fp32"
    dropout: bool = True
    validate_every: int = 500
    checkpoint_every: int = 500
    record_every: int = 20
    patience: int | None = None
    enough: float | None = None
    """A validation loss with which a run has nothing left to learn: it then makes no step."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise BadInput("a training needs an end; give steps or minutes")
        for name in ("steps", "minutes", "learning_rate", "clip_norm", "patience"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BadInput(f"{name} is {value}; give a number above 0")
        for name in ("validate_every", "checkpoint_every", "record_every"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; give at least 1")
        for name in ("warmup", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"{name} is {getattr(self, name)}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class _TrainResult:
    """How a run went; the weights are in the module that was given."""

    steps: int
    loss: float
    validation: float | None
    best_step: int
    seconds: float
    ended: _Ended


@dataclass(kw_only=True)
class _State:
    """Where a run stands, apart from its tensors."""

    step: int = 0
    steps: int
    seconds: float = 0.0
    loss: float = math.nan
    best: float = math.inf
    best_step: int = 0
    stale: int = 0


def train(
    model: nn.Module,
    objective: Callable[[_B], Tensor] | Sequence[Callable[[_B], Tensor]],
    batches: Batches[_B],
    settings: TrainSettings,
    *,
    shape: _Shape = _constant,
    validation: Batches[_B] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    on_validation: _OnValidation | None = None,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    progress: Progress = SILENT,
    label: str = "training",
    clock: Callable[[], float] = time.monotonic,
) -> _TrainResult:
    """Train `model` in place and leave it with its best weights by validation, or its last ones without validation.

    `objective` uses the model and gives the mean loss over the texts of a batch (tensors in dicts, tuples or lists). Of
    several objectives the losses are added, with one graph in memory at a time; one that has nothing to say about a batch
    gives a loss without a graph.
    One epoch of `validation` is measured before the first step, every `validate_every` steps and at the end;
    `on_validation(step, loss)` may then add measures to the metrics file. Inside `computing()` the model is run, and
    gradients are taken, but no weight is changed by the optimizer: weights may be exchanged there for others. A batch that does not
    fit into memory goes through in parts, where `batches` say how it is cut. Checkpoints
    and metrics go to `folder`; `resume` goes on from the last checkpoint there, if any.
    """
    learner = _Learner(
        model,
        (objective,) if callable(objective) else tuple(objective),
        precision=settings.precision,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        dropout=settings.dropout,
        computing=computing,
        divider=batches.divider,
    )
    main = learner.rank == 0
    run = _Run(
        learner=learner,
        batches=batches,
        settings=settings,
        shape=shape,
        folder=folder,
        on_validation=on_validation if main else None,
        progress=progress if main else SILENT,
        clock=clock,
        held_out=[] if validation is None else learner.load_all(validation),
        state=_State(steps=settings.steps or _UNKNOWN_STEPS),
    )
    with torch.random.fork_rng([learner.device.index or 0] if learner.device.type == "cuda" else []):
        torch.manual_seed(settings.seed + learner.rank)
        run.open_folder(resume=resume)
        return run.go(label)


@dataclass(kw_only=True, eq=False)
class _Run(Generic[_B]):
    """One call of `train`: what it works with and where it stands."""

    learner: _Learner[_B]
    batches: Batches[_B]
    settings: TrainSettings
    shape: _Shape
    folder: Path | None
    on_validation: _OnValidation | None
    progress: Progress
    clock: Callable[[], float]
    held_out: list[tuple[_B, int]]
    state: _State
    best_weights: dict[str, Tensor] | None = None
    texts: int = 0
    look_seconds: float = 0.0
    looked: float = 0.0

    def open_folder(self, *, resume: bool) -> None:
        """Make sure of an unused folder, or go back to where its last checkpoint stands."""
        if self.folder is None:
            return
        if not resume:
            _check_unused(self.folder)
            return
        content = _read_checkpoint(self.folder, self._identity())
        if content is not None:
            self.state = _State(**content["state"])
            self.best_weights = content["best_weights"]
            self.learner.restore(content["learner"])
        if self.learner.rank == 0:
            _keep_metrics(self.folder, up_to=self.state.step if content else -1)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed."""
        counts = {"processes": self.learner.processes, "batches per epoch": self.batches.order.per_epoch}
        return asdict(self.settings) | counts

    def go(self, label: str) -> _TrainResult:
        """Step, look, write down, until one of the ends is reached."""
        state, settings = self.state, self.settings
        self.started = self.clock() - state.seconds
        self.first, self.written, shown = state.step, self._elapsed(), 0
        self.saved = self.written
        by_clock = settings.steps is None
        total = math.ceil(60 * (settings.minutes or 0)) if by_clock else settings.steps
        with _Feed(self._load, start=state.step) as feed, self.progress.task(label, total) as advance:
            if state.step == 0 and self.held_out:
                self._write_down(self._look())
            if self._ended() == "there":
                self.progress.say(f"{label}: {state.best:.4f} leaves nothing to learn, so nothing is trained")
            while self._ended() is None:
                if settings.minutes is not None:
                    self._fit(settings.minutes * 60)
                self._step(feed.take())
                last = state.step >= state.steps
                look = self.held_out and (last or state.step % settings.validate_every == 0)
                record = last or look or state.step % settings.record_every == 0
                save = self.folder and (
                    last or state.step % settings.checkpoint_every == 0 or (record and self._is_late())
                )
                if record or save:
                    state.loss = self.learner.mean_loss(state.step)
                    with feed.paused():
                        self._write_down(self._look() if look else {})
                if save:
                    self._save()
                reached = int(self._elapsed()) if by_clock else state.step
                advance(reached - shown)
                shown = reached
        if self.best_weights is not None:
            _put_back(self.learner.model, self.best_weights)
        self.learner.model.eval()
        return _TrainResult(
            steps=state.step,
            loss=state.loss,
            validation=state.best if self.held_out else None,
            best_step=state.best_step if self.held_out else state.step,
            seconds=self._elapsed(),
            ended=self._ended() or "steps",
        )

    def _ended(self) -> _Ended | None:
        enough = self.settings.enough
        if self.state.step == 0 and enough is not None and self.state.best <= enough:
            return "there"
        if self.settings.patience is not None and self.state.stale >= self.settings.patience:
            return "patience"
        if self.state.step >= self.state.steps:
            return "steps" if self.state.steps == self.settings.steps else "minutes"
        return None

    def _is_late(self) -> bool:
        """Whether more would be lost than anyone likes to wait for again; all processes agree on it."""
        agreed = [self._elapsed() - self.saved > _SAVED_AFTER]
        broadcast_object_list(agreed)
        return agreed[0]

    def _elapsed(self) -> float:
        return self.clock() - self.started

    def _rate(self, step: int) -> float:
        peak, warmup = self.settings.learning_rate, self.settings.warmup
        return _learning_rate(step, self.state.steps, peak=peak, warmup=warmup, shape=self.shape)

    def _load(self, number: int) -> _Loaded[_B]:
        return self.learner.load(self.batches, number)

    def _step(self, loaded: _Loaded[_B]) -> None:
        self.rate = self._rate(self.state.step)
        self.learner.step(loaded, self.rate)
        self.state.step += 1
        self.texts += loaded.texts

    def _fit(self, budget: float) -> None:
        """Set the number of steps to what the time allows, so that the learning rate still ends low."""
        state, settings = self.state, self.settings
        if state.step - self.first <= _SETTLED:
            self.settled, self.looked = (state.step, self._elapsed()), 0.0
        elif state.step - self.first <= _WATCHED or state.step % settings.record_every == 0:
            step, seconds = self.settled
            per_step = (self._elapsed() - seconds - self.looked) / (state.step - step)
            per_step += self.look_seconds / settings.validate_every
            left = budget - self._elapsed() - self.look_seconds
            agreed = [_steps_that_fit(state.step, seconds_left=left, seconds_per_step=per_step)]
            broadcast_object_list(agreed)
            state.steps = min(max(agreed[0], state.step + 1), settings.steps or _UNKNOWN_STEPS)

    def _look(self) -> dict[str, Any]:
        """The validation loss and what else is measured with it; the best weights so far are kept."""
        state, began = self.state, self.clock()
        found = self.learner.validate(self.held_out, state.step)
        state.stale += 1
        if found < state.best:
            state.best, state.best_step, state.stale = found, state.step, 0
            self.best_weights = _copies(self.learner.model)
        with self.learner.computing():
            measures = {} if self.on_validation is None else dict(self.on_validation(state.step, found))
        loss = f"loss {state.loss:.4f}, " if state.step else ""
        self.progress.say(f"step {state.step:,}: {loss}validation {found:.4f}, best {state.best:.4f}")
        self.look_seconds = self.clock() - began
        self.looked += self.look_seconds
        return {"validation": found, "measures": measures}

    def _write_down(self, found: dict[str, Any]) -> None:
        """One line for the report; the speed is that of the steps alone."""
        state, now = self.state, self._elapsed()
        stepping = now - self.written - (self.look_seconds if found else 0.0)
        record = TrainingRecord(
            step=state.step,
            epoch=state.step / self.batches.order.per_epoch,
            loss=state.loss if state.step else None,
            lr=self.rate if state.step else None,
            seconds=now,
            texts_per_second=self.texts / stepping if self.texts and stepping > 0 else None,
            **found,
        )
        if self.folder is not None and self.learner.rank == 0:
            _add_metrics(self.folder, record)
        self.texts, self.written = 0, now

    def _save(self) -> None:
        self.state.seconds = self.saved = self._elapsed()
        content = {
            "identity": self._identity(),
            "state": asdict(self.state),
            "learner": self.learner.state(),
            "best_weights": self.best_weights,
        }
        if self.folder is not None and self.learner.rank == 0:
            _write_checkpoint(self.folder, self.state.step, content)

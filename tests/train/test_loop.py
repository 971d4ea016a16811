from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

import pico
from recorded_progress import RecordedProgress
from trundle.errors import BadInput
from trundle.methods.align.leaf import _leaf
from trundle.model.tokens import make_tokeniser
from trundle.train.batches import Batches, ByLength, Indices
from trundle.train.loop import TrainingTask, TrainSettings, _TrainResult, train
from trundle.train.trainer import (
    Computing,
    _Muon,
    _Trainer,
    _Updates,
    _write_checkpoint,
    linear,
    precision_for,
)

WORDS = " ".join(pico.TEXTS).split()
Batch = tuple[dict[str, Any], Tensor]


def some_texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(count)]


class Toy:
    """A two-layer pico BERT that learns the vectors of a four-layer one."""

    def __init__(self, student: SentenceTransformer, teacher: SentenceTransformer) -> None:
        self.model, self.teacher = copy.deepcopy(student), teacher
        self.steps = 0
        self.each_step: Callable[[int], None] = lambda _step: None

    def batches(self, texts: list[str], *, batch_size: int = 8, sign: float = 1.0) -> Batches[Batch]:
        tokenise = make_tokeniser(self.model)
        vectors = sign * torch.from_numpy(self.teacher.encode(texts))

        def load(indices: Indices) -> Batch:
            return tokenise([texts[index] for index in indices]), vectors[indices]

        return Batches(order=ByLength([len(text) for text in texts], batch_size=batch_size), load=load)

    def objective(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        features, target = batch
        if torch.is_grad_enabled():
            self.steps += 1
            self.each_step(self.steps)
        return _leaf(model(features)["sentence_embedding"], target)

    def train(
        self, settings: TrainSettings, each_step: Callable[[int], None] = lambda _step: None, **more: Any
    ) -> _TrainResult:
        """`each_step` is called with the number of each step."""
        self.each_step = each_step
        named = {
            name: more.pop(name)
            for name in ("validation", "on_validation", "name", "computing")
            if name in more
        }
        data = {
            "batches": self.batches(some_texts(37, seed=0)),
            "validation": self.batches(some_texts(20, seed=1)),
        }
        return train(self.model, TrainingTask(losses=[self.loss], **data | named), settings, **more)

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, which only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def toy(pico_model: Callable[..., SentenceTransformer]) -> Callable[[], Toy]:
    return lambda: Toy(pico_model("bert", 2), pico_model("bert"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


SHORT = TrainSettings(steps=24, learning_rate=3e-3, validate_every=6, checkpoint_every=10, record_every=4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_student_comes_closer_to_its_teacher(toy: Callable[[], Toy], tmp_path: Path, precision: str):
    student = toy()
    settings = TrainSettings(steps=60, learning_rate=3e-3, warmup=5, validate_every=20, precision=precision)
    result = student.train(settings, schedule=linear(end=0.1), folder=tmp_path / "run")
    found = lines(tmp_path / "run")
    held_out = [line["validation"] for line in found if line["validation"] is not None]
    assert len(held_out) == 4
    assert held_out[-1] < 0.8 * held_out[0]
    assert result.validation == min(held_out)
    assert found[-1]["loss"] < 0.8 * found[1]["loss"]
    assert found[-1]["lr"] == pytest.approx(3e-4)
    assert found[-1]["epoch"] == 60 / 5
    texts = some_texts(20, seed=1)
    distance = np.linalg.norm(student.model.encode(texts) - student.teacher.encode(texts), axis=1).mean()
    assert distance == pytest.approx(result.validation, rel=1e-4 if precision == "fp32" else 0.02)


def test_log_lines_are_written_at_their_steps(toy: Callable[[], Toy], tmp_path: Path):
    toy().train(SHORT, folder=tmp_path / "run")
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [0, 4, 6, 8, 10, 12, 16, 18, 20, 24]
    assert [line["step"] for line in found if line["validation"] is not None] == [0, 6, 12, 18, 24]
    assert list(found[1]) == ["step", "epoch", "loss", "lr", "validation", "seconds", "texts_per_second"]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["best at the end", "best at the start"])
def test_a_resumed_run_ends_with_the_same_bits(toy: Callable[[], Toy], tmp_path: Path, sign: float):
    """Dropout, optimizer, learning rate, batch order and best weights continue as without interruption."""

    def run(student: Toy, name: str, **more: Any) -> None:
        held_out = student.batches(some_texts(20, seed=1), sign=sign)
        student.train(SHORT, schedule=linear(), validation=held_out, folder=tmp_path / name, **more)

    straight = toy()
    run(straight, "straight")

    def stop(step: int) -> None:
        if step == 17:
            raise KeyboardInterrupt

    broken = toy()
    with pytest.raises(KeyboardInterrupt):
        run(broken, "broken", each_step=stop)
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "lo')
    resumed = toy()
    run(resumed, "broken")
    assert same(straight.weights(), resumed.weights())
    timed = {"seconds", "texts_per_second"}
    logs = [
        [
            {name: value for name, value in line.items() if name not in timed}
            for line in lines(tmp_path / name)
        ]
        for name in ("straight", "broken")
    ]
    assert logs[0] == logs[1]
    assert [place.name for place in (tmp_path / "broken" / "checkpoints").iterdir()] == ["step-000000024"]


def test_resuming_without_a_checkpoint_starts_at_the_beginning(toy: Callable[[], Toy], tmp_path: Path):
    one, other = toy(), toy()
    one.train(SHORT)
    other.train(SHORT, folder=tmp_path / "run")
    assert same(one.weights(), other.weights())


def test_a_run_is_not_resumed_with_other_settings(toy: Callable[[], Toy], tmp_path: Path):
    student = toy()
    student.train(SHORT, folder=tmp_path / "run")
    other = TrainSettings(steps=24, learning_rate=1e-3, validate_every=6, checkpoint_every=10, record_every=4)
    with pytest.raises(BadInput, match=r"started with learning_rate 0.003, not 0.001; choose another folder"):
        student.train(other, folder=tmp_path / "run")
    state = next((tmp_path / "run" / "checkpoints").rglob("state.pt"))
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(BadInput, match="damaged; delete"):
        student.train(SHORT, folder=tmp_path / "run")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_loop_is_what_a_bare_torch_loop_does(toy: Callable[[], Toy], accumulate: int):
    """One process, no extras: the same bits as a few lines of torch."""
    ours, bare = toy(), toy()
    settings = TrainSettings(
        steps=6, accumulate=accumulate, learning_rate=1e-3, weight_decay=0.0, dropout=False
    )
    ours.train(settings, validation=None)
    batches = bare.batches(some_texts(37, seed=0))
    bare.model.eval().to(ours.model.device)
    optimizer = torch.optim.AdamW(bare.model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for step in range(6):
        optimizer.zero_grad()
        for number in range(step * accumulate, (step + 1) * accumulate):
            batch = batches.load(batches.order.batch(number))
            loss = bare.objective(send_to_device(batch, bare.model.device))
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(bare.model.parameters(), 1.0)
        optimizer.step()
    assert same(bare.weights(), ours.weights())


def test_muon_makes_the_steps_of_torchs_muon() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (8, 8), (24, 8), (8, 24)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in weights]
    bias = nn.Parameter(torch.zeros(8))
    ours = _Muon(weights, torch.optim.AdamW([bias], lr=0.02), weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, other in zip(weights, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        ours.step()
        reference.step()
    for one, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # both iterate in bfloat16


def test_the_first_steps_may_compute_with_exact_weights(toy: Callable[[], Toy], tmp_path: Path):
    student, inside = toy(), False
    rounded: list[object] = []

    @contextmanager
    def computing() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    settings = replace(SHORT, exact_share=0.5)
    found = student.train(
        settings,
        lambda _step: rounded.append(inside),
        computing=Computing(context=computing, begin=lambda: rounded.append("begun")),
        folder=tmp_path,
    )
    assert rounded == [False] * 12 + ["begun"] + [True] * 12
    validated = {line["step"]: line["validation"] for line in lines(tmp_path) if "validation" in line}
    counted = [validated[step] for step in (12, 18, 24)]  # the others are no models that anyone gets
    assert found.validation == min(counted)


def test_a_loss_that_was_not_recorded_yet_is_left_out(toy: Callable[[], Toy], tmp_path: Path):
    computing = Computing(context=nullcontext, begin=lambda: None)
    toy().train(replace(SHORT, exact_share=0.1), computing=computing, folder=tmp_path)
    assert [line["loss"] is None for line in lines(tmp_path)[:3]] == [True, True, False]


def test_patience_ends_a_run_that_gets_worse_and_restores_the_best_weights(toy: Callable[[], Toy]):
    student = toy()
    before = student.weights()
    against = student.batches(some_texts(20, seed=1), sign=-1.0)
    settings = TrainSettings(steps=500, learning_rate=3e-3, validate_every=10, patience=3)
    result = student.train(settings, validation=against)
    assert (result.steps, result.best_step, result.ended) == (30, 0, "patience")
    assert same(before, student.weights())


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, *seconds: float) -> None:
        self.now = 100.0
        self.seconds = seconds

    def __call__(self) -> float:
        return self.now

    def tick(self, step: int) -> None:
        self.now += self.seconds[min(step - 1, len(self.seconds) - 1)]


def test_minutes_become_steps_and_the_rate_still_ends_low(toy: Callable[[], Toy], tmp_path: Path):
    clock = Clock(5.0, 5.0, 1.0)
    settings = TrainSettings(minutes=1.0, learning_rate=1e-3, validate_every=1000)
    result = toy().train(
        settings, schedule=linear(end=0.1), folder=tmp_path / "run", each_step=clock.tick, clock=clock
    )
    assert (result.steps, result.seconds, result.ended) == (52, 60.0, "minutes")
    assert lines(tmp_path / "run")[-1]["lr"] == pytest.approx(1e-4)
    assert lines(tmp_path / "run")[-1]["validation"] is not None


def test_minutes_leave_time_for_validation(toy: Callable[[], Toy]):
    clock = Clock(1.0)

    def look(step: int, loss: float) -> dict[str, float]:
        clock.now += 4.0
        return {}

    settings = TrainSettings(minutes=2.0, validate_every=10)
    result = toy().train(settings, on_validation=look, each_step=clock.tick, clock=clock)
    assert 110 <= result.seconds <= 121


def test_minutes_hold_when_the_machine_slows_down(toy: Callable[[], Toy]):
    clock = Clock(*[0.5] * 40, 1.0)
    result = toy().train(TrainSettings(minutes=1.5), validation=None, each_step=clock.tick, clock=clock)
    assert 85 <= result.seconds <= 92
    assert 105 <= result.steps <= 112


def test_steps_and_minutes_together_end_with_the_first(toy: Callable[[], Toy]):
    clock = Clock(1.0)
    result = toy().train(TrainSettings(steps=25, minutes=1.0), each_step=clock.tick, clock=clock)
    assert (result.steps, result.ended) == (25, "steps")


def test_a_loss_that_is_nan_names_its_step(toy: Callable[[], Toy], tmp_path: Path):
    student = toy()
    calls = 0

    def loss(_model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return student.objective(batch) * (torch.nan if calls == 7 else 1.0)

    settings = TrainSettings(steps=50, checkpoint_every=10)
    with pytest.raises(BadInput, match=r"at step 7; try a lower learning rate"):  # noqa: PT012
        task = TrainingTask(losses=[loss], batches=student.batches(some_texts(37, 0)))
        train(student.model, task, settings, folder=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists(), "nothing spoiled is stored"


def test_a_gradient_that_is_nan_is_named_too(toy: Callable[[], Toy]):
    student = toy()

    def loss(_model: nn.Module, batch: Batch) -> Tensor:
        found = student.objective(batch)
        return found + (found - found).sqrt()

    with pytest.raises(BadInput, match="gradient became NaN or infinite at step 1;"):  # noqa: PT012
        task = TrainingTask(losses=[loss], batches=student.batches(some_texts(37, 0)))
        train(student.model, task, TrainSettings(steps=5))


def test_on_validation_adds_metrics_while_batches_are_loaded(toy: Callable[[], Toy], tmp_path: Path):
    student = toy()

    def agree(step: int, loss: float) -> dict[str, float]:
        return {"width": float(student.model.encode(["a text", "another, longer text"]).shape[1])}

    student.train(SHORT, on_validation=agree, folder=tmp_path / "run")
    looked = [line for line in lines(tmp_path / "run") if line["validation"] is not None]
    assert [line["measures"] for line in looked] == [{"width": 32.0}] * 5


def test_frozen_weights_stay_and_are_not_stored(toy: Callable[[], Toy], tmp_path: Path):
    student = toy()
    before = student.weights()
    layer = student.model[0].auto_model.encoder.layer[1].requires_grad_(False)
    student.train(SHORT, folder=tmp_path / "run")
    after = student.weights()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed
    assert not any("layer.1." in name for name in changed)
    state = torch.load(next((tmp_path / "run").rglob("state.pt")), weights_only=True)
    assert not any("layer.1." in name for name in state["trainer"]["weights"])
    assert any("layer.0." in name for name in state["trainer"]["weights"])
    assert sum(weight.numel() for weight in layer.parameters())
    student.model.requires_grad_(False)
    with pytest.raises(BadInput, match="every weight of the model is frozen"):
        student.train(SHORT)


def test_training_does_not_change_the_callers_rng(toy: Callable[[], Toy]):
    student = toy()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    student.train(TrainSettings(steps=3))
    assert torch.equal(torch.rand(3), expected)


def test_progress_is_reported(toy: Callable[[], Toy]):
    told = RecordedProgress()
    toy().train(SHORT, progress=told, name="aligning")
    assert told.tasks == [("aligning", 24)]
    assert told.units == 24
    assert len(told.lines) == 5
    assert told.lines[0].startswith("step 0: validation ")
    assert told.lines[-1].startswith("step 24: loss ")
    told, clock = RecordedProgress(), Clock(1.0)
    toy().train(TrainSettings(minutes=0.5), progress=told, each_step=clock.tick, clock=clock)
    assert (told.tasks, told.units) == ([("training, seconds", 30)], 30)
    told, clock = RecordedProgress(), Clock(1.0)
    toy().train(TrainSettings(steps=9, minutes=0.5), progress=told, each_step=clock.tick, clock=clock)
    assert (told.tasks, told.units) == ([("training", 9)], 9)


@pytest.mark.parametrize(("amx", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_precision_follows_the_processor(amx: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert precision_for("auto") == chosen
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: amx)
    assert precision_for("auto") == chosen
    assert (precision_for("fp32"), precision_for("bf16")) == ("fp32", "bf16")


def test_a_slow_run_writes_checkpoints_by_time(toy: Callable[[], Toy], tmp_path: Path) -> None:
    """Independent of the number of steps: here the clock advances by 15 s on every call."""
    ticks = iter(range(0, 10**6, 15))
    student = toy()

    def stop(step: int) -> None:
        if step == 11:
            raise KeyboardInterrupt

    settings = TrainSettings(steps=20, record_every=1000)
    with pytest.raises(KeyboardInterrupt):
        student.train(settings, folder=tmp_path / "slow", each_step=stop, clock=lambda: float(next(ticks)))
    (kept,) = (tmp_path / "slow" / "checkpoints").iterdir()
    assert int(kept.name.removeprefix("step-")) >= 4


def test_an_outer_autocast_does_not_freeze_the_weights(toy: Callable[[], Toy]) -> None:
    """torch keeps the weights it has rounded until the outermost autocast ends."""
    settings = TrainSettings(steps=6, learning_rate=3e-3, precision="bf16")
    plain, inside = toy(), toy()
    plain.train(settings)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        inside.train(settings)
    assert same(plain.weights(), inside.weights())


def test_no_gradient_comes_from_cudnns_attention(toy: Callable[[], Toy]) -> None:
    asked: list[bool] = []
    toy().train(
        TrainSettings(steps=2), each_step=lambda _step: asked.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    assert asked == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_run_that_meets_its_target_makes_no_step(toy: Callable[[], Toy], tmp_path: Path) -> None:
    student = toy()
    before = student.weights()
    result = student.train(
        TrainSettings(steps=20, learning_rate=3e-3, sufficient_loss=5.0), folder=tmp_path / "run"
    )
    assert (result.steps, result.best_step, result.ended) == (0, 0, "sufficient")
    assert result.validation is not None
    assert same(before, student.weights())
    assert toy().train(TrainSettings(steps=3, sufficient_loss=1e-6)).steps == 3


def test_a_near_start_learns_at_a_lower_rate(toy: Callable[[], Toy], tmp_path: Path) -> None:
    first = toy().train(TrainSettings(steps=1)).validation
    assert first is not None
    for name, far, share in (("near", 4 * first, 0.25), ("far", first / 2, 1.0)):
        settings = TrainSettings(steps=2, learning_rate=1e-9, far_loss=far, record_every=1)
        toy().train(settings, folder=tmp_path / name)
        assert lines(tmp_path / name)[1]["lr"] == pytest.approx(share * 1e-9, rel=0.05)


def test_a_cpu_checkpoint_is_resumed_on_a_gpu(toy: Callable[[], Toy]) -> None:
    made = toy()
    updates = _Updates(weight_decay=0.0, clip_norm=None)
    learner = _Trainer(made.model, [made.loss], precision="fp32", updates=updates, dropout=False)
    before, state = made.weights(), learner.state()
    with torch.no_grad():
        for weight in made.model.parameters():
            weight.zero_()
    learner.device = torch.device("cuda")
    learner.restore(state)
    assert same(made.weights(), before)


def test_a_stray_file_among_the_checkpoints_stays(tmp_path: Path) -> None:
    """Some systems leave files such as .DS_Store in every folder that is looked at."""
    stray = tmp_path / "checkpoints" / ".DS_Store"
    stray.parent.mkdir()
    stray.touch()
    _write_checkpoint(tmp_path, 1, {})
    _write_checkpoint(tmp_path, 2, {})
    assert sorted(place.name for place in stray.parent.iterdir()) == [".DS_Store", "step-000000002"]

"""Runs that are killed, and runs of two processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from torch import Tensor, nn

import forked
from trundle.errors import WriteFailed
from trundle.train.batches import Batches, ByBucket, ByLength, Indices, sharded_batches
from trundle.train.loop import TrainingTask, TrainSettings, _TrainResult, train
from trundle.train.trainer import _write_checkpoint

Batch = tuple[Tensor, Tensor]
TEXTS = 45


class Net(nn.Module):
    """Small, with dropout, and with a part that the objective never reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.pooler = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def material() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    inputs, targets = (
        torch.from_numpy(rng.normal(size=(TEXTS, width)).astype(np.float32)) for width in (6, 4)
    )
    return inputs, targets


def learn_from_shares(net: Net, rank: int, processes: int) -> _TrainResult:
    """One batch per epoch, so that it holds the texts of all processes; every third counts twice."""
    begin, end = (TEXTS * number // processes for number in (rank, rank + 1))
    inputs, targets = (part[begin:end] for part in material())
    batches = sharded_batches(
        np.arange(begin, end),
        lambda texts: (inputs[texts], targets[texts]),
        batch_size=2 * TEXTS,
        seed=0,
        kinds=(np.arange(begin, end) % 3 == 0).astype(np.uint8),
        weights=(1.0, 2.0),
    )
    assert batches.order.per_epoch == 1
    settings = TrainSettings(steps=20, learning_rate=1e-2, dropout=False, validate_every=5)

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return (net(batch[0]) - batch[1]).norm(dim=1).mean()

    return train(net, TrainingTask(losses=[loss], batches=batches, validation=batches), settings)


def learn(net: Net, folder: Path, *, dropout: bool) -> _TrainResult:
    """Batches of 7 and 8 texts, so that two processes get unlike shares."""
    inputs, targets = material()

    def load(texts: Indices) -> Batch:
        return inputs[texts], targets[texts]

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return (net(batch[0]) - batch[1]).norm(dim=1).mean()

    batches = Batches(order=ByLength(np.arange(TEXTS), batch_size=8), load=load)
    settings = TrainSettings(
        steps=30, learning_rate=1e-2, dropout=dropout, validate_every=9, checkpoint_every=10, record_every=1
    )
    task = TrainingTask(losses=[loss], batches=batches, validation=batches)
    return train(net, task, settings, folder=folder)


def learn_by_graphs(net: Net) -> _TrainResult:
    """Batches that are gathered from positions, as on a GPU; each process takes a half of them."""
    inputs, targets = material()

    def load(texts: Indices) -> Batch:
        return inputs[texts], targets[texts]

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return (net(batch[0]) - batch[1]).norm(dim=1).mean()

    order = ByBucket(np.arange(TEXTS) % 30 + 1, batch_size=8)
    batches = Batches(order=order, load=load, gather=lambda positions, _width: load(positions.numpy()))
    settings = TrainSettings(steps=20, learning_rate=1e-2, dropout=False)
    return train(net, TrainingTask(losses=[loss], batches=batches), settings)


def weights(net: Net) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in net.state_dict().items()}


def run_and_die(folder: Path) -> None:
    """Kill this process in the middle of writing its second checkpoint."""
    save = torch.save

    def half(content: dict[str, Any], path: Path) -> None:
        save(content, path)
        if content["state"]["step"] == 20:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half  # type: ignore[assignment]
    learn(Net(), folder, dropout=True)


def run_together(folder: Path) -> None:
    """What each of two processes does."""
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    net = Net()
    result = learn(net, folder / "run", dropout=False)
    torch.save(
        {"weights": weights(net), "best_step": result.best_step}, folder / f"end-{state.process_index}.pt"
    )
    sharing = Net()
    shared = learn_from_shares(sharing, state.process_index, state.num_processes)
    torch.save(
        {"weights": weights(sharing), "loss": shared.loss, "validation": shared.validation},
        folder / f"shared-{state.process_index}.pt",
    )
    gathering = Net()
    gathered = learn_by_graphs(gathering)
    torch.save(
        {"weights": weights(gathering), "loss": gathered.loss}, folder / f"gathered-{state.process_index}.pt"
    )
    state.destroy_process_group()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path):
    died = forked.start(run_and_die, tmp_path / "killed", output=tmp_path / "printed")
    died.join()
    assert died.exitcode == -signal.SIGKILL, (tmp_path / "printed").read_text()
    places = sorted(place.name for place in (tmp_path / "killed" / "checkpoints").iterdir())
    assert places[0].startswith(".step-000000020."), "the scratch folder of the broken checkpoint"
    assert places[1:] == ["step-000000010"]
    assert lines(tmp_path / "killed")[-1]["step"] == 20
    straight, resumed = Net(), Net()
    learn(straight, tmp_path / "straight", dropout=True)
    result = learn(resumed, tmp_path / "killed", dropout=True)
    assert result.steps == 30
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("straight", "killed")]
    assert losses[0] == losses[1]
    assert [place.name for place in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-000000030"]


def test_two_processes_do_what_one_does(tmp_path: Path):
    forked.together(run_together, tmp_path, output=tmp_path / "printed")
    alone = Net()
    result = learn(alone, tmp_path / "alone", dropout=False)
    ends = [torch.load(tmp_path / f"end-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, weight in weights(alone).items():
        assert torch.equal(ends[0]["weights"][name], ends[1]["weights"][name]), name
        torch.testing.assert_close(weight, ends[0]["weights"][name], atol=1e-5, rtol=1e-4, msg=name)
    assert ends[0]["best_step"] == ends[1]["best_step"] == result.best_step
    together, one = lines(tmp_path / "run"), lines(tmp_path / "alone")
    assert len(together) == len(one) == 31
    for ours, theirs in zip(together[1:], one[1:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    looked = [[line["validation"] for line in log if line["validation"]] for log in (together, one)]
    assert looked[0] == pytest.approx(looked[1], rel=1e-4)
    holding_all = Net()
    result = learn_from_shares(holding_all, 0, 1)
    for rank in (0, 1):
        sharing = torch.load(tmp_path / f"shared-{rank}.pt", weights_only=True)
        assert sharing["loss"] == pytest.approx(result.loss, rel=1e-4)
        assert sharing["validation"] == pytest.approx(result.validation, rel=1e-4)
        for name, weight in weights(holding_all).items():
            torch.testing.assert_close(weight, sharing["weights"][name], atol=1e-5, rtol=1e-4, msg=name)
    alone = Net()
    result = learn_by_graphs(alone)
    for rank in (0, 1):
        gathered = torch.load(tmp_path / f"gathered-{rank}.pt", weights_only=True)
        assert gathered["loss"] == pytest.approx(result.loss, rel=1e-4)
        for name, weight in weights(alone).items():
            torch.testing.assert_close(weight, gathered["weights"][name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_full_disk_gives_one_sentence_and_keeps_the_last_checkpoint(tmp_path: Path):
    resource = pytest.importorskip("resource", reason="file size limits are a Unix thing")
    _write_checkpoint(tmp_path, 10, {"weights": torch.zeros(10)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(WriteFailed, match="free some space"):
            _write_checkpoint(tmp_path, 20, {"weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [place.name for place in (tmp_path / "checkpoints").iterdir()] == ["step-000000010"]

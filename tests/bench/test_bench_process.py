"""Workers that misbehave: real processes with the real protocol and a model that loads at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from trundle.bench import rounds
from trundle.bench.rounds import _MEASURES, _BenchedModel, _measure, _Worker
from trundle.bench.workload import _BenchSettings, workload
from trundle.errors import BadModel, TrundleError, UserError
from trundle.progress import SILENT

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")

FAKE_WORKER = """
import json, os, signal, subprocess, sys, time
print("hello from a start-up file")
import numpy as np
from trundle.bench.child import _LoadedModel, _private_streams, _serve
from trundle.embedder import _plain
from trundle.errors import BadInput, BadModel

LOG = sys.argv[1]
hoard = []

def find_opener(engine):
    return open_model

def open_model(model, *, threads, batch_size):
    calls = 0
    if model == "dies at once":
        sys.stderr.write("some warning\\nthe disk is gone\\n")
        os._exit(3)
    if model == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if model == "hangs":
        time.sleep(600)
    if model == "bad":
        raise BadModel("bad is not a model; give another")
    if model == "bad text":
        raise BadInput("text 1 is empty; leave it out")
    if model == "raises":
        raise RuntimeError("shapes\\ndo not fit")
    if model == "large":
        hoard.append(np.ones(100_000_000, dtype=np.uint8))

    def encode(texts):
        nonlocal calls
        calls += 1
        if model == "chatty":
            print(json.dumps({"texts": -1, "seconds": 1, "samples": [-1], "facts": {}}), flush=True)
            os.write(1, b"{}\\n")
            subprocess.run(["echo", "chatter of a child"], check=True)
            assert sys.stdin.read() == ""
        if model == "dies later" and calls > 8:
            os._exit(4)
        if model == "works for ever" and calls > 1:
            time.sleep(600)
        started = time.monotonic()
        time.sleep(0.001)
        with open(LOG, "a") as log:
            log.write(json.dumps([model, len(texts), started, time.monotonic()]) + "\\n")
        return np.ones((len(texts), 4), dtype=np.float32)

    embedder = _plain(model, encode)
    return _LoadedModel(embedder=embedder, parameters=7, max_tokens=None, device="cpu", folder=None)

_serve(*_private_streams(), find_opener)
"""


def settings(**changes: Any) -> _BenchSettings:
    values: dict[str, Any] = {
        "rounds": 2,
        "seconds": 0.01,
        "starts": 1,
        "batch_size": 16,
        "threads": 1,
        "pause": 0.0,
        "timeout": 60.0,
        "texts_given": False,
        "texts_fingerprint": "",
        "short_texts": 1,
        "short_mean_words": 1.0,
        "long_texts": 1,
        "long_mean_words": 1.0,
    }
    return _BenchSettings(**(values | changes))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def command(tmp_path: Path, log: Path) -> list[str]:
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE_WORKER)
    return [sys.executable, str(script), str(log)]


@pytest.fixture
def request_for(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    texts = tmp_path / "texts.json"
    texts.write_text(workload().as_json())
    common = {"ask": "open", "engine": "torch", "texts": str(texts), "threads": 1, "batch_size": 16}
    return lambda model: {**common, "model": model}


def alive(pid: int) -> bool:
    """Whether a process still runs; one that is dead but not yet collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Sequence[int]) -> None:
    """Fail rather than hang when a process stays."""
    for _ in range(600):
        if not any(map(alive, pids)):
            return
        time.sleep(0.1)
    pytest.fail(f"still alive: {[pid for pid in pids if alive(pid)]}")


def children() -> set[int]:
    """The processes this one has started and not yet collected."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.add(int(stat.parent.name))
    return found


def test_prints_on_stdout_do_not_reach_the_protocol(command: list[str], request_for: Any) -> None:
    with _Worker("chatty", threads=1, timeout=60, command=command) as worker:
        facts = worker.ask(request_for("chatty"))["facts"]
        worker.ask({"ask": "warm"})
        answer = worker.ask({"ask": "throughput", "kind": "long", "seconds": 0.01})
        samples = worker.ask({"ask": "latency", "kind": "short", "seconds": 0.01})["samples"]
    assert facts["parameters"] == 7
    assert facts["dimensions"] == 4
    assert answer["texts"] % 16 == 0
    assert answer["seconds"] >= 0.01
    assert all(sample > 0 for sample in samples)


@pytest.mark.parametrize(
    ("model", "kind", "sentence"),
    [
        ("dies at once", TrundleError, "process of dies at once died \\(the disk is gone\\)"),
        ("killed", TrundleError, "process of killed was killed from outside"),
        ("raises", TrundleError, "raises failed in the benchmark \\(RuntimeError: shapes do not fit\\)"),
        ("bad", BadModel, "^bad is not a model; give another$"),
        ("bad text", UserError, "^text 1 is empty; leave it out$"),
    ],
)
def test_a_failure_gives_one_sentence(
    model: str, kind: type[TrundleError], sentence: str, command: list[str], request_for: Any
) -> None:
    with (
        pytest.raises(TrundleError, match=sentence) as caught,
        _Worker(model, threads=1, timeout=60, command=command) as worker,
    ):
        worker.ask(request_for(model))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert not alive(worker.pid)


def test_a_hanging_worker_is_stopped(command: list[str], request_for: Any) -> None:
    with (
        pytest.raises(TrundleError, match=r"hangs gave no answer within 0\.5 s"),
        _Worker("hangs", threads=1, timeout=0.5, command=command) as worker,
    ):
        worker.ask(request_for("hangs"))
    assert not alive(worker.pid)


def test_a_worker_that_is_already_dead_can_be_asked_and_closed_twice(
    command: list[str], request_for: Any
) -> None:
    with _Worker("gone", threads=1, timeout=60, command=command) as worker:
        worker.ask(request_for("fine"))
        os.kill(worker.pid, signal.SIGKILL)
        wait_until_gone([worker.pid])
        with pytest.raises(TrundleError, match="killed from outside"):
            worker.ask({"ask": "warm"})
        worker.close()


def test_memory_is_the_workers_own(command: list[str], request_for: Any) -> None:
    """A new process can seem to start with its parent's peak; and what a model takes must be seen."""
    parents = bytearray(os.urandom(1024)) * 300_000
    with _Worker("large", threads=1, timeout=60, command=command) as worker:
        worker.ask(request_for("large"))
        memory = worker.ask({"ask": "memory"})
    assert len(parents) > 300_000_000
    assert memory["bare"] < 150_000_000
    assert 100_000_000 < memory["peak"] - memory["bare"] < 200_000_000


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_no_worker_outlives_its_parent(
    sent: signal.Signals, code: int, command: list[str], request_for: Any
) -> None:
    """The parent is killed, or stopped with Ctrl-C, while one worker is in the middle of a measure."""
    parent = f"""
import signal, sys
from trundle.bench.rounds import _Worker
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would have it ignored
command, request = {command!r}, {request_for("works for ever")!r}
try:
    with _Worker("a", threads=1, timeout=600, command=command) as a:
        with _Worker("b", threads=1, timeout=600, command=command) as b:
            a.ask(request)
            b.ask(request)
            print(a.pid, b.pid, flush=True)
            a.ask({{"ask": "warm"}})
except KeyboardInterrupt:
    sys.exit(130)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        process.send_signal(sent)
        assert process.wait() == code
    wait_until_gone(pids)


@pytest.fixture
def fake_race(command: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[_BenchedModel]]:
    """A complete benchmark of fake workers."""

    def run(models: Sequence[str], **changes: Any) -> list[_BenchedModel]:
        def worker(contestant: _BenchedModel, how: _BenchSettings) -> _Worker:
            return _Worker(contestant.model, threads=1, timeout=how.timeout, command=command)

        monkeypatch.setattr(rounds, "_worker", worker)
        contestants = [_BenchedModel(model=model, engine="torch") for model in models]
        _measure(contestants, workload(), settings(**changes), SILENT)
        return contestants

    return run


def test_turns_never_overlap_and_the_order_rotates(fake_race: Any, log: Path) -> None:
    before = children()
    contestants = fake_race(["a", "b", "c"], rounds=3, starts=2)
    assert children() == before
    for contestant in contestants:
        assert len(contestant.starts) == len(contestant.loads) == 2
        assert {measure: len(turns) for measure, turns in contestant.answers.items()} == dict.fromkeys(
            _MEASURES, 3
        )

    calls = [json.loads(line) for line in log.read_text().splitlines()]
    for (_, _, _, ended), (_, _, started, _) in pairwise(calls):
        assert ended <= started

    starts = "abc" + "abc" + "bca"  # the disk is warmed, then each model is started twice
    warm_up = "abc"
    turns = "".join(order * len(_MEASURES) for order in ("abc", "bca", "cab"))
    in_turn = [model for model, _ in groupby(model for model, *_ in calls)]
    assert in_turn == [model for model, _ in groupby(starts + warm_up + turns)]


def test_when_one_dies_in_the_middle_all_are_ended(fake_race: Any) -> None:
    before = children()
    with pytest.raises(TrundleError, match="process of dies later died \\(exit code 4\\)"):
        fake_race(["a", "dies later", "c"], rounds=20)
    assert children() == before

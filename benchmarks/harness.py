"""What the benchmarks share: rows in separate processes, corpora, scores, interleaved timing and memory."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sentence_transformers import SentenceTransformer

from trundle.bench.child import _private_streams, _until_closed
from trundle.bench.rounds import _rotated
from trundle.data.corpus import Corpus, read_corpus
from trundle.data.examples import LabelledRow
from trundle.data.texts import Text
from trundle.evaluate.scoring import evaluate
from trundle.evaluate.tasks import Task
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.model.cost import cost
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request
from trundle.progress import _Silent
from trundle.recipe import make_options, parse_recipe

ENGLISH_STS = tuple(
    f"sts/{name}" for name in ("STS12", "STS13", "STS14", "STS15", "STS17-en-en", "STSBenchmark")
)
TENTH = 10
LIBC = ctypes.CDLL(None)
Json = dict[str, Any]
T = TypeVar("T")


class Lines(_Silent):
    """Progress for a log file."""

    def say(self, line: str) -> None:
        """Print one line with the time."""
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def make_parser(doc: str | None, *what: str) -> argparse.ArgumentParser:
    """Make a parser whose help is the docstring; `what` are the commands of the script, if it has several."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if what:
        parser.add_argument("what", choices=what)
    return parser


def set_defaults(options: argparse.Namespace, defaults: Json) -> None:
    """Set options that were not passed to the defaults of a command."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def names(text: str) -> list[str]:
    """Split a comma-separated option."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Split a comma-separated option into integers."""
    return [int(part) for part in text.split(",")]


def write_json(place: str | Path, content: object) -> None:
    """Write a result and create its folder."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux); pass it to Popen as preexec_fn."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGKILL)


def run_rows(rows: Iterable[str], output: str | Path, *, at_once: int = 1) -> None:
    """Run this script again with `--only ROW` for each row, several at once, each with a log file."""
    Path(output).mkdir(parents=True, exist_ok=True)
    # Without a limit each process starts one thread per core.
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))} | os.environ
    started: dict[str, subprocess.Popen[bytes]] = {}
    for row in rows:
        while sum(process.poll() is None for process in started.values()) >= at_once:
            time.sleep(0.5)
        with (Path(output) / f"{row}.log").open("w") as log:
            command = [sys.executable, *sys.argv, "--only", row]
            started[row] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent
            )
    if failed := [name for name, process in started.items() if process.wait()]:
        raise SystemExit(f"failed: {', '.join(failed)}; see the logs in {output}")


def in_fresh_process(*words: str, launch: Sequence[str] = ()) -> Any:
    """Run this script again with other arguments and read the JSON of the last line it prints."""
    command = [sys.executable, *launch, sys.argv[0], *words]
    said = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    ).stdout
    return json.loads([line for line in said.splitlines() if line.startswith(("{", "["))][-1])


def reply_to_requests(answer: Callable[[Json], Json]) -> None:
    """Serve a `trundle.bench.rounds._Worker`: one JSON request and one answer per line."""
    requests, replies = _private_streams()
    for line in _until_closed(requests):
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


def read_folder(folder: str | Path) -> Corpus:
    """Read all parquet files of a folder."""
    return read_corpus([str(file) for file in sorted(Path(folder).glob("*.parquet"))], seed=0)


def training_corpus(texts: Sequence[str], rows: Sequence[LabelledRow] = ()) -> Corpus:
    """Make a corpus of texts, and of labelled rows, for training only: nothing is held out."""
    return Corpus(
        train=lambda: (Text(text=text) for text in texts),
        validation=lambda: iter(()),
        held_out=lambda: iter(()),
        labelled=lambda part: iter(rows if part == "train" else ()),
        facts=lambda: (),
    )


def apply_step(
    name: str, model: SentenceTransformer, options: Json, context: Context
) -> tuple[SentenceTransformer, Any]:
    """Plan and apply a method; return the new model and the plan."""
    step = METHODS[name]
    plan = step.plan(model, make_options(step, options), context)
    applied = step.apply(model, plan, context)
    applied.done()
    return applied.model, plan


def compress_by(
    source: str,
    steps: list[Json],
    output: Path,
    corpus: Corpus | None,
    *,
    seed: int = 0,
    compare: bool = True,
) -> Any:
    """Run a recipe given as a list of steps."""
    recipe = parse_recipe(json.dumps({"steps": steps}), name=output.name)
    return run_recipe(
        Request(source=source, output=output, corpus=corpus, seed=seed, compare=compare, progress=Lines()),
        recipe,
    )


def score(model: str, tasks: Sequence[Task], *, index: str | None = None) -> Json:
    """Score a model on tasks, and each search also on the index of another model."""
    opened = load(model)
    documents = None if index is None else embedder(load(index), name=index, half_on_gpu=True)
    size = cost(opened)
    found = []
    if tasks:
        student = embedder(opened, name=model, half_on_gpu=True)
        found = evaluate(student, tasks, documents=documents, progress=Lines())
    return {
        "parameters": size.parameters,
        "layers": size.layers,
        "bytes": size.file_bytes,
        "scores": [result.as_json() for result in found],
    }


def mean_of(scores: Iterable[Json], kind: str | None = None, mode: str = "standard") -> float:
    """Return the mean score of a kind of task, or of all; NaN if there are none."""
    found = [one["score"] for one in scores if one["mode"] == mode and kind in (None, one["kind"])]
    return statistics.fmean(found) if found else float("nan")


def held_out_search(name: str, data: Path, folder: Path) -> tuple[Path, list[Json], set[str]]:
    """Make a retrieval task of every tenth tuple in triplets/NAME.parquet.

    Its queries search all passages of these rows. Returns the folder of the task, the other rows, and the
    texts of the task, which must not be trained on.
    """
    rows = pq.read_table(data / "triplets" / f"{name}.parquet").to_pylist()
    measured, others = rows[::TENTH], [row for number, row in enumerate(rows) if number % TENTH]
    passages = list(dict.fromkeys(row[c] for row in measured for c in ("positive", "negative") if row[c]))
    place = {passage: str(number) for number, passage in enumerate(passages)}
    ids, split = [str(number) for number in range(len(measured))], ["test"] * len(measured)
    tables: dict[str, dict[str, list[Any]]] = {
        "corpus": {"_id": list(place.values()), "title": [""] * len(place), "text": passages},
        "queries": {"_id": ids, "text": [row["query"] for row in measured], "split": split},
        "qrels": {
            "query-id": ids,
            "corpus-id": [place[row["positive"]] for row in measured],
            "score": [1] * len(measured),
            "split": split,
        },
    }
    task = folder / "retrieval" / name
    task.mkdir(parents=True, exist_ok=True)
    for table, columns in tables.items():
        pq.write_table(pa.table(columns), task / f"{table}.parquet")
    return task, others, {*passages, *(row["query"] for row in measured)}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds by the clock and the CPU seconds of this process."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    clock, used = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - clock, time.process_time() - used


def interleave(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run all ways in every round, each round with another one first; the first round only warms up."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for place in _rotated(len(ways), max(turn, 0)):
            name = list(ways)[place]
            result = ways[name]()
            if turn >= 0:
                found[name].append(result)
    return found


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Show the median ratio of rounds and its range."""
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"


def compare(label: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> None:
    """Run two ways interleaved and print the ratio of what they return."""
    found = interleave({"ours": ours, "theirs": theirs}, rounds)
    print(f"{label}: {ratio_of(found['ours'], found['theirs'])}", flush=True)


def show(row: Json) -> None:
    """Print a row of results on one line."""
    shown = {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()}
    print("  ".join(f"{key}: {value}" for key, value in shown.items()), flush=True)


def memory(field: str = "VmHWM") -> int:
    """Read a size of this process in bytes (Linux): VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(re.findall(rf"{field}:\s+(\d+) kB", status)[0]) * 1024

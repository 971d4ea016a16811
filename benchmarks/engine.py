"""Labelling and training on a GPU against the plainest fast scripts for the same work, one after the other.

    python benchmarks/engine.py TEACHER STUDENT --data TEXTS --bare FOLDER [--seconds 30] [--texts 1000000]
        [--rounding none]
    python benchmarks/engine.py --planning MODEL/planning.json

The first form labels texts with the teacher and trains the student on them (float, then with int4 rounding),
and prints texts a second. FOLDER has `label.py` and `train.py`, which do the same with one model written out
by hand; each prints its own rate, and the ratios are to those. Ours tokenises while it labels; the bare
labeller tokenises before, so there is a second ratio that counts this. --profile prints the slowest kernels.
The second form prints where the time of a `compress --budget` went.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import harness
from trundle.data.sampling import distinct, sample
from trundle.data.texts import Text, read_texts
from trundle.embedder import Embedder
from trundle.methods.align import ALIGN, AlignOptions
from trundle.methods.contract import Context
from trundle.model.load import load
from trundle.teacher.labelling import build_targets
from trundle.teacher.teacher import open_teacher

COMPILING = 40.0
"""Seconds for compiling and capturing, which `align` counts as training time."""
RATE = re.compile(r"([\d,]+)(?: texts)?/s")
TOKENISED = re.compile(r"(\d+) s: .* tokenised")


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("models", nargs="*", type=str)
    parser.add_argument("--data")
    parser.add_argument("--bare", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--rounding", default="none,int4")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--planning", type=Path)
    options = parser.parse_args()
    if options.planning:
        show_time(options.planning)
    else:
        compare(options)


def show_time(planning: Path) -> None:
    """Print the seconds of each part of a search, the longest first."""
    record = json.loads(planning.read_text())
    spent = record["spent_seconds"]
    whole = sum(spent.values())
    for label, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{label:40} {seconds:8.1f} s {seconds / whole:6.1%}")
    print(f"{'in all':40} {whole:8.1f} s; planned: {record['planned_seconds']}")


def compare(options: argparse.Namespace) -> None:
    """Label and train by trundle and by the bare scripts."""
    teacher, student = options.models
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = sample(distinct(read_texts(options.data), key=lambda text: text.text), options.texts, seed=0)
        pq.write_table(pa.table({"text": [text.text for text in texts]}), folder / "texts.parquet")
        bare: dict[str, float] = {}
        if options.bare:
            work = folder / "work"
            labelled = run(options.bare / "label.py", teacher, work, folder / "texts.parquet")
            bare["labelling"] = last_rate(labelled)
            whole = int(TOKENISED.findall(labelled)[0]) + len(texts) / bare["labelling"]
            bare["labelling and tokenising"] = len(texts) / whole
            arguments = ("--teacher", teacher, "--seconds", options.seconds, "-o", folder / "out.pt")
            bare["training"] = last_rate(run(options.bare / "train.py", student, work, *arguments))
        rate = label(teacher, texts, folder, profile=options.profile)  # tokenising is part of it
        for what in ("labelling", "labelling and tokenising"):
            report(what, rate, bare.get(what))
        for rounding in options.rounding.split(","):
            rate = train(student, folder, options.seconds, rounding)
            report(f"training, rounding {rounding}", rate, bare.get("training"))


def report(what: str, rate: float, bare: float | None) -> None:
    """Print a rate, and its ratio to that of the bare script."""
    ratio = "" if bare is None else f", {rate / bare:.2f} of {bare:,.0f}"
    print(f"{what}: {rate:,.0f} texts/s{ratio}", flush=True)


def last_rate(printed: str) -> float:
    """Return the last rate in what a script has printed."""
    return float(RATE.findall(printed)[-1].replace(",", ""))


def run(script: Path, *arguments: object) -> str:
    """Run a bare script, and return what it prints."""
    command = [sys.executable, str(script), *map(str, arguments)]
    bound = harness.end_with_parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=bound) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        raise SystemExit(f"{script} failed")
    return "".join(lines)


def label(teacher: str, texts: list[Text], folder: Path, *, profile: bool) -> float:
    """Return how many texts a second are labelled and written, after a small start."""
    opened = open_teacher(teacher)
    assert opened.embedder is not None
    opened.embedder.text([text.text for text in texts[:2048]])
    if profile:
        show_kernels(opened.embedder, [text.text for text in texts[:65_536]])
    began = time.perf_counter()
    build_targets(texts, opened.embedder, opened.manifest("float16", 8192), folder / "store")
    return len(texts) / (time.perf_counter() - began)


def show_kernels(teacher: Embedder, texts: list[str]) -> None:
    """Print the kernels that take longest when texts are encoded."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    with profiling(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        teacher.text(texts)
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))


def train(student: str, folder: Path, seconds: float, rounding: str) -> float:
    """Return the texts a second of the steps of `align`, without compiling, capturing and validating."""
    model = load(student)
    settings = {
        "teacher": str(folder / "store"),
        "minutes": (seconds + COMPILING) / 60,
        "batch_size": 512,
        "learning_rate": 5e-4,
        "warmup": 300,
        "compile": True,
        "rounding": rounding,
    }
    context = Context(original=model, cache=folder / "cache", progress=harness.Lines(), fresh=True)
    applied = ALIGN.apply(model, ALIGN.plan(model, AlignOptions.model_validate(settings), context), context)
    lines = [json.loads(line) for line in str(applied.files["align.jsonl"]).splitlines()]
    rates: list[float] = [line["texts_per_second"] for line in lines if line.get("texts_per_second")]
    return float(statistics.harmonic_mean(rates[len(rates) // 4 :]))


if __name__ == "__main__":
    main()

"""trundle's runtime on a CPU against other ways to embed texts, interleaved; and models by batch size.

    python benchmarks/runtime.py engines MODEL --calibrate texts.parquet [--work FOLDER] [--tasks FOLDER]
    python benchmarks/runtime.py batches MODEL[@ENGINE] … --texts FOLDER [--threads 1 --own-time] -o FILE

engines  queries (about 10 tokens) and documents (about 200), one at a time and all at once; start to first
         vector; peak memory; and the share of this machine's int8 matmul peak that documents reach. Every
         contestant is a process; ratios are to the first one. --work keeps the exported graphs. With --tasks
         also the scores of each graph on STSBenchmark and SciFact; --rounds 0 measures only these
batches  LEAF's table 9: texts per second, shortest latency, and the largest batch within 100 ms. A model runs
         in torch where it has torch weights and by its first graph otherwise; MODEL@ENGINE names an engine of
         `trundle bench`. FOLDER is a retrieval task. --own-time counts CPU time of one thread instead of the
         clock
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

import harness
from harness import Json
from trundle.bench.child import _engines_of, _loader
from trundle.bench.rounds import _PAUSE, _rotated, _Worker
from trundle.bench.workload import _cpu_clock, _other_cores, this_machine, workload
from trundle.data.texts import calibration_texts
from trundle.errors import UserError
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.evaluate.tasks import _read_columns, _texts_of
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions
from trundle.export.tracing import _tensor_model, _write_onnx
from trundle.model.cost import cost
from trundle.model.encode import embedder, multiplies_bf16
from trundle.model.load import load
from trundle.precision import EngineName, Precision, graph_format
from trundle.runtime.description import usable_cores
from trundle.runtime.encoder import Encoder

Found = dict[str, dict[str, list[float]]]
MEASURES = ("short at once", "long at once", "short alone", "long alone")
GRAPHS: tuple[tuple[EngineName, Precision], ...] = (
    ("onnx", "float32"),
    ("onnx", "int8"),
    ("openvino", "bfloat16"),
    ("openvino", "int8"),
)
LIBRARIES = ("sentence-transformers float32", "sentence-transformers bfloat16")
OTHERS = (*LIBRARIES, "onnxruntime", "fastembed", "openvino")
SIZES, PATIENCE = (1, 2, 4, 8, 16, 24), 0.1
"""The batch sizes of LEAF's table 9, and the seconds within which its largest batch must be encoded."""
FILES = {"documents": "corpus.parquet", "queries": "queries.parquet"}
MEMORY: Json = {"measure": "memory", "texts": [], "seconds": 0}


def prepare(model: str, folder: Path, calibrate: Sequence[str]) -> list[str]:
    """Export the graphs that are missing and trace a plain one; return those that exist."""
    if not (folder / "modules.json").is_file():
        load(model, device="cpu").save_pretrained(str(folder))
    texts, there = calibration_texts(calibrate), []
    for to, precision in GRAPHS:
        try:
            if not (folder / graph_format(to, precision).file).is_file():
                export_model(str(folder), to=to, precision=precision, options=ExportOptions(calibrate=texts))
            there.append(f"{to}-{precision}")
        except UserError as error:
            print(f"{to}-{precision} is left out: {error}")
    if not (folder / "plain.onnx").is_file():
        _write_onnx(
            _tensor_model(load(str(folder), device="cpu")), folder / "plain.onnx", tracer="torchscript"
        )
    return there


def race(names: Sequence[str], folder: Path, options: argparse.Namespace) -> Found:
    """Measure all contestants, interleaved."""
    work = workload()
    texts = {"short": list(work.short), "long": list(work.long)}
    measures = (*MEASURES, "start", "first memory", "memory")
    found: Found = {name: {measure: [] for measure in measures} for name in names}

    def worker(name: str) -> _Worker:
        child = str(Path(__file__).with_name("runtime_child.py"))
        command = (sys.executable, "-P", child, name, str(folder), str(options.threads))
        return _Worker(name, threads=options.threads, timeout=600, command=command)

    for turn in range(options.starts + 1):  # the first start reads the files into the disk cache
        for place in _rotated(len(names), turn):
            with worker(names[place]) as starting:
                starting.ask(MEMORY)
                if turn:
                    found[names[place]]["start"].append(time.perf_counter() - starting.started)
    with ExitStack() as stack:
        running = {name: stack.enter_context(worker(name)) for name in names}
        for name in names:
            found[name]["first memory"].append(running[name].ask(MEMORY)["value"])
        for turn in range(-1, options.rounds):  # the first round warms up
            for measure in MEASURES:
                for place in _rotated(len(names), max(turn, 0)):
                    time.sleep(_PAUSE)
                    request = {"measure": measure, "texts": texts[measure.split()[0]]}
                    reply = running[names[place]].ask(request | {"seconds": options.seconds})
                    if turn >= 0:
                        found[names[place]][measure].append(reply["value"])
        for name in names:
            found[name]["memory"].append(running[name].ask(MEMORY)["value"])
    return found


def int8_peak(threads: int) -> float:
    """Return the operations per second of large int8 matmuls in openvino, the best of several runs."""
    import openvino
    from openvino import opset13 as op

    size, rng = 2048, np.random.default_rng(0)
    given = node = op.parameter([size, size], np.float32)

    def quantised(tensor: Any) -> Any:
        low, high = op.constant(np.float32(-1)), op.constant(np.float32(1))
        return op.fake_quantize(tensor, low, high, low, high, 255)

    for _ in range(4):
        matrix = op.constant(rng.uniform(-1, 1, (size, size)).astype(np.float32) / size)
        node = op.matmul(quantised(node), quantised(matrix), False, True)
    model, limit = openvino.Model([node], [given]), {"INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(model, "CPU", limit)
    values = rng.uniform(-1, 1, (size, size)).astype(np.float32)
    return float(4 * 2 * size**3 / min(harness.timed(lambda: compiled(values))[0] for _ in range(20)))


def show(found: Found, folder: Path, threads: int) -> None:
    middle = {name: {key: statistics.median(row[key]) for key in row} for name, row in found.items()}
    first = next(iter(middle.values()))
    heads = ("short/s", "long/s", "short ms", "long ms", "start s", "memory MB", "first MB")
    print(f"{this_machine()}\nthreads: {threads}\n\n{'':34}" + "".join(f"{title:>18}" for title in heads))
    for name, row in middle.items():
        cells = []
        for measure in MEASURES:
            value = f"{1 / row[measure]:,.0f}" if "at once" in measure else f"{1e3 * row[measure]:.2f}"
            cells.append(f"{value} ({first[measure] / row[measure]:.2f}×)")
        cells.append(f"{row['start']:.2f} ({row['start'] / first['start']:.3f}×)")
        sizes = ("memory", "first memory")
        cells += [f"{row[key] / 1e6:,.0f} ({row[key] / first[key]:.2f}×)" for key in sizes]
        print(f"{name:34}" + "".join(f"{cell:>18}" for cell in cells))
    ours = [name for name in middle if name.startswith("trundle")]
    best = min(ours, key=lambda name: middle[name]["long at once"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    length = statistics.fmean(len(tokenizer.encode(text).ids) for text in workload().long)
    work = cost(load(str(folder), device="cpu")).flops_per_token * length
    peak, reached = int8_peak(threads), work / middle[best]["long at once"]
    share = f"{reached / 1e9:,.0f} of {peak / 1e9:,.0f} billion operations/s"
    print(f"\n{best} on documents: {share} = {reached / peak:.1%} of the int8 peak")


def engines(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="trundle-runtime-") as scratch:
        folder = options.work or Path(scratch) / "model"
        graphs = prepare(options.models[0], folder, options.calibrate)
        installed = [name for name in OTHERS if find_spec(name.split()[0].replace("-", "_"))]
        if not multiplies_bf16(torch.device("cpu")):  # torch would emulate it, a hundred times slower
            installed.remove(LIBRARIES[1])
            print(f"{LIBRARIES[1]} is left out: this processor does not multiply bfloat16")
        names = [*installed, *(f"trundle {graph}" for graph in graphs)]
        if options.rounds:
            show(race(names, folder, options), folder, options.threads)
        if options.tasks:
            tasks = find_tasks(["STSBenchmark", "SciFact"], options.tasks)
            scores = {"torch": evaluate(embedder(load(str(folder)), name="torch"), tasks)}
            for graph in graphs[1:]:
                scores[graph] = evaluate(Encoder(folder, graph=graph).embedder(graph), tasks)
            for name, results in scores.items():
                for mine, whole in zip(results, scores["torch"], strict=True):
                    share = f"{100 * mine.score:8.2f}{mine.score / whole.score:9.4f} of torch"
                    print(f"{name:20}{mine.task:16}{mine.main:20}{share}")


def serve_model(name: str, threads: int) -> None:
    """Open a model in a process of its own and time what it is asked to encode."""
    model, _, chosen = name.partition("@")
    engine = chosen or _engines_of(model)[0]
    opened = _loader(engine)(model, threads=threads, batch_size=SIZES[-1]).embedder
    encode = {"documents": opened.document, "queries": opened.query}

    def answer(asked: Json) -> Json:
        before = _cpu_clock()
        encode[asked["kind"]](asked["texts"])
        after = _cpu_clock()
        found = {"clock": after[0] - before[0], "own": after[1] - before[1], "runs": engine}
        return found | {"other_cores": _other_cores(before, after)}

    harness.reply_to_requests(answer)


def batches(options: argparse.Namespace) -> None:
    rng, measured, time_of = random.Random(0), [], "own" if options.own_time else "clock"
    command = (sys.executable, __file__, "--serve", str(options.threads))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_Worker(one, threads=options.threads, timeout=1800, command=(*command, one)))
            for one in options.models
        ]
        for kind, file in FILES.items():
            place = Path(options.texts) / file
            texts = list(_texts_of(_read_columns(place, ("text",)), "text", place))
            for worker in workers:
                worker.ask({"kind": kind, "texts": texts[: SIZES[-1]]})
            for turn in range(options.rounds):
                for size in SIZES:
                    drawn = rng.sample(texts, size)
                    for at in _rotated(len(workers), turn):
                        time.sleep(_PAUSE)
                        reply = workers[at].ask({"kind": kind, "texts": drawn})
                        measured.append(reply | {"model": options.models[at], "texts": kind, "size": size})
    rows: list[Json] = []
    for kind in FILES:
        for model in options.models:
            mine = [row for row in measured if (row["model"], row["texts"]) == (model, kind)]
            times = {size: [one[time_of] for one in mine if one["size"] == size] for size in SIZES}
            taken = {size: statistics.median(seconds) for size, seconds in times.items()}
            row: Json = {"model": Path(model).name, "runs": mine[0]["runs"], "texts": kind}
            row["per_second"] = statistics.fmean(size / seconds for size, seconds in taken.items())
            first = next((one for one in rows if one["texts"] == kind), row)
            row |= {"ratio": row["per_second"] / first["per_second"], "latency": min(taken.values())}
            row["largest"] = max((size for size, seconds in taken.items() if seconds <= PATIENCE), default=0)
            rows.append(row)
            harness.show(row)
    busy = [row["other_cores"] for row in measured if row["other_cores"] is not None]
    conditions = {"other_cores": round(statistics.fmean(busy), 1) if busy else None, "time": time_of}
    conditions |= {"rounds": options.rounds, "threads": options.threads, "machine": this_machine().cpu}
    harness.write_json(options.output, {"rows": rows, "conditions": conditions})


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve_model(sys.argv[3], int(sys.argv[2]))
        return
    parser = harness.make_parser(__doc__, "engines", "batches")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--calibrate", nargs="+", default=[], help="engines: texts to calibrate int8 with")
    parser.add_argument("--work", type=Path, help="engines")
    parser.add_argument("--starts", type=int, default=2, help="engines")
    parser.add_argument("--seconds", type=float, default=2, help="engines")
    parser.add_argument("--tasks", type=Path, help="engines")
    parser.add_argument("--texts", help="batches: folder of a retrieval task")
    parser.add_argument("--own-time", action="store_true", help="batches: CPU time, with --threads 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-o", "--output", help="batches")
    options = parser.parse_args()
    if options.own_time and options.threads != 1:
        parser.error("--own-time needs --threads 1")
    (engines if options.what == "engines" else batches)(options)


if __name__ == "__main__":
    main()

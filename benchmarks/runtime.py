"""trundle's runtime against everything else that embeds texts on a CPU, in turns, in one run.

    python benchmarks/runtime.py MODEL --calibrate texts.parquet [--work FOLDER] [--rounds 5] [--seconds 2] [--threads N]
    python benchmarks/runtime.py MODEL --calibrate … --tasks FOLDER      # also what int8 costs on STSBenchmark and SciFact
                                                                         # (--rounds 0: only that)

Short queries (about 10 tokens) and documents (about 200), one at a time and all at once; process start to first
vector; peak memory of the process; and the share of this machine's measured int8 matrix peak that documents reach.
Every contestant is a process of its own, asked in rotating order; medians over rounds, ratios to the first contestant.
`--work` keeps the exported graphs between runs. fastembed joins where it is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trundle.bench.child import _latencies, _peak_memory
from trundle.bench.results import _percentile, _rotated
from trundle.bench.rounds import _PAUSE, _Worker
from trundle.bench.workload import _usable_cores, this_machine, workload

if TYPE_CHECKING:
    from trundle.precision import EngineName, Precision

Encode = Callable[[Sequence[str]], Any]
BATCH = 32
MEMORY = {"measure": "memory", "texts": [], "seconds": 0}
MEASURES = ("short at once", "short alone", "long at once", "long alone")
GRAPHS: tuple[tuple[EngineName, Precision], ...] = (
    ("onnx", "float32"),
    ("onnx", "int8"),
    ("openvino", "bfloat16"),
    ("openvino", "int8"),
)


def torch_encode(folder: Path, threads: int, dtype: str) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: model.encode(texts, batch_size=BATCH)


def plain_batches(folder: Path, run: Callable[[dict[str, Any]], Any]) -> Encode:
    """What people write by hand: sort by length, 32 at a time, padded to the longest."""
    import numpy as np
    from tokenizers import Tokenizer

    limit = json.loads((folder / "encoder.json").read_text())["max_tokens"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(limit)

    def encode(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        parts = []
        for start in range(0, len(texts), BATCH):
            rows = tokenizer.encode_batch([texts[place] for place in order[start : start + BATCH]])
            ids = np.array([row.ids for row in rows])
            mask = np.array([row.attention_mask for row in rows])
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            parts.append(np.array(run(given)))
        return np.concatenate(parts)[np.argsort(order)]

    return encode


def plain_onnxruntime(folder: Path, threads: int) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(folder / "plain.onnx"), options)
    names = {each.name for each in session.get_inputs()}
    wanted = ["sentence_embedding"]
    return plain_batches(folder, lambda given: session.run(wanted, {name: given[name] for name in names})[0])


def plain_openvino(folder: Path, threads: int) -> Encode:
    import openvino

    compiled = openvino.Core().compile_model(folder / "plain.onnx", "CPU", {"INFERENCE_NUM_THREADS": threads})
    names = {each.get_any_name() for each in compiled.inputs}
    return plain_batches(
        folder, lambda given: compiled({name: given[name] for name in names})["sentence_embedding"]
    )


def fastembed_encode(folder: Path, threads: int) -> Encode:
    import numpy as np
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    dimensions = json.loads((folder / "encoder.json").read_text())["dimensions"]
    TextEmbedding.add_custom_model(
        model="plain",
        pooling=PoolingType.DISABLED,
        normalization=False,
        sources=ModelSource(hf="local/plain"),
        dim=dimensions,
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding("plain", specific_model_path=str(folder), threads=threads)
    return lambda texts: np.array(list(model.embed(texts, batch_size=BATCH)))


def trundle_encode(folder: Path, threads: int, graph: str) -> Encode:
    from trundle.runtime.encoder import Encoder

    return Encoder(folder, graph=graph, threads=threads).encode


OPENERS: dict[str, Callable[[Path, int], Encode]] = {
    "sentence-transformers float32": lambda folder, threads: torch_encode(folder, threads, "float32"),
    "sentence-transformers bfloat16": lambda folder, threads: torch_encode(folder, threads, "bfloat16"),
    "onnxruntime, plain": plain_onnxruntime,
    "fastembed": fastembed_encode,
    "openvino, plain": plain_openvino,
    "trundle onnx-float32": lambda folder, threads: trundle_encode(folder, threads, "onnx-float32"),
    "trundle onnx-int8": lambda folder, threads: trundle_encode(folder, threads, "onnx-int8"),
    "trundle openvino-bfloat16": lambda folder, threads: trundle_encode(folder, threads, "openvino-bfloat16"),
    "trundle openvino-int8": lambda folder, threads: trundle_encode(folder, threads, "openvino-int8"),
}
NEEDS = {"fastembed": "fastembed", "openvino": "openvino"}


def child(name: str, folder: Path, threads: int) -> None:
    """One contestant: make a first vector, then answer requests; the first answer is the end of its start."""
    encode = OPENERS[name](folder, threads)
    encode(["how do I keep my index?"])
    for line in sys.stdin:
        request = json.loads(line)
        texts, seconds = request["texts"], request["seconds"]
        if request["measure"] == "memory":
            answer({"memory": _peak_memory()})
        elif request["measure"].endswith("alone"):
            answer({"value": _percentile(_latencies(encode, texts, seconds), 50)})
        else:
            done, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds or not done:
                encode(texts)
                done += len(texts)
            answer({"value": (time.perf_counter() - began) / done})


def answer(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def prepare(model: str, folder: Path, calibrate: Sequence[str]) -> set[str]:
    """Export what is not there yet, and trace the plain graph as torch would have it; the names of graphs that are refused."""
    from trundle.cli.console import _terminal
    from trundle.errors import UserError
    from trundle.export.exporting import export_model
    from trundle.export.quantise import ExportOptions, calibration_texts
    from trundle.export.tracing import _tensor_model, _write_onnx
    from trundle.model.load import load
    from trundle.precision import graph_format

    if not (folder / "modules.json").is_file():
        load(model, device="cpu").save_pretrained(str(folder))
    texts, refused = calibration_texts(calibrate), set()
    for to, precision in GRAPHS:
        if (folder / graph_format(to, precision).file).is_file():
            continue
        try:
            how = ExportOptions(calibrate=texts)
            progress = _terminal(quiet=False)
            export_model(str(folder), to=to, precision=precision, options=how, progress=progress)
        except UserError as error:
            print(f"{to}-{precision} is left out: {error}")
            refused.add(f"{to}-{precision}")
    if not (folder / "plain.onnx").is_file():
        _write_onnx(
            _tensor_model(load(str(folder), device="cpu")), folder / "plain.onnx", tracer="torchscript"
        )
    return refused


def race(
    names: Sequence[str], folder: Path, *, rounds: int, seconds: float, starts: int, threads: int
) -> dict[str, Any]:
    work = workload()
    texts = {"short": list(work.short), "long": list(work.long)}
    found: dict[str, Any] = {name: {measure: [] for measure in MEASURES} | {"start": []} for name in names}

    def worker(name: str) -> _Worker:
        command = (sys.executable, "-P", __file__, "--child", name, str(folder), str(threads))
        return _Worker(name, threads=threads, timeout=600, command=command)

    for turn in range(starts + 1):  # the first start reads the files into the disk cache and does not count
        for place in _rotated(len(names), turn):
            with worker(names[place]) as starting:
                starting.ask(MEMORY)
                if turn:
                    found[names[place]]["start"].append(time.perf_counter() - starting.started)
    running = {name: worker(name) for name in names}
    try:
        for name in names:
            found[name]["first memory"] = running[name].ask(MEMORY)["memory"]
        for turn in range(-1, rounds):  # the first round warms up and does not count
            for measure in MEASURES:
                for place in _rotated(len(names), max(turn, 0)):
                    time.sleep(_PAUSE)
                    kind = measure.split()[0]
                    request = {"measure": measure, "texts": texts[kind], "seconds": seconds}
                    reply = running[names[place]].ask(request)
                    if turn >= 0:
                        found[names[place]][measure].append(reply["value"])
        for name in names:
            found[name]["memory"] = running[name].ask(MEMORY)["memory"]
    finally:
        for each in running.values():
            each.close()
    return found


def int8_peak(threads: int) -> float:
    """Operations a second of a large int8 product in openvino, the best of several runs."""
    import numpy as np
    import openvino
    from openvino import opset13 as op

    rows, size = 2048, 2048
    given = op.parameter([rows, size], np.float32)

    def quantised(node: Any) -> Any:
        low, high = op.constant(np.float32(-1)), op.constant(np.float32(1))
        return op.fake_quantize(node, low, high, low, high, 255)

    rng = np.random.default_rng(0)
    node = given
    for _ in range(4):
        matrix = op.constant(rng.uniform(-1, 1, (size, size)).astype(np.float32) / size)
        node = op.matmul(quantised(node), quantised(matrix), False, True)
    compiled = openvino.Core().compile_model(
        openvino.Model([node], [given]), "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    values = rng.uniform(-1, 1, (rows, size)).astype(np.float32)
    taken = []
    for _ in range(20):
        began = time.perf_counter()
        compiled(values)
        taken.append(time.perf_counter() - began)
    return float(4 * 2 * rows * size * size / min(taken))


def document_operations(folder: Path) -> float:
    """Operations of one long text: the backbone's own count at its mean length."""
    from tokenizers import Tokenizer

    from trundle.model.cost import cost
    from trundle.model.load import load

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lengths = [len(tokenizer.encode(text).ids) for text in workload().long]
    return float(cost(load(str(folder), device="cpu")).flops_per_token * sum(lengths) / len(lengths))


def show(found: dict[str, Any], folder: Path, threads: int) -> None:
    names = list(found)
    first = found[names[0]]
    print(f"{this_machine()}\nthreads: {threads}\n")
    heading = ("short/s", "long/s", "short ms", "long ms", "start s", "memory MB", "first MB")
    print(f"{'':34}" + "".join(f"{title:>18}" for title in heading))

    def middle(row: dict[str, Any], measure: str) -> float:
        return float(median(row[measure]))

    for name in names:
        row = found[name]
        faster = {measure: middle(first, measure) / middle(row, measure) for measure in MEASURES}
        rates = ("short at once", "long at once")
        cells = [f"{1 / middle(row, measure):,.0f} ({faster[measure]:.2f}×)" for measure in rates]
        waits = ("short alone", "long alone")
        cells += [f"{middle(row, measure) * 1e3:.2f} ({faster[measure]:.2f}×)" for measure in waits]
        cells.append(f"{middle(row, 'start'):.2f} ({middle(row, 'start') / middle(first, 'start'):.3f}×)")
        sizes = ("memory", "first memory")
        cells += [f"{row[key] / 1e6:,.0f} ({row[key] / first[key]:.2f}×)" for key in sizes]
        print(f"{name:34}" + "".join(f"{cell:>18}" for cell in cells))
    best = min(
        (name for name in names if name.startswith("trundle")),
        key=lambda name: middle(found[name], "long at once"),
    )
    peak, work = int8_peak(threads), document_operations(folder)
    reached = work / middle(found[best], "long at once")
    print(
        f"\n{best} on documents: {reached / 1e9:,.0f} of {peak / 1e9:,.0f} billion operations/s = {reached / peak:.1%} of the int8 peak"
    )


def quality(folder: Path, root: Path, refused: set[str]) -> None:
    """STSBenchmark and SciFact by torch and by each graph."""
    from trundle.evaluate.scoring import evaluate, find_tasks
    from trundle.model.encode import embedder
    from trundle.model.load import load
    from trundle.runtime.encoder import Encoder

    tasks = find_tasks(["STSBenchmark", "SciFact"], root)
    scores = {"torch": evaluate(embedder(load(str(folder)), name="torch"), tasks)}
    for graph in sorted({"onnx-int8", "openvino-bfloat16", "openvino-int8"} - refused):
        scores[graph] = evaluate(Encoder(folder, graph=graph).embedder(graph), tasks)
    for name, results in scores.items():
        for mine, torch in zip(results, scores["torch"], strict=True):
            print(
                f"{name:20}{mine.task:16}{mine.main:20}{100 * mine.score:8.2f}{mine.score / torch.score:9.4f} of torch"
            )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--calibrate", nargs="+", required=True)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--threads", type=int, default=_usable_cores())
    parser.add_argument("--only", nargs="*", help="names of contestants, by their beginning")
    parser.add_argument("--tasks", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trundle-runtime-") as scratch:
        folder = options.work or Path(scratch) / "model"
        refused = prepare(options.model, folder, options.calibrate)
        names = []
        for name in OPENERS:
            missing = next((p for mark, p in NEEDS.items() if mark in name and find_spec(p) is None), None)
            if missing:
                print(f"{name} is left out: {missing} is not installed")
            elif name.rpartition(" ")[2] in refused:
                continue
            elif not options.only or name.startswith(tuple(options.only)):
                names.append(name)
        if options.rounds:
            found = race(
                names,
                folder,
                rounds=options.rounds,
                seconds=options.seconds,
                starts=options.starts,
                threads=options.threads,
            )
            show(found, folder, options.threads)
        if options.tasks:
            quality(folder, options.tasks, refused)


if __name__ == "__main__":
    main()

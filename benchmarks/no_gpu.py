"""What a model becomes without a GPU and without training, beside what one would take instead.

    python benchmarks/no_gpu.py MODEL --data TEXTS… --root TASKS -o OUT [--tasks SciFact,Cranfield,CACM]
        [--own CACM] [--documents 1000] [--measured 1000] [--vectors FILE] [--only as-is,int8]

Every row is made by the command or the call that a user would type, one after the other, on all cores. Rows
of other libraries start from the float32 graph that `trundle export` writes, so all run in the same runtime.
Printed for each: megabytes of the graph, minutes by the clock and of CPU time, distance from the model itself
and agreement@10 with it on held-out texts (on the row's own index, and on the index of the model itself), and
nDCG@10: of the tasks `--own` on the row's own index, with at most `--documents` documents each, and of
`--tasks` on the index of the model itself. `--vectors` is a parquet file (text, vector) with vectors of the
model that need not be computed again. Rows that exist in OUT are not made again.

as-is           the float32 graph
int8, int4      trundle export --int8 / --int4, with --data
int4-nearest    int4 with each weight rounded to the nearest code
layers-N        trundle depth --keep N, and layers-N-unhealed with --heal none, as float32 graphs
minutes-N       trundle compress --budget 7x --minutes N
ort-int8        onnxruntime.quantization.quantize_dynamic
ort-int4        onnxruntime's MatMulNBitsQuantizer (HQQ, blocks of 32; the token table by its default)
nncf-int8       nncf.compress_weights on the OpenVINO graph
nncf-int4       the same in int4 with blocks of 32; with nncf's scale estimation the vectors came out wrong
model2vec       model2vec.distill; its vectors have no index in common with the model's
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from harness import Json, Lines, make_parser, mean_of, names, write_json
from trundle.data.corpus import read_corpus
from trundle.data.sampling import sample
from trundle.embedder import Embedder, Encode, Vectors, asymmetric
from trundle.evaluate.fidelity import measure_fidelity, queries_and_documents
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.model.matrices import grid_weights, put_on_grid
from trundle.runtime.encoder import Encoder
from trundle.teacher.targets import HeldOutVectors

ROWS = (
    *("as-is", "int8", "int4-nearest", "int4", "ort-int8", "ort-int4", "nncf-int8", "nncf-int4"),
    *("model2vec", "minutes-5", "minutes-15", "minutes-60"),
)
CALIBRATED = 2000
FLOAT = "onnx-float32"


def trundle(*words: object) -> None:
    """Run a command as a user does."""
    subprocess.run([sys.executable, "-m", "trundle", *map(str, words)], check=True, stdout=sys.stderr)


def cpu_seconds() -> float:
    """CPU time of this process and of the commands that it has run."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def with_vectors(whole: Embedder, file: str) -> Embedder:
    """The model with some vectors read from a file."""
    table = pq.read_table(file, columns=["text", "vector"]).to_pydict()
    known = {
        text: np.asarray(vector, np.float32)
        for text, vector in zip(table["text"], table["vector"], strict=True)
    }

    def through(encode: Encode) -> Encode:
        def looked_up(texts: Sequence[str]) -> Vectors:
            if new := [text for text in dict.fromkeys(texts) if text not in known]:
                known.update(zip(new, encode(new), strict=True))
            return np.stack([known[text] for text in texts])

        return looked_up

    return whole.through(through)


def smaller_task(source: Path, target: Path, most: int) -> Path:
    """A copy of a retrieval task with its judged documents and as many others as make `most`."""
    target.mkdir(parents=True, exist_ok=True)
    corpus, qrels = (pq.read_table(source / f"{name}.parquet") for name in ("corpus", "qrels"))
    judged = set(qrels["corpus-id"].to_pylist())
    ids = corpus["_id"].to_pylist()
    others = [place for place, one in enumerate(ids) if one not in judged]
    places = [place for place, one in enumerate(ids) if one in judged]
    places += sample(others, max(0, most - len(places)), seed=0)
    pq.write_table(corpus.take(sorted(places)), target / "corpus.parquet")
    for name in ("queries", "qrels"):
        shutil.copy(source / f"{name}.parquet", target)
    return target


def exported(folder: Path, graph: str) -> tuple[Embedder, int]:
    """Open one graph of a folder; return it and its bytes."""
    encoder = Encoder(folder, graph=graph)
    path = folder / encoder.graph.path
    files = {path, path.with_suffix(".bin") if path.suffix == ".xml" else Path(f"{path}.data")}
    return encoder.embedder(folder.name), sum(file.stat().st_size for file in files if file.is_file())


class Rows:
    """Makes each row in a folder of its own."""

    def __init__(self, options: argparse.Namespace, texts: Sequence[str]) -> None:
        self.model, self.data, self.output = options.model, options.data, Path(options.output)
        self.texts = texts
        self.calibrate = self.output / "calibrate.txt"
        self.output.mkdir(parents=True, exist_ok=True)
        self.calibrate.write_text("\n".join(" ".join(text.split()) for text in texts), encoding="utf-8")

    def make(self, row: str) -> tuple[Embedder, int, float, float]:
        """Return the row's model, its bytes, and the seconds by the clock and of CPU time that it took.

        What it starts from is not counted.
        """
        kind, _, number = row.partition("-")
        if kind in ("ort", "nncf"):
            self._start("openvino" if kind == "nncf" else "onnx")
        began, used = time.perf_counter(), cpu_seconds()
        if kind == "layers":
            found = self._layers(row, *number.split("-"))
        elif kind == "minutes":
            found = self._searched(row, number)
        elif kind == "model2vec":
            found = self._static()
        else:
            found = getattr(self, f"_{row.replace('-', '_')}")()
        return *found, time.perf_counter() - began, cpu_seconds() - used

    def _start(self, engine: str) -> Path:
        """The float32 graph of the model itself."""
        folder = self.output / f"float-{engine}"
        if not folder.is_dir():
            trundle("export", self.model, "--to", engine, "-o", folder)
        return folder

    def _as_is(self) -> tuple[Embedder, int]:
        return exported(self._start("onnx"), FLOAT)

    def _quantised(self, row: str, source: object, flag: str) -> tuple[Embedder, int]:
        folder = self.output / row
        if not folder.is_dir():
            trundle("export", source, "--to", "onnx", flag, "--data", self.calibrate, "-o", folder)
        return exported(folder, f"onnx-{flag.removeprefix('--')}")

    def _int8(self) -> tuple[Embedder, int]:
        return self._quantised("int8", self.model, "--int8")

    def _int4(self) -> tuple[Embedder, int]:
        return self._quantised("int4", self.model, "--int4")

    def _int4_nearest(self) -> tuple[Embedder, int]:
        rounded = load(self.model, device="cpu")
        put_on_grid(grid_weights(rounded))
        rounded.save_pretrained(str(self.output / "nearest"), create_model_card=False)
        return self._quantised("int4-nearest", self.output / "nearest", "--int4")

    def _layers(self, row: str, keep: str, unhealed: str = "") -> tuple[Embedder, int]:
        made, folder = self.output / f"{row}-torch", self.output / row
        heal = "none" if unhealed else "closed-form"
        trundle("depth", self.model, "--keep", keep, "--heal", heal, "--data", self.calibrate, "-o", made)
        trundle("export", made, "--to", "onnx", "-o", folder)
        return exported(folder, FLOAT)

    def _searched(self, row: str, minutes: str) -> tuple[Embedder, int]:
        folder = self.output / row
        data = [word for source in self.data for word in ("--data", source)]
        trundle("compress", self.model, "--budget", "7x", "--minutes", minutes, *data, "-o", folder)
        return exported(folder, "onnx")

    def _replaced(self, row: str, engine: str, write: Callable[[Path, Path], None]) -> tuple[Embedder, int]:
        """A copy of the float32 graph's folder whose graph is what another library makes of it."""
        source, folder = self.output / f"float-{engine}", self.output / row
        shutil.copytree(source, folder, dirs_exist_ok=True)
        path = Encoder(source, graph=engine).graph.path
        for file in (folder / path).parent.glob(f"{Path(path).stem}.*"):
            file.unlink()
        write(source / path, folder / path)
        return exported(folder, engine)

    def _ort_int8(self) -> tuple[Embedder, int]:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        def write(source: Path, target: Path) -> None:
            quantize_dynamic(str(source), str(target), weight_type=QuantType.QInt8)

        return self._replaced("ort-int8", "onnx", write)

    def _ort_int4(self) -> tuple[Embedder, int]:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            HQQWeightOnlyQuantConfig,
            MatMulNBitsQuantizer,
        )

        def write(source: Path, target: Path) -> None:
            matrices = MatMulNBitsQuantizer(
                onnx.load(source), algo_config=HQQWeightOnlyQuantConfig(block_size=32)
            )
            matrices.process()
            settings: Any = {"block_size": 32, "is_symmetric": True, "op_types_to_quantize": ("Gather",)}
            table = MatMulNBitsQuantizer(
                matrices.model.model, algo_config=DefaultWeightOnlyQuantConfig(**settings)
            )
            table.process()
            table.model.save_model_to_file(str(target))

        return self._replaced("ort-int4", "onnx", write)

    def _compressed(self, row: str, mode: str, **settings: Any) -> tuple[Embedder, int]:
        import nncf
        import openvino

        def write(source: Path, target: Path) -> None:
            model, chosen = openvino.Core().read_model(source), getattr(nncf.CompressWeightsMode, mode)
            openvino.save_model(nncf.compress_weights(model, mode=chosen, **settings), target, False)

        return self._replaced(row, "openvino", write)

    def _nncf_int8(self) -> tuple[Embedder, int]:
        return self._compressed("nncf-int8", "INT8_ASYM")

    def _nncf_int4(self) -> tuple[Embedder, int]:
        return self._compressed("nncf-int4", "INT4_ASYM", group_size=32, all_layers=True)

    def _static(self) -> tuple[Embedder, int]:
        from model2vec.distill import distill

        made = distill(model_name=str(self.model), pca_dims=None)
        made.save_pretrained(str(self.output / "model2vec"))

        def encode(texts: Sequence[str]) -> Any:
            return np.asarray(made.encode(list(texts)), dtype=np.float32)

        size = sum(file.stat().st_size for file in (self.output / "model2vec").glob("*.safetensors"))
        return Embedder(name="model2vec", text=encode, query=encode, document=encode), size


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True, help="texts to calibrate with; a tenth measures")
    parser.add_argument("--root", required=True, help="the folder of the tasks")
    parser.add_argument("--tasks", type=names, default=["SciFact", "Cranfield", "CACM"])
    parser.add_argument("--own", type=names, default=["CACM"])
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--measured", type=int, default=1000)
    parser.add_argument("--vectors")
    parser.add_argument("--only", type=names, default=list(ROWS))
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    corpus = read_corpus(options.data, seed=0)
    calibrated = [text.text for text in sample(corpus.train(), CALIBRATED, seed=0)]
    asked = queries_and_documents(sample(corpus.validation(), options.measured, seed=0))
    rows, tasks = Rows(options, calibrated), find_tasks(options.tasks, options.root)
    source = Path(options.root, "retrieval")
    small = [smaller_task(source / name, rows.output / name, options.documents) for name in options.own]
    own = find_tasks(list(map(str, small)))
    whole = embedder(load(options.model, device="cpu"), name="model")
    whole = whole if options.vectors is None else with_vectors(whole, options.vectors)
    vectors = HeldOutVectors(Lines())
    for row in options.only:
        place = rows.output / f"{row}.json"
        if not place.is_file():
            made, size, seconds, cpu = rows.make(row)
            found = measure_fidelity(made, whole, *asked, held_out=vectors)
            scores = evaluate(made, own, held_out=vectors)
            content: Json = {"row": row, "bytes": size, "minutes": seconds / 60, "cpu_minutes": cpu / 60}
            content |= {"distance": found.distance, "own": found.agreement_standard}
            content["ndcg"] = {"own": [one.as_json() for one in scores]}
            if row != "model2vec":  # its vectors are no queries for the model's index
                content["shared"] = found.agreement_asymmetric
                scores = evaluate(asymmetric(made, whole), tasks, held_out=vectors)
                content["ndcg"]["shared"] = [one.as_json() for one in scores]
            write_json(place, content)
        show(json.loads(place.read_text()))


def show(row: Json) -> None:
    """Print one row of the table."""
    ndcg = {index: 100 * mean_of(scores) for index, scores in row["ndcg"].items()}
    cells = [
        *(f"{row['bytes'] / 1e6:.1f}", f"{row['minutes']:.1f} ({row['cpu_minutes']:.1f})"),
        *(f"{row[index]:.1%}" if index in row else "–" for index in ("shared", "own")),
        *(f"{ndcg[index]:.1f}" if index in ndcg else "–" for index in ("shared", "own")),
    ]
    print(f"| {row['row']} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""The vocabulary paper's third table: what a model with fewer tokens weighs, needs and takes, beside the whole one.

    python benchmarks/vocabulary_cost.py MODEL --data DIR -o cost.json
    python benchmarks/vocabulary_cost.py MODEL --data DIR --removed 35 --rounds 40 -o more.json

DIR holds classification/SST2.parquet. Tokens are chosen by its training texts (tf-idf), and texts made of its test rows
are encoded one at a time: short ones (about 10 tokens) and long ones (about 200). The models take turns, text by text, on
one thread, and what counts is the processor's time: on a machine that others use, too, the clock tells more about them.
Memory is the peak of a process of its own with one model, libraries and all, after batches of 32; not that of a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from sentence_transformers import SentenceTransformer

from rows import to_learn_from
from trundle.bench.results import _rotated
from trundle.bench.rounds import _Worker
from trundle.bench.workload import _cpu_clock, _other_cores, _usable_cores, _Workload, workload
from trundle.methods.catalogue import METHODS
from trundle.methods.contract import Context
from trundle.model.load import load
from trundle.model.save import save, weight_bytes
from trundle.model.surgery import transformer_of
from trundle.recipe import _make_options
from trundle.records import Lineage

WHOLE = "whole"
FATES = {"tfidf+cluster": "cluster", "decompose": "decompose"}
TIMES = {"short": 18, "long": 3}
"""Texts of each kind in a round: as many as there are models, or a multiple, so that each goes first as often."""
BATCH = 32


def sst2(data: Path, split: str) -> list[str]:
    file = data / "classification" / "SST2.parquet"
    texts: list[str] = pq.read_table(file, filters=[("split", "=", split)])["text"].to_pylist()
    return texts


def cut(model: SentenceTransformer, texts: list[str], oov: str, removed: int) -> SentenceTransformer:
    """The model without that percentage of all its parameters, all of them tokens."""
    tool, context = METHODS["vocabulary"], Context(original=model, corpus=to_learn_from(texts))
    options = {"parameters": str(1 - Fraction(removed, 100)), "score": "tfidf", "oov": oov}
    small: SentenceTransformer = tool.apply(
        model, tool.plan(model, _make_options(tool, options), context), context
    ).model
    return small


def embedding_parameters(model: SentenceTransformer) -> int:
    """Of the table with one row per token."""
    weight: Any = transformer_of(model).model.get_input_embeddings().weight
    return int(weight.numel())


def storage_bytes(folder: Path) -> int:
    """Of the weights, and of the map of lost tokens where there is one."""
    return weight_bytes(folder) + sum(file.stat().st_size for file in folder.rglob("*.npy"))


def peak_memory(folder: Path, work: _Workload) -> int:
    """The most a process with this model alone has had, in bytes."""
    texts = folder / "bench-texts.json"
    texts.write_text(work.as_json(), encoding="utf-8")
    opening = {"ask": "open", "model": str(folder), "engine": "torch", "texts": str(texts)}
    with _Worker(folder.name, threads=1, timeout=500) as worker:
        worker.ask({**opening, "threads": 1, "batch_size": BATCH})
        worker.ask({"ask": "warm"})
        return int(worker.ask({"ask": "memory"})["peak"])


def milliseconds(models: Mapping[str, SentenceTransformer], texts: list[str]) -> dict[str, float]:
    """Processor time of a text by each model; who goes first changes from text to text."""
    names, spent = list(models), dict.fromkeys(models, 0.0)
    for turn, text in enumerate(texts):
        for place in _rotated(len(names), turn):
            began = time.process_time()
            models[names[place]].encode([text], show_progress_bar=False)
            spent[names[place]] += time.process_time() - began
    return {name: round(1e3 * seconds / len(texts), 3) for name, seconds in spent.items()}


def race(
    models: Mapping[str, SentenceTransformer], work: _Workload, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by model and kind of text, one a round, each round with texts of its own; the first only warms up."""
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in TIMES} for name in models}
    for turn in range(-1, rounds):
        for kind, count in TIMES.items():
            texts = getattr(work, kind)
            chosen = [texts[(max(turn, 0) * count + place) % len(texts)] for place in range(count)]
            for name, value in milliseconds(models, chosen).items():
                if turn >= 0:
                    found[name][kind].append(value)
    return found


def shown(models: list[dict[str, Any]]) -> str:
    """A line for each model, with ratios to the first."""
    lines, sizes = [], ("parameters", "embedding_parameters", "storage_bytes", "memory_bytes")
    for model in models:
        cells = [f"{size} {model[size]:,} ({model[size] / models[0][size]:.4f}×)" for size in sizes]
        for kind in TIMES:
            mine, first = (one["milliseconds"][kind] for one in (model, models[0]))
            ratios = [a / b for a, b in zip(mine, first, strict=True)]
            cells.append(f"{kind} {statistics.median(mine):.2f} ms ({statistics.median(ratios):.3f}×)")
        lines.append(f"{model['method']}: " + ", ".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True, type=Path, help="folder of the tasks")
    parser.add_argument("--removed", type=int, default=20, help="percent of all parameters")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", "-o", required=True, type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    whole = load(arguments.model, device="cpu")
    train, work = sst2(arguments.data, "train"), workload(sst2(arguments.data, "test"))
    models = {WHOLE: whole} | {name: cut(whole, train, oov, arguments.removed) for name, oov in FATES.items()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, model in models.items():
            folder = save(model, Path(scratch) / name, lineage=Lineage(source="benchmark"), card="")
            row = {"method": name, "parameters": sum(weight.numel() for weight in model.parameters())}
            row |= {"embedding_parameters": embedding_parameters(model)}
            row |= {"storage_bytes": storage_bytes(folder), "memory_bytes": peak_memory(folder, work)}
            rows.append(row)
    before = _cpu_clock()
    times = race(models, work, arguments.rounds)
    others = _other_cores(before, _cpu_clock())
    rows = [row | {"milliseconds": times[row["method"]]} for row in rows]
    print(shown(rows))
    print(f"other programs kept {others} of {_usable_cores()} cores busy")
    content = {
        "removed": arguments.removed,
        "cores": _usable_cores(),
        "other_cores": None if others is None else round(others, 2),
        "torch": torch.__version__,
        "models": rows,
    }
    arguments.output.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()

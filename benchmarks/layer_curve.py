"""What the layer-loss curve costs beside plain encoding of the same texts: time and memory.

    python benchmarks/layer_curve.py MODEL --data TUPLES [--batches 3] [--rounds 2] [--bf16]

Both tokenise and read the same texts in the same pieces, the longest first. Time: they take turns batch by batch, and the
ratio of each pair is kept; wanted is a median of 1.15 or less. By the clock, and by what the process itself computed,
which a busy machine disturbs less. Memory: each in a process of its own, the largest resident size while reading (Linux; on
a GPU what torch held at most), loaded model included; wanted is a ratio of 1.2 or less.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

from trundle.data.examples import Example, _read_examples
from trundle.methods.depth.curve import _BATCH, _TEXTS_AT_ONCE, _batch_losses, _draw_tuples, _tokens_of
from trundle.model.heads import prompts_by_role
from trundle.model.load import load


def curve(model: SentenceTransformer, batch: list[Example]) -> None:
    _batch_losses(model, batch)


def encode(model: SentenceTransformer, batch: list[Example]) -> None:
    """The pieces that the curve reads, through the model as it is."""
    prompts = prompts_by_role(model)
    documents = [example.positive for example in batch]
    documents += [negative for example in batch for negative in example.negatives]
    for texts, prompt in (([e.query for e in batch], prompts["query"]), (documents, prompts["document"])):
        ordered = sorted(texts, key=len, reverse=True)
        vectors = []
        with torch.inference_mode():
            for start in range(0, len(ordered), _TEXTS_AT_ONCE):
                features = _tokens_of(model, ordered[start : start + _TEXTS_AT_ONCE], prompt)
                vectors.append(model(features)["sentence_embedding"])
        torch.cat(vectors)


WAYS: dict[str, Callable[[SentenceTransformer, list[Example]], None]] = {"encode": encode, "curve": curve}


def prepared(options: argparse.Namespace) -> tuple[SentenceTransformer, list[list[Example]]]:
    model = load(options.model).eval()
    if options.bf16:
        model = model.bfloat16()
    drawn = _draw_tuples(_read_examples(options.data), _BATCH * options.batches, seed=0)
    return model, [drawn[start : start + _BATCH] for start in range(0, len(drawn), _BATCH)]


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and seconds of computing."""
    clock, computed = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - clock, time.process_time() - computed


def times(options: argparse.Namespace) -> None:
    model, batches = prepared(options)
    for way in WAYS.values():
        way(model, batches[0][:8])
    ratios: tuple[list[float], list[float]] = ([], [])
    for number, batch in enumerate(batches * options.rounds):
        order = list(WAYS) if number % 2 else list(WAYS)[::-1]
        taken = {name: timed(lambda name=name, batch=batch: WAYS[name](model, batch)) for name in order}  # type: ignore[misc]
        for kind in (0, 1):
            ratios[kind].append(taken["curve"][kind] / taken["encode"][kind])
        print(f"  encode {taken['encode'][0]:7.2f} s, curve {taken['curve'][0]:7.2f} s", flush=True)
    for kind, name in enumerate(("by the clock", "of computing")):
        found = sorted(ratios[kind])
        print(f"time {name}: {statistics.median(found):.3f} × (pairs: {found[0]:.3f} to {found[-1]:.3f})")


def memory(options: argparse.Namespace, way: str) -> None:
    model, batches = prepared(options)
    before = peak(reset=True)
    for batch in batches:
        WAYS[way](model, batch)
    print(json.dumps([before, peak()]))


def peak(*, reset: bool = False) -> int:
    """The most bytes this process has held since the last reset."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated())
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def memories() -> None:
    found: dict[str, tuple[int, int]] = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", way]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[way] = tuple(json.loads(answer.splitlines()[-1]))
        before, most = found[way]
        print(
            f"memory, {way}: {most / 1e6:,.0f} MB at most, {(most - before) / 1e6:,.0f} MB of it while reading"
        )
    whole = found["curve"][1] / found["encode"][1]
    reading = (found["curve"][1] - found["curve"][0]) / (found["encode"][1] - found["encode"][0])
    print(f"memory: {whole:.3f} × (while reading {reading:.3f} ×)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--only", choices=list(WAYS), help="measure the memory of one way in this process")
    options = parser.parse_args()
    if options.only:
        memory(options, options.only)
        return
    times(options)
    memories()


if __name__ == "__main__":
    main()

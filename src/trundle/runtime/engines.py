"""Which library runs which graph; each library is imported only when one of its graphs is opened."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel, MissingExtra
from trundle.runtime.describe import EngineName, Graph, installed
from trundle.runtime.tokens import Ids


class Run(Protocol):
    """A graph ready to run. May be called from several threads at once."""

    def __call__(self, ids: Ids, mask: Ids) -> Vectors:
        """The vectors of one padded batch."""
        ...


CLASSES: Mapping[EngineName, tuple[str, str]] = {
    "openvino": ("trundle.runtime.openvino_engine", "OpenVinoRun"),
    "onnx": ("trundle.runtime.onnx_engine", "OnnxRun"),
}
WHOLE_BYTE = 8
SMALLEST_FIRST = ("int8", "int4+int8", "int4", "bfloat16", "float16", "float32")


def usable_cores() -> int:
    """The cores this process may run on, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_x86(machine: str) -> bool:
    """Whether a processor is of the kind openvino is made for."""
    return machine.lower() in ("x86_64", "amd64")


def faster_engine(machine: str) -> EngineName:
    """What is ahead here, as docs/measurements.md has it: on x86 openvino, on ARM onnxruntime."""
    return "openvino" if is_x86(machine) else "onnx"


def may_overflow(graph: Graph, processor: str) -> bool:
    """Whether 8-bit products can overflow in silence: on x86 processors whose flags name no VNNI."""
    whole_bytes = (
        graph.precision in ("int8", "int4+int8") and graph.facts.get("bits of a weight") == WHOLE_BYTE
    )
    return whole_bytes and "sse2" in processor and "vnni" not in processor


def processor_flags() -> str:
    """What the processor can do, where the system tells."""
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.is_file() else ""


def choose(graphs: Sequence[Graph], wanted: str | None, folder: Path, say: Callable[[str], None]) -> Graph:
    """The graph to run: the one that was asked for, or the fastest that can be run here.

    `wanted` is an engine (`onnx`), a precision (`int8`), both (`onnx-int8`), or None. Int8 comes first because
    export only writes it where it passed, then the library that is the faster of the two on this kind of processor.
    """
    if not graphs:
        raise BadModel(f"{folder} names no graph to run; run: trundle export {folder} --to onnx")
    first = faster_engine(platform.machine())
    ranked = sorted(graphs, key=lambda graph: (SMALLEST_FIRST.index(graph.precision), graph.engine != first))
    parts = set(wanted.split("-")) if wanted else set()
    fitting = [graph for graph in ranked if parts <= {graph.engine, graph.precision}]
    if not fitting:
        there = ", ".join(f"{graph.engine}-{graph.precision}" for graph in ranked)
        raise BadInput(f"{folder} has no graph {wanted!r}; ask for one of {there}, or export it")
    for graph in fitting:
        if installed(graph.engine):
            if graph is not fitting[0]:
                say(f"{fitting[0].engine} is not installed: {graph.path} is run by {graph.engine} instead")
            if may_overflow(graph, processor_flags()):
                say(f"{graph.path} can be wrong on this processor; export it again with --older-cpus")
            return graph
    raise MissingExtra(
        f"running {fitting[0].path}", "openvino" if fitting[0].engine == "openvino" else "runtime"
    )


def open_graph(graph: Graph, folder: Path, *, threads: int, streams: int) -> Run:
    """A graph ready for `streams` calls at once, each on `threads` threads."""
    path = folder / graph.path
    if not path.is_file():
        raise BadModel(f"{path} is missing; export the model again")
    module, name = CLASSES[graph.engine]
    run: Run = getattr(import_module(module), name)(
        path, threads=threads, streams=streams, precision=graph.precision
    )
    return run

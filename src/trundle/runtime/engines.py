"""Which library runs which graph; each library is imported only when one of its graphs is opened."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from queue import LifoQueue
from typing import Protocol, cast

import numpy as np
import onnxruntime
import openvino

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel, MissingExtra
from trundle.runtime.description import EngineName, Graph, installed
from trundle.runtime.tokens import _Ids


class _Run(Protocol):
    """A graph ready to run. May be called from several threads at once."""

    def __call__(self, ids: _Ids, mask: _Ids) -> Vectors:
        """The vectors of one padded batch."""
        ...


_CLASSES: Mapping[EngineName, tuple[str, str]] = {
    "openvino": ("trundle.runtime.engines", "OpenVinoRun"),
    "onnx": ("trundle.runtime.engines", "OnnxRun"),
}
_WHOLE_BYTE = 8
SMALLEST_FIRST = ("int8", "int4+int8", "int4", "bfloat16", "float16", "float32")


def _usable_cores() -> int:
    """The cores this process may run on, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_x86(machine: str) -> bool:
    """Whether a processor is of the kind openvino is made for."""
    return machine.lower() in ("x86_64", "amd64")


def faster_engine(machine: str) -> EngineName:
    """What is ahead here, as docs/measurements.md has it: on x86 openvino, on ARM onnxruntime."""
    return "openvino" if is_x86(machine) else "onnx"


def _may_overflow(graph: Graph, processor: str) -> bool:
    """Whether 8-bit products can overflow in silence: on x86 processors whose flags name no VNNI."""
    whole_bytes = (
        graph.precision in ("int8", "int4+int8") and graph.facts.get("bits of a weight") == _WHOLE_BYTE
    )
    return whole_bytes and "sse2" in processor and "vnni" not in processor


def _processor_flags() -> str:
    """What the processor can do, where the system tells."""
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.is_file() else ""


def _choose(graphs: Sequence[Graph], wanted: str | None, folder: Path, say: Callable[[str], None]) -> Graph:
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
            if _may_overflow(graph, _processor_flags()):
                say(f"{graph.path} can be wrong on this processor; export it again with --older-cpus")
            return graph
    raise MissingExtra(
        f"running {fitting[0].path}", "openvino" if fitting[0].engine == "openvino" else "runtime"
    )


def _open_graph(graph: Graph, folder: Path, *, threads: int, streams: int) -> _Run:
    """A graph ready for `streams` calls at once, each on `threads` threads."""
    path = folder / graph.path
    if not path.is_file():
        raise BadModel(f"{path} is missing; export the model again")
    module, name = _CLASSES[graph.engine]
    run: _Run = getattr(import_module(module), name)(
        path, threads=threads, streams=streams, precision=graph.precision
    )
    return run


_OUTPUT = "sentence_embedding"
_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class OnnxRun:
    """One session. Any number of callers may run it at once; each run uses `threads` threads."""

    def __init__(self, path: Path, *, threads: int, streams: int, precision: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
        # Matrices stored in int8 but multiplied in float: opened once, and never fused with rounded inputs.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime has a class per failure and no base but Exception
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"{path} is damaged or cut short ({reason}); export the model again") from error
        _give_back_memory()
        self._inputs = {each.name for each in self._session.get_inputs()}
        outputs = {each.name for each in self._session.get_outputs()}
        if _OUTPUT not in outputs or not self._inputs <= _INPUTS:
            raise BadModel(f"{path} is no graph from texts to {_OUTPUT}; export the model again")

    def __call__(self, ids: _Ids, mask: _Ids) -> Vectors:
        """The vectors of one padded batch."""
        given = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            given["token_type_ids"] = np.zeros_like(ids)
        return cast("Vectors", self._session.run([_OUTPUT], given)[0])


def _give_back_memory() -> None:
    """Let the system have what opening took and running does not need: where weights are stored in four bits, most of it.

    Only glibc has to be asked.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class _OpenVinoRun:
    """One compiled graph that can do `streams` runs at once, each on `threads` threads; further callers wait."""

    def __init__(self, path: Path, *, threads: int, streams: int, precision: str) -> None:
        core = openvino.Core()
        try:
            graph = core.read_model(path)
            vectors = graph.output(_OUTPUT)
            self._inputs = [each.get_any_name() for each in graph.inputs]
            settings = {
                "INFERENCE_NUM_THREADS": threads * streams,
                "NUM_STREAMS": streams,
                # Without this every graph is silently run in bfloat16 where the processor can. Int8 graphs must
                # not be: openvino 2026.4 then gives wrong vectors (cosine 0.87) for texts padded to 32 tokens.
                "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
            }
            compiled = core.compile_model(openvino.Model([vectors], graph.get_parameters()), "CPU", settings)
        except Exception as error:  # openvino raises RuntimeError for everything
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"{path} is damaged or cut short ({reason}); export the model again") from error
        if not set(self._inputs) <= _INPUTS:
            raise BadModel(f"{path} is no graph from texts to {_OUTPUT}; export the model again")
        self._free: LifoQueue[openvino.InferRequest] = LifoQueue()
        for _ in range(streams):
            self._free.put(compiled.create_infer_request())

    def __call__(self, ids: _Ids, mask: _Ids) -> Vectors:
        """The vectors of one padded batch."""
        given = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            given["token_type_ids"] = np.zeros_like(ids)
        request = self._free.get()
        try:
            vectors: Vectors = request.infer(given, share_inputs=True)[0]
        finally:
            self._free.put(request)
        return vectors

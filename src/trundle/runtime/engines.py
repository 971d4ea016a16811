"""Choose a graph and load it; a library is imported only when one of its graphs is loaded."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel, MissingExtra
from trundle.precision import EngineName, graph_format, preference
from trundle.runtime.description import Graph, installed

_Ids = NDArray[np.int64]
_GraphSession = Callable[[_Ids, _Ids], Vectors]
"""A loaded graph: ids and mask of a padded batch to vectors. Several threads may call it at once."""

_CPU_FLAGS = Path("/proc/cpuinfo")
_OUTPUT = "sentence_embedding"
_LARGE_BATCH = 2048
"""Tokens of a batch whose memory onnxruntime returns to the system; else it keeps the most it ever needed."""
_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


def is_x86(machine: str) -> bool:
    """Whether a processor is of the kind that OpenVINO is made for."""
    return machine.lower() in ("x86_64", "amd64")


def faster_engine(machine: str) -> EngineName:
    """The faster engine on this kind of processor, as measured in docs/measurements.md."""
    return "openvino" if is_x86(machine) else "onnx"


def _int8_overflows() -> bool:
    """Whether matmuls of 8-bit weights can overflow silently: on x86 processors whose flags name no VNNI."""
    flags = _CPU_FLAGS.read_text() if _CPU_FLAGS.is_file() else ""
    return "sse2" in flags and "vnni" not in flags


def _may_overflow(graph: Graph) -> bool:
    in_int8 = graph_format(graph.engine, graph.precision).matmuls == "int8"
    return in_int8 and graph.facts.get("bits of a weight") == 8 and _int8_overflows()


def _choose(graphs: Sequence[Graph], wanted: str | None, folder: Path, warn: Callable[[str], None]) -> Graph:
    """The requested graph, or the fastest that can run here.

    int8 comes first because export writes it only if its loss is small; then the engine that is faster here.
    """
    if not graphs:
        raise BadModel(f"{folder} names no graph to run; run: trundle export {quote(str(folder))} --to onnx")
    first = faster_engine(platform.machine())
    ranked = sorted(graphs, key=lambda graph: (preference(graph.precision), graph.engine != first))
    parts = set(wanted.split("-")) if wanted else set()
    fitting = [graph for graph in ranked if parts <= {graph.engine, graph.precision}]
    if not fitting:
        there = ", ".join(f"{graph.engine}-{graph.precision}" for graph in ranked)
        raise BadInput(f"{folder} has no graph {wanted!r}; choose one of {there}, or export it")
    fitting = [graph for graph in fitting if (folder / graph.path).is_file()] or fitting
    for graph in fitting:
        if installed(graph.engine):
            if graph is not fitting[0]:
                warn(f"{fitting[0].engine} is not installed: {graph.path} is run by {graph.engine} instead")
            if _may_overflow(graph):
                warn(f"the int8 of {graph.path} can overflow on this processor; export it with --older-cpus")
            return graph
    best = fitting[0]
    raise MissingExtra(f"running {best.path}", "openvino" if best.engine == "openvino" else "runtime")


def _load_graph(graph: Graph, folder: Path, threads: int, streams: int) -> _GraphSession:
    """A graph ready for `streams` calls at once, each on `threads` threads."""
    path = folder / graph.path
    if not path.is_file():
        raise BadModel(f"{path} is missing; export the model again")
    if graph.engine == "onnx":
        return OnnxSession(path, threads=threads)
    return _OpenVinoSession(path, threads=threads, streams=streams, bfloat16=graph.precision == "bfloat16")


class OnnxSession:
    """A graph in onnxruntime. Any number of callers may run it at once; each call uses `threads` threads."""

    def __init__(self, path: Path, *, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Else memory is planned for each shape that comes, in a block of its own that is never given back.
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
        # Matrices stored in int8 whose matmul is in float: dequantised once, never fused with rounded inputs.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class per failure and no base but Exception
            raise _damaged(path, error) from error
        _release_memory()
        self._session, self._inputs = session, [each.name for each in session.get_inputs()]
        self._large = onnxruntime.RunOptions()
        self._large.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        _check_graph(path, self._inputs, [each.name for each in session.get_outputs()])

    def __call__(self, ids: _Ids, mask: _Ids) -> Vectors:
        """The vectors of one padded batch."""
        options = self._large if ids.size >= _LARGE_BATCH else None
        return cast(
            "Vectors", self._session.run([_OUTPUT], _named_inputs(self._inputs, ids, mask), options)[0]
        )


class _OpenVinoSession:
    """A graph in OpenVINO that computes `streams` calls at once, each on `threads` threads of its own."""

    def __init__(self, path: Path, *, threads: int, streams: int, bfloat16: bool) -> None:
        import openvino

        core = openvino.Core()
        try:
            graph = core.read_model(path)
            vectors = graph.output(_OUTPUT)
            self._inputs = [each.get_any_name() for each in graph.inputs]
            settings = {
                "INFERENCE_NUM_THREADS": threads * streams,
                "NUM_STREAMS": streams,
                # Without this hint OpenVINO runs every graph in bfloat16 if the processor can. Int8 graphs
                # must not: OpenVINO 2026.4 then gives wrong vectors (cosine 0.87) for texts padded to 32
                # tokens.
                "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
            }
            compiled = core.compile_model(openvino.Model([vectors], graph.get_parameters()), "CPU", settings)
        except Exception as error:  # OpenVINO raises RuntimeError for everything
            raise _damaged(path, error) from error
        _check_graph(path, self._inputs, [_OUTPUT])
        self._new_request, self._free = compiled.create_infer_request, list[Any]()

    def __call__(self, ids: _Ids, mask: _Ids) -> Vectors:
        # A caller of low priority may keep its request for long, so that nobody waits for one of few.
        try:
            request = self._free.pop()
        except IndexError:
            request = self._new_request()
        try:
            inputs = _named_inputs(self._inputs, ids, mask)
            return cast("Vectors", request.infer(inputs, share_inputs=True)[0])
        finally:
            self._free.append(request)


def _named_inputs(names: Sequence[str], ids: _Ids, mask: _Ids) -> Mapping[str, _Ids]:
    types = {"token_type_ids": np.zeros_like(ids)} if "token_type_ids" in names else {}
    return {"input_ids": ids, "attention_mask": mask, **types}


def _check_graph(path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    if _OUTPUT not in outputs or not set(inputs) <= _INPUTS:
        raise BadModel(f"{path} is not a graph from texts to {_OUTPUT}; export the model again")


def _damaged(path: Path, error: Exception) -> BadModel:
    reason = " ".join(str(error).split())[:200]
    return BadModel(f"{path} is damaged or truncated ({reason}); export the model again")


def _release_memory() -> None:
    """Return free memory to the system, which glibc keeps: of loading int4 weights, or of large requests."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

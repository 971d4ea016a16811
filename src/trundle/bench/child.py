"""The worker process of a benchmark: one model in one process, which answers requests in JSON lines.

Run as `python -m trundle.bench.child`. Everything that libraries print goes to stderr: the protocol has a
private copy of stdout. The process ends at once when its parent dies, even in the middle of a measurement.
The libraries of an engine are imported only in a worker that runs it, so that no engine pays for the memory
and start of another.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from trundle.bench.workload import _cpu_clock, _other_cores
from trundle.embedder import Embedder
from trundle.errors import BadModel, UserError
from trundle.precision import FORMATS
from trundle.runtime.description import installed, is_exported, read_description, side_folders

_Vectorise = Callable[[Sequence[str]], object]

_TORCH = "torch"
_WEIGHT_FILES = {_TORCH: "*.safetensors"} | {
    row.name: f"{Path(row.file).with_suffix('')}.*" for row in FORMATS
}
"""The files that hold the weights, by engine; an exported graph is its own engine."""


def _engines_of(model: str) -> list[str]:
    """Torch if the model has torch weights, and its exported graphs; in a pair, those of both models."""
    folder = Path(model).expanduser()
    if not is_exported(folder):
        return [_TORCH]
    queries, documents = (
        [
            f"{graph.engine}-{graph.precision}"
            for graph in read_description(place).graphs
            if installed(graph.engine)
        ]
        for place in side_folders(folder).values()
    )
    torch = [_TORCH] if any(folder.rglob("*.safetensors")) else []
    return [*torch, *(engine for engine in documents if engine in queries)]


@dataclass(frozen=True, kw_only=True)
class _LoadedModel:
    """A model that is ready to encode, and its facts."""

    embedder: Embedder
    parameters: int
    max_tokens: int | None
    device: str
    folder: Path | None


_LoadModel = Callable[..., _LoadedModel]
"""A function of `model`, `threads` and `batch_size`."""


def _loader(engine: str) -> _LoadModel:
    """Imports an engine's libraries and returns the function that loads a model for it."""
    if engine == _TORCH:
        import_module("trundle.model.encode")
        import_module("trundle.model.load")
        return _load_torch
    import_module("trundle.runtime.encoder")
    return partial(_load_graph, graph=engine)


def _load_torch(
    model: str, *, threads: int, batch_size: int, trust_remote_code: bool = False
) -> _LoadedModel:
    import torch

    from trundle.model.encode import embedder
    from trundle.model.load import load

    torch.set_num_threads(threads)  # torch does not always follow the environment's threads
    loaded = load(model, trust_remote_code=trust_remote_code)
    limit = loaded.max_seq_length
    places = (Path(model).expanduser(), Path(str(getattr(loaded.transformers_model, "name_or_path", ""))))
    return _LoadedModel(
        embedder=embedder(loaded, name=model, batch_size=batch_size),
        parameters=sum(parameter.numel() for parameter in loaded.parameters()),
        max_tokens=None if limit is None or limit == float("inf") else int(limit),
        device=str(loaded.device),
        folder=next((place for place in places if place.is_dir() and place != Path()), None),
    )


def _load_graph(model: str, *, threads: int, graph: str, **_unused: object) -> _LoadedModel:
    """Load one graph of an exported folder; the runtime chooses its own batches, and a graph has no code."""
    from trundle.runtime.encoder import Encoder

    encoder = Encoder(model, graph=graph, threads=threads)
    return _LoadedModel(
        embedder=encoder.embedder(model),
        parameters=encoder.parameters,
        max_tokens=encoder.max_tokens,
        device="cpu",
        folder=Path(model).expanduser(),
    )


def _bytes_on_disk(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.rglob(pattern) if file.is_file())


def _peak_memory() -> int:
    """The largest resident memory of this process, in bytes."""
    status = Path("/proc/self/status")  # first choice, because ru_maxrss starts at the parent's value
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _throughput(
    encode: _Vectorise, texts: Sequence[str], batch_size: int, seconds: float
) -> tuple[int, float]:
    """Texts encoded and seconds taken: full batches until the time is over, at least one."""
    batches = cycle([texts[start : start + batch_size] for start in range(0, len(texts), batch_size)])
    done, started = 0, time.perf_counter()
    while True:
        batch = next(batches)
        encode(batch)
        done += len(batch)
        taken = time.perf_counter() - started
        if taken >= seconds:
            return done, taken


def _latencies(encode: _Vectorise, texts: Sequence[str], seconds: float) -> list[float]:
    """Seconds per call with one text at a time, until the time is over, at least one."""
    samples = []
    over = time.perf_counter() + seconds
    for text in cycle(texts):
        started = time.perf_counter()
        encode([text])
        ended = time.perf_counter()
        samples.append(ended - started)
        if ended >= over:
            break
    return samples


class _RequestHandler:
    """One worker's model and texts, and the answer to each kind of request."""

    def __init__(self, find_loader: Callable[[str], _LoadModel], bare_memory: int) -> None:
        self._find_loader = find_loader
        self._bare_memory = bare_memory
        self._batch_size = 0
        self._texts: Mapping[str, list[str]] = {}
        self._encode: Mapping[str, _Vectorise] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request:
            case {"ask": "open"}:
                return self._load(request)
            case {"ask": "warm"}:
                for kind, texts in self._texts.items():
                    self._encode[kind](texts[: self._batch_size])
                    self._encode[kind](texts[:1])
                return {}
            case {"ask": "throughput", "kind": kind, "seconds": seconds}:
                before = _cpu_clock()
                done, taken = _throughput(self._encode[kind], self._texts[kind], self._batch_size, seconds)
                return {"texts": done, "seconds": taken, "other_cores": _other_cores(before, _cpu_clock())}
            case {"ask": "latency", "kind": kind, "seconds": seconds}:
                before = _cpu_clock()
                samples = _latencies(self._encode[kind], self._texts[kind], seconds)
                return {"samples": samples, "other_cores": _other_cores(before, _cpu_clock())}
            case {"ask": "memory"}:
                return {"peak": _peak_memory(), "bare": self._bare_memory}
        raise ValueError(f"unknown request {request!r}")

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        engine = request["engine"]
        self._batch_size = request["batch_size"]
        self._texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
        load_model = self._find_loader(engine)
        started = time.perf_counter()
        given = {"threads": request["threads"], "batch_size": self._batch_size}
        trust = {"trust_remote_code": True} if request.get("trust") else {}
        loaded = load_model(request["model"], **given, **trust)
        seconds = time.perf_counter() - started
        self._encode = {"short": loaded.embedder.query, "long": loaded.embedder.document}
        first = loaded.embedder.query(self._texts["short"][:1])
        folder = loaded.folder
        facts = {
            "parameters": loaded.parameters,
            "dimensions": int(first.shape[1]),
            "max_tokens": loaded.max_tokens,
            "device": loaded.device,
            "weights_bytes": _bytes_on_disk(folder, _WEIGHT_FILES[engine]) if folder else None,
            "folder_bytes": _bytes_on_disk(folder, "*") if folder else None,
        }
        return {"load_seconds": seconds, "facts": facts}


def _serve(requests: TextIO, replies: TextIO, find_loader: Callable[[str], _LoadModel]) -> None:
    """Answer requests until they end; then the process ends."""
    handler = _RequestHandler(find_loader, _peak_memory())
    for line in _until_closed(requests):
        try:
            reply = handler.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            known = isinstance(error, UserError)
            said = str(error) if known else traceback.format_exception_only(error)[-1]
            kind = "model" if isinstance(error, BadModel) else "user" if known else "crash"
            reply = {"error": " ".join(said.split())[:500], "kind": kind}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _until_closed(requests: TextIO) -> Iterator[str]:
    """Requests as they come; when they end, the process ends, whatever it is doing."""
    waiting: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in requests:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield waiting.get()


def _private_streams() -> tuple[TextIO, TextIO]:
    """Requests and replies on descriptors of their own; from now on stdin is empty and stdout is stderr."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


if __name__ == "__main__":
    _serve(*_private_streams(), _loader)

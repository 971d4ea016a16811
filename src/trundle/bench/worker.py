"""The child's side of a bench: one model in one process, asked by JSON lines.

Run as `python -m trundle.bench.worker`. Whatever libraries print goes to stderr: the protocol has a private copy
of stdout. When the parent goes away, however it goes, the worker ends at once, even in the middle of a measure.
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
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from trundle.bench.engines import _ENGINES, _bytes_on_disk, _Opened, _opener, _OpenModel
from trundle.bench.workload import _cpu_clock, _other_cores
from trundle.errors import BadModel, UserError

_Vectorise = Callable[[Sequence[str]], object]


def _peak_memory() -> int:
    """The most memory this process has had resident, in bytes.

    Linux: VmHWM, as ru_maxrss of a new process starts at what its parent had.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _throughput(
    encode: _Vectorise, texts: Sequence[str], batch_size: int, seconds: float
) -> tuple[int, float]:
    """Texts done and seconds taken: whole batches until the time is over, at least one."""
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


class _Desk:
    """One worker's model and texts, and the answer to each kind of request."""

    def __init__(self, find_opener: Callable[[str], _OpenModel], bare_memory: int) -> None:
        self._find_opener = find_opener
        self._bare_memory = bare_memory
        self._batch_size = 0
        self._texts: Mapping[str, list[str]] = {}
        self._encode: Mapping[str, _Vectorise] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        match request:
            case {"ask": "open"}:
                return self._open(request)
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

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the engine, load the model, make the first vector."""
        engine, model = request["engine"], request["model"]
        self._batch_size = request["batch_size"]
        self._texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
        open_model = self._find_opener(engine)
        started = time.perf_counter()
        opened = open_model(model, threads=request["threads"], batch_size=self._batch_size)
        loaded = time.perf_counter() - started
        self._encode = {"short": opened.embedder.query, "long": opened.embedder.document}
        first = opened.embedder.query(self._texts["short"][:1])
        return {"load_seconds": loaded, "facts": _facts(opened, engine, int(first.shape[1]))}


def _facts(opened: _Opened, engine: str, dimensions: int) -> dict[str, Any]:
    """What does not change from round to round."""
    folder = opened.folder
    return {
        "parameters": opened.parameters,
        "dimensions": dimensions,
        "max_tokens": opened.max_tokens,
        "device": opened.device,
        "weights_bytes": _bytes_on_disk(folder, _ENGINES[engine].weights) if folder else None,
        "folder_bytes": _bytes_on_disk(folder, ("*",)) if folder else None,
    }


def _serve(requests: TextIO, replies: TextIO, find_opener: Callable[[str], _OpenModel]) -> None:
    """Answer one request after the other; ends only with the process, when the requests end."""
    waiting: SimpleQueue[str] = SimpleQueue()
    desk = _Desk(find_opener, _peak_memory())
    threading.Thread(target=_listen, args=(requests, waiting), daemon=True).start()
    while True:
        line = waiting.get()
        try:
            reply = desk.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": _sentence(error), "kind": _kind(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _listen(requests: TextIO, waiting: SimpleQueue[str]) -> None:
    """Pass requests on; when there can be no more, end the process whatever it is doing."""
    for line in requests:
        waiting.put(line)
    os._exit(0)


def _kind(error: Exception) -> str:
    """Whose fault it is, for the parent to raise the fitting error."""
    if isinstance(error, BadModel):
        return "model"
    return "user" if isinstance(error, UserError) else "crash"


def _sentence(error: Exception) -> str:
    """The error on one line."""
    said = str(error) if isinstance(error, UserError) else traceback.format_exception_only(error)[-1]
    return " ".join(said.split())[:500]


def _private_streams() -> tuple[TextIO, TextIO]:
    """Requests and replies on descriptors nobody else knows; from now on stdin is empty and stdout is stderr."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def main() -> None:
    """Serve the parent that started this process."""
    requests, replies = _private_streams()
    _serve(requests, replies, _opener)


if __name__ == "__main__":
    main()

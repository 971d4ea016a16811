"""The server under load from a second process, next to its peers.

    python benchmarks/serve.py MODEL [--clients 1,8,32,128] [--seconds 5] [--rounds 3] [--texts short]

trundle serve, sentence-transformers behind the same FastAPI with one lock, and the bare runtime without a
server, interleaved. Requests have one text each; clients keep their connections and send the next request
when the last one is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from sentence_transformers import SentenceTransformer

import harness
from trundle.bench.workload import workload
from trundle.runtime.description import read_description
from trundle.runtime.encoder import Encoder
from trundle.serve.wire import EmbeddingsRequest, _parse

ADDRESS = "127.0.0.1"
HEAD = (
    "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


def request_bytes(text: str) -> bytes:
    content = json.dumps({"input": text, "encoding_format": "base64"}).encode()
    return HEAD.format(len(content)).encode() + content


async def clients_of(
    port: int, count: int, seconds: float, requests: Sequence[bytes]
) -> tuple[float, list[float]]:
    """Run clients for some seconds; return answers per second and the time of each answer."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def client(place: int) -> None:
        reader, writer = await asyncio.open_connection(ADDRESS, port, limit=1 << 22)
        while time.perf_counter() < end:
            began = time.perf_counter()
            writer.write(requests[place % len(requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.split(b"\r\n")[0], head
            lines = head.lower().split(b"\r\n")
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            await reader.readexactly(length)
            times.append(time.perf_counter() - began)
            place += 1
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client(number * 7) for number in range(count)))
    return len(times) / (time.perf_counter() - began), times


@contextmanager
def running_server(*words: str) -> Iterator[tuple[int, int]]:
    """Start a server that prints its address; yield its port and process when it answers."""
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, preexec_fn=harness.end_with_parent
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        while True:
            try:
                asyncio.run(clients_of(port, 1, 0.3, [request_bytes("up")]))
                break
            except ConnectionError:
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def plain_server(model: str) -> None:
    """Serve sentence-transformers with the same FastAPI, as people write it."""
    opened, lock, app = SentenceTransformer(model, device="cpu"), threading.Lock(), FastAPI()

    def encode(texts: list[str]) -> Any:
        with lock:
            return opened.encode(texts)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        asked = _parse(EmbeddingsRequest, await request.body())
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        vectors = await asyncio.to_thread(encode, texts)
        in_base64 = asked.encoding_format == "base64"
        rows = [base64.b64encode(row.tobytes()).decode() if in_base64 else row.tolist() for row in vectors]
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        body = {"object": "list", "data": data, "model": "model", "usage": usage}
        return Response(json.dumps(body), media_type="application/json")

    listening = socket.create_server((ADDRESS, 0))
    print(f"http://{ADDRESS}:{listening.getsockname()[1]}/v1", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


def bare_runtime(model: str, texts: Sequence[str], seconds: float, pipe: Any) -> None:
    """Encode many texts per call without a server; send texts per second."""
    encoder, many = Encoder(model), list(texts) * max(1, 128 // len(texts))
    encoder.encode(many[:64])
    pipe.send("ready")
    while pipe.recv() == "go":
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            encoder.encode(many)
            done += len(many)
        pipe.send(done / (time.perf_counter() - began))


def speed(options: argparse.Namespace) -> None:
    work = workload()
    texts = {"short": work.short, "long": work.long, "mixed": (*work.short, *work.long)}[options.texts]
    requests = [request_bytes(text) for text in texts]
    ours, theirs = multiprocessing.Pipe()
    job = (options.model, texts, options.seconds, theirs)
    alone = multiprocessing.get_context("spawn").Process(target=bare_runtime, args=job, daemon=True)
    alone.start()
    ours.recv()
    bare: list[float] = []
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    with ExitStack() as running:
        words = ("-m", "trundle", "serve", options.model, "--port", "0", "-q")
        servers = {"trundle serve": running.enter_context(running_server(*words))[0]}
        plain = running_server(__file__, "--plain", options.model)
        servers["sentence-transformers"] = running.enter_context(plain)[0]
        for _ in range(options.rounds):
            for count in harness.numbers(options.clients):
                ours.send("go")
                bare.append(ours.recv())
                for name, port in servers.items():
                    mine, times = asyncio.run(clients_of(port, count, options.seconds, requests))
                    marks = [1000 * np.percentile(times, percent) for percent in (50, 95, 99)]
                    found.setdefault((name, count), []).append((mine, mine / bare[-1], *marks))
    ours.send("stop")
    alone.join()
    heads = ("texts/s", "of bare", "p50 ms", "p95", "p99")
    print(
        f"{options.texts} texts, {os.cpu_count()} cores\n{'':24}{'clients':>8}"
        + "".join(f"{head:>9}" for head in heads)
    )
    print(f"{'bare runtime':32}{median(bare):9.2f}")
    for (name, count), rounds in found.items():
        cells = [median(values) for values in zip(*rounds, strict=True)]
        print(f"{name:24}{count:8}" + "".join(f"{cell:9.2f}" for cell in cells))


def main() -> None:
    if sys.argv[1:2] == ["--plain"]:
        plain_server(sys.argv[2])
        return
    parser = harness.make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", default="short", choices=("short", "long", "mixed"))
    options = parser.parse_args()
    read_description(Path(options.model))  # fails early if the folder has no graph
    speed(options)


if __name__ == "__main__":
    main()

"""The server under load from a second process: speed beside its peers, then many requests with every answer checked.

    python benchmarks/serve.py speed MODEL [--clients 1,8,32,128] [--seconds 5] [--rounds 3] [--texts short]
    python benchmarks/serve.py answers MODEL [--requests 100000] [--clients 32]

`speed`: trundle serve, sentence-transformers behind the same FastAPI (one lock, as people write it), and the bare
runtime without any server, in turns in one run; requests per second of one text each, p50/p95/p99 in milliseconds. Clients
keep their connections and send the next request when the last is answered. CPU ms is the time all threads of a process
computed per text: on a crowded machine its ratio is the steadier one.

`answers`: good and bad requests mixed, each answer compared with offline encoding; memory of the server along the way.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from trundle.bench.results import _percentile
from trundle.bench.workload import workload
from trundle.runtime.description import read_description
from trundle.runtime.encoder import Encoder
from trundle.serve.wire import _parse_embeddings, _write_embeddings

TOLERANCE = 2e-5
ADDRESS = "127.0.0.1"


def request_bytes(content: bytes) -> bytes:
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


@dataclass(frozen=True)
class Load:
    """What one run of clients saw."""

    answers: int
    seconds: float
    times: list[float]

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answers / self.seconds


async def _load(port: int, clients: int, seconds: float, requests: Sequence[bytes]) -> Load:
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(ADDRESS, port, limit=1 << 22)
        place = number * 7
        while time.perf_counter() < end:
            started = time.perf_counter()
            status, _ = await ask(reader, writer, requests[place % len(requests)])
            assert status == 200, status
            times.append(time.perf_counter() - started)
            place += 1
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return Load(len(times), time.perf_counter() - started, times)


def load(port: int, clients: int, seconds: float, requests: Sequence[bytes]) -> Load:
    return asyncio.run(_load(port, clients, seconds, requests))


@contextmanager
def server(words: Sequence[str]) -> Any:
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split("/v1")[0].rsplit(":", 1)[1])
        while True:
            try:
                asyncio.run(_load(port, 1, 0.3, [request_bytes(b'{"input": "up"}')]))
                break
            except ConnectionError:
                time.sleep(0.1)
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def plain_server(model: str) -> None:
    """sentence-transformers behind the same FastAPI, as people write it."""
    from sentence_transformers import SentenceTransformer

    opened = SentenceTransformer(model, device="cpu")
    lock = threading.Lock()
    app = FastAPI()

    def encode(texts: list[str]) -> Any:
        with lock:
            return opened.encode(texts)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        asked = _parse_embeddings(await request.body())
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        vectors = await asyncio.to_thread(encode, texts)
        in_base64 = asked.encoding_format == "base64"
        return Response(
            _write_embeddings(vectors, model="model", tokens=0, in_base64=in_base64),
            media_type="application/json",
        )

    listening = socket.create_server((ADDRESS, 0))
    print(f"http://{ADDRESS}:{listening.getsockname()[1]}/v1", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


def bare(model: str, texts: Sequence[str], seconds: float, pipe: Any) -> None:
    """The runtime alone, given as much as it likes at once."""
    encoder = Encoder(model)
    many = list(texts) * max(1, 128 // len(texts))
    encoder.encode(many[:64])
    pipe.send("ready")
    while pipe.recv() == "go":
        started, before, done = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - started < seconds:
            encoder.encode(many)
            done += len(many)
        cpu = time.process_time() - before
        pipe.send((done / (time.perf_counter() - started), 1000 * cpu / done))


def speed(model: str, *, clients: Sequence[int], seconds: float, rounds: int, kind: str, torch: bool) -> None:
    found = workload()
    texts = {"short": found.short, "long": found.long, "mixed": (*found.short, *found.long)}[kind]
    requests = [
        request_bytes(json.dumps({"input": text, "encoding_format": "base64"}).encode()) for text in texts
    ]
    ours, theirs = multiprocessing.Pipe()
    alone = multiprocessing.get_context("spawn").Process(
        target=bare, args=(model, texts, seconds, theirs), daemon=True
    )
    alone.start()
    ours.recv()
    print(
        f"{kind} texts, {os.cpu_count()} cores, {seconds:g} s each, {rounds} rounds, clients in a second process"
    )
    rates: dict[tuple[str, int], list[float]] = {}
    times: dict[tuple[str, int], list[list[float]]] = {}
    shares: dict[tuple[str, int], list[float]] = {}
    cpus: dict[tuple[str, int], list[float]] = {}
    cpu_shares: dict[tuple[str, int], list[float]] = {}
    bare_rates: list[float] = []
    bare_cpus: list[float] = []
    with server(["-m", "trundle", "serve", model, "--port", "0", "-q"]) as (mine, port):
        contestants = {"trundle serve": (mine, port)}
        with server([__file__, "plain", model]) if torch else _nobody() as (its, other):
            if torch:
                contestants["sentence-transformers"] = its, other
            for _ in range(rounds):
                for count in clients:
                    ours.send("go")
                    now, bare_cpu = ours.recv()
                    bare_rates.append(now)
                    bare_cpus.append(bare_cpu)
                    for name, (process, at) in contestants.items():
                        before = cpu_seconds(process)
                        one = load(at, count, seconds, requests)
                        cpu = 1000 * (cpu_seconds(process) - before) / one.answers
                        cpus.setdefault((name, count), []).append(cpu)
                        cpu_shares.setdefault((name, count), []).append(bare_cpu / cpu)
                        rates.setdefault((name, count), []).append(one.rate)
                        times.setdefault((name, count), []).append(one.times)
                        shares.setdefault((name, count), []).append(one.rate / now)
    ours.send("stop")
    alone.join()
    print(
        f"{'':24}{'clients':>8}{'texts/s':>10}{'of bare':>9}{'CPU ms':>9}{'of bare':>9}{'p50 ms':>9}{'p95':>9}{'p99':>9}"
    )
    print(f"{'bare runtime':24}{'':>8}{median(bare_rates):10.1f}{1:9.2f}{median(bare_cpus):9.2f}{1:9.2f}")
    for (name, count), each in rates.items():
        marks = [
            1000 * median(_percentile(samples, percent) for samples in times[name, count])
            for percent in (50, 95, 99)
        ]
        row = f"{name:24}{count:8}{median(each):10.1f}{median(shares[name, count]):9.2f}"
        row += f"{median(cpus[name, count]):9.2f}{median(cpu_shares[name, count]):9.2f}"
        print(row + "".join(f"{mark:9.1f}" for mark in marks))


def cpu_seconds(pid: int) -> float:
    """Time all threads of a process have computed: what a crowded machine does not change much."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _nobody() -> Any:
    yield 0, 0


Check = Callable[[int, bytes], bool]


def answers(model: str, *, requests: int, clients: int) -> None:
    encoder = Encoder(model)
    texts = [*workload().short, *workload().long[:16], "", "🙂 naïve 東京", "a"]
    truth = {
        (role, output): dict(zip(texts, vectors, strict=True))
        for role, encode in (
            (None, encoder.encode),
            ("query", encoder.encode_query),
            ("document", encoder.encode_document),
        )
        for output, vectors in (("float", encode(texts)), ("binary", encode(texts, output="binary")))
    }
    with server(["-m", "trundle", "serve", model, "--port", "0", "-q"]) as (pid, port):
        seen, wrong, memory = asyncio.run(_answers(port, pid, requests, clients, texts, truth))
    print(
        f"{sum(seen.values())} requests by {clients} clients: "
        + ", ".join(f"{n} × {s}" for s, n in sorted(seen.items()))
    )
    print(f"wrong answers: {wrong}")
    print("memory of the server, MB: " + " ".join(f"{each:.0f}" for each in memory))


def one_request(dice: random.Random, texts: Sequence[str], truth: dict[Any, Any]) -> tuple[bytes, Check]:
    """A request and what its answer must be."""
    if dice.random() < 0.2:
        bad = dice.choice(
            (
                (b"{", 400),
                (b'{"input": []}', 400),
                (b'{"input": [1, 2]}', 400),
                (b'{"input": "a", "dimensions": 100000}', 400),
                (b'{"input": "a", "model": "other"}', 404),
                (b'{"input": "a", "input_type": "neither"}', 400),
                (b'{"input": "' + b"x" * 9_000_000 + b'"}' if dice.random() < 0.01 else b"null", None),
            )
        )
        content, status = bad
        expected = status or (413 if len(content) > 1000 else 400)
        return content, lambda got, _: got == expected
    chosen = dice.choices(texts, k=dice.choice((1, 1, 1, 2, 5)))
    role, output = dice.choice((None, "query", "document")), dice.choice(("float", "float", "binary"))
    asked: dict[str, Any] = {
        "input": chosen,
        "output_dtype": output,
        "encoding_format": dice.choice(("float", "base64")),
    }
    if role:
        asked["input_type"] = role
    rows = [truth[role, output][text] for text in chosen]

    def right(status: int, body: bytes) -> bool:
        if status != 200:
            return False
        found = [each["embedding"] for each in json.loads(body)["data"]]
        given = [
            np.frombuffer(base64.b64decode(row), rows[0].dtype) if isinstance(row, str) else np.array(row)
            for row in found
        ]
        if output == "binary":  # a number near zero may fall on either side
            changed = [
                int(np.bitwise_count((a ^ b.astype(np.int8)).view(np.uint8)).sum())
                for a, b in zip(rows, given, strict=True)
            ]
            return max(changed) <= 2
        return len(given) == len(rows) and all(
            np.allclose(a, b, atol=TOLERANCE) for a, b in zip(rows, given, strict=True)
        )

    return json.dumps(asked).encode(), right


async def _answers(
    port: int, pid: int, requests: int, clients: int, texts: Sequence[str], truth: dict[Any, Any]
) -> tuple[Counter[int], int, list[float]]:
    seen: Counter[int] = Counter()
    memory: list[float] = []
    wrong = sent = 0

    async def client(number: int) -> None:
        nonlocal wrong, sent
        dice = random.Random(number)
        reader, writer = await asyncio.open_connection(ADDRESS, port, limit=1 << 24)
        while sent < requests:
            sent += 1
            if sent % max(1, requests // 20) == 0:
                memory.append(resident(pid))
            content, right = one_request(dice, texts, truth)
            if dice.random() < 0.01:  # a client that hangs up in the middle
                writer.write(request_bytes(content)[: dice.randrange(20, 200)])
                writer.close()
                reader, writer = await asyncio.open_connection(ADDRESS, port, limit=1 << 24)
                seen[0] += 1
                continue
            try:
                status, body = await ask(reader, writer, request_bytes(content))
            except (ConnectionError, asyncio.IncompleteReadError):
                status, body = -1, b""
            seen[status] += 1
            if not right(status, body):
                wrong += 1
                print("wrong:", status, content[:120], body[:200])
            if status in (-1, 413):
                writer.close()
                reader, writer = await asyncio.open_connection(ADDRESS, port, limit=1 << 24)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return seen, wrong, memory


def resident(pid: int) -> float:
    """Megabytes of memory a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "answers", "plain"))
    parser.add_argument("model")
    parser.add_argument("--clients", default=None)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", default="short", choices=("short", "long", "mixed"))
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--no-torch", action="store_true", help="Leave sentence-transformers out.")
    given = parser.parse_args()
    if given.what != "plain":
        read_description(Path(given.model))  # a server's process that ends at once would be waited for
    if given.what == "plain":
        plain_server(given.model)
    elif given.what == "speed":
        counts = [int(count) for count in (given.clients or "1,8,32,128").split(",")]
        speed(
            given.model,
            clients=counts,
            seconds=given.seconds,
            rounds=given.rounds,
            kind=given.texts,
            torch=not given.no_torch,
        )
    else:
        answers(given.model, requests=given.requests, clients=int(given.clients or 32))


if __name__ == "__main__":
    main()

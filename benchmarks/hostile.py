"""The server between honest and hostile clients.

    python benchmarks/hostile.py load MODEL [--requests 100000] [--clients 8] [--share 0.01] [--rate 200]
    python benchmarks/hostile.py fuzz MODEL [--seconds 60] [--seed 0]

load  honest clients send short texts, alone and beside hostile clients in turn, five times, so that other
      work on the machine slows both. Hostile clients send `--share` of all requests: huge texts, many texts,
      slow and half requests, endless headers, wrong hosts and types, answers that nobody reads, and cancelled
      requests. Prints the ratio of the honest p99, the wrong and missing answers, the server's memory over
      time, and what hostile clients got. With `--rate`, honest clients send that many requests per second
      together; 0 sends one when the last one is answered
fuzz  random and mutated bytes on raw connections. Prints how many were sent, the statuses, and whether the
      server still gives the right vector with as many open files as before
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import harness
from serve import ADDRESS, request_bytes, running_server
from trundle.bench.workload import workload
from trundle.embedder import Vectors
from trundle.runtime.encoder import Encoder

HEAD = "POST /v1/embeddings HTTP/1.1\r\nHost: {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
JSON = "application/json"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LATER, CLOSED = "later than 60 s", "closed"


def body_of(texts: object, **words: object) -> bytes:
    return json.dumps({"input": texts, **words}).encode()


def request(body: bytes, *, host: str = "x", kind: str = JSON, length: int | None = None) -> bytes:
    return HEAD.format(host, kind, len(body) if length is None else length).encode() + body


async def status_of(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    return line.split()[1].decode() if line.startswith(b"HTTP/") else CLOSED


async def send_all(connection: Connection, content: bytes) -> str:
    reader, writer = connection
    writer.write(content)
    await writer.drain()
    return await status_of(reader)


async def send_slowly(connection: Connection, content: bytes) -> str:
    """Send a byte per second until the server has enough of it."""
    reader, writer = connection
    answer = asyncio.ensure_future(status_of(reader))
    for place in range(len(content)):
        writer.write(content[place : place + 1])
        if (await asyncio.wait([answer], timeout=1))[0]:
            break
    return await answer


async def send_and_leave(connection: Connection, content: bytes) -> str:
    connection[1].write(content)
    await asyncio.sleep(0.05)
    return "left"


async def never_read(connection: Connection, content: bytes) -> str:
    connection[1].write(content)
    connection[0]._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(20)
    return "not read"


Way = tuple[Callable[[Connection, bytes], Awaitable[str]], bytes]


def hostile_ways() -> dict[str, Way]:
    words = " ".join(f"word{number}" for number in range(1_000_000))
    large, many = request(body_of([words[:190_000]] * 40)), request(body_of(["a few words"] * 2048))
    return {
        "8 MB in one text": (send_all, request(body_of(words[: 8 * 10**6]))),
        "40 texts of 190,000 characters": (send_all, large),
        "2,048 texts": (send_all, many),
        "2,048 texts, cancelled": (send_and_leave, many),
        "2,048 texts, not read": (never_read, many),
        "a body above the limit": (send_all, request(b"a" * (9 << 20))),
        "a slow request": (send_slowly, request(body_of("slow"))),
        "half a request": (send_and_leave, request(body_of("half"), length=10_000)),
        "headers without end": (send_all, b"GET / HTTP/1.1\r\nName: " + b"a" * (8 << 20)),
        "a silent connection": (send_all, b""),
        "another host": (send_all, request(body_of("a"), host="evil.example")),
        "text/plain": (send_all, request(body_of("a"), kind="text/plain")),
        "no JSON": (send_all, request(b'{"input": [[[[')),
        "deep JSON": (send_all, request(b"[" * 100_000)),
        "no HTTP": (send_all, b"\x16\x03\x01\x02\x00 hello\r\n\r\n"),
    }


async def one_hostile(port: int, way: Way) -> str:
    act, content = way
    writer = None
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(ADDRESS, port)
            return await act((reader, writer), content)
    except TimeoutError:
        return LATER
    except OSError:
        return CLOSED
    finally:
        if writer is not None:
            writer.transport.abort()


async def honest(
    port: int, options: argparse.Namespace, count: int, truth: Vectors, sent: Sequence[bytes]
) -> tuple[list[float], Counter[str]]:
    """Send `count` requests by all clients; return the time of each answer, and what went wrong."""
    times, wrong, numbers = list[float](), Counter[str](), iter(range(count))
    began = time.perf_counter()

    async def client() -> None:
        connection: Connection | None = None
        for number in numbers:
            planned = began + number / options.rate if options.rate else time.perf_counter()
            await asyncio.sleep(max(0.0, planned - time.perf_counter()))
            try:
                connection = connection or await asyncio.open_connection(ADDRESS, port, limit=1 << 22)
                reader, writer = connection
                writer.write(sent[number % len(sent)])
                head = await reader.readuntil(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", head.lower())
                answer = await reader.readexactly(int(found[1]) if found else 0)
            except (OSError, EOFError) as error:
                wrong[type(error).__name__] += 1
                connection = None
                continue
            times.append(time.perf_counter() - planned)
            if b" 200 " not in head.split(b"\r\n")[0]:
                wrong[head.split(b"\r\n")[0].decode()] += 1
                continue
            vector = np.frombuffer(base64.b64decode(json.loads(answer)["data"][0]["embedding"]), np.float32)
            if not np.allclose(vector, truth[number % len(sent)], atol=1e-4):
                wrong["another vector"] += 1
        if connection is not None:
            connection[1].close()

    await asyncio.gather(*(client() for _ in range(options.clients)))
    return times, wrong


async def beside_hostile(
    port: int,
    options: argparse.Namespace,
    count: int,
    truth: Vectors,
    sent: Sequence[bytes],
    rng: random.Random,
) -> tuple[list[float], Counter[str], Counter[str]]:
    ways, got = hostile_ways(), Counter[str]()
    running: set[asyncio.Task[None]] = set()
    work = asyncio.ensure_future(honest(port, options, count, truth, sent))

    async def attack(name: str) -> None:
        got[f"{name}: {await one_hostile(port, ways[name])}"] += 1

    speed = options.rate or options.quiet_rate
    while not work.done():
        task = asyncio.ensure_future(attack(rng.choice(list(ways))))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.sleep(rng.expovariate(speed * options.share))
    times, wrong = await work
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return times, wrong, got


def memory_of(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


def load(options: argparse.Namespace) -> None:
    texts = list(workload().short)
    truth, sent = Encoder(options.model).encode(texts), [request_bytes(text) for text in texts]
    words = ("-m", "trundle", "serve", options.model, "--port", "0", "-q")
    with running_server(*words) as (port, pid):
        quiet = max(500, options.requests // 50)
        asyncio.run(honest(port, options, quiet, truth, sent))
        alone, rows, mistakes, got = list[float](), list[float](), Counter[str](), Counter[str]()
        rng, part, sizes = random.Random(options.seed), options.requests // 5, [memory_of(pid)]
        for _ in range(5):
            began = time.perf_counter()
            times, wrong = asyncio.run(honest(port, options, quiet, truth, sent))
            options.quiet_rate = len(times) / (time.perf_counter() - began)
            print(f"alone: {milliseconds(times)}", flush=True)
            alone += times
            mistakes += wrong
            times, wrong, answers = asyncio.run(beside_hostile(port, options, part, truth, sent, rng))
            print(f"beside hostile clients: {milliseconds(times)}", flush=True)
            rows += times
            mistakes += wrong
            got += answers
            sizes.append(memory_of(pid))
        total = f"{len(rows):,} honest answers and {sum(got.values()):,} hostile requests"
        print(f"alone, all: {len(alone):,} answers; {milliseconds(alone)}")
        print(f"beside hostile clients, all: {total}; {milliseconds(rows)}")
        ratio = np.percentile(rows, 99) / np.percentile(alone, 99)
        print(f"honest p99: {ratio:.2f} of the quiet one; wrong or missing: {dict(mistakes) or 0}")
        print("memory of the server, MB: " + ", ".join(f"{size:.0f}" for size in sizes))
        print("\n".join(f"  {count:6,} {name}" for name, count in sorted(got.items())))


def milliseconds(times: Sequence[float]) -> str:
    return ", ".join(f"p{mark} {1000 * np.percentile(times, mark):.1f} ms" for mark in (50, 95, 99))


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return random bytes, or a valid request with bytes changed, removed, repeated or put in."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(1, 2000))
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(1, 8)):
        place, length = rng.randrange(len(content) + 1), rng.randrange(1, 30)
        match rng.randrange(5):
            case 0:
                content[place : place + 1] = rng.randbytes(1)
            case 1:
                del content[place : place + length]
            case 2:
                content[place:place] = content[place : place + length] * rng.choice((1, 2, 100, 5000))
            case 3:
                content[place:place] = rng.choice(
                    (b"\r\n", b"\r\n\r\n", b"\0", b": ", b"0\r\n", b"[", b"\xff")
                )
            case 4:
                content[place : place + length] = str(rng.choice((-1, 0, 2**31, 2**63, 10**30))).encode()
    return bytes(content)


async def fuzzed(port: int, seconds: float, rng: random.Random) -> Counter[str]:
    chunked = HEAD.replace("Content-Length: {}", "Transfer-Encoding: chunked").format("x", JSON).encode()
    text, corpus = body_of("a text"), json.dumps({"name": "a.txt", "text": "some words " * 9}).encode()
    seeds = [
        request(text),
        request(body_of(["a", "b"], dimensions=4, encoding_format="base64", output_dtype="int8")),
        chunked + b"%x\r\n%s\r\n0\r\nTrailer: a\r\n\r\n" % (len(text), text),
        request(corpus).replace(b"/v1/embeddings", b"/compare/corpora"),
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models?a=%20 HTTP/1.0\r\n\r\n",
        b"OPTIONS / HTTP/1.1\r\nHost: x\r\nOrigin: https://example.org\r\nUpgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: keep-alive\r\n\r\n",
    ]
    found, end = Counter[str](), time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            reader, writer = await asyncio.open_connection(ADDRESS, port)
            status = CLOSED
            with suppress(OSError):
                writer.write(mutated(rng, seeds))
                writer.write_eof() if rng.random() < 0.5 else None
                with suppress(TimeoutError):
                    status = await asyncio.wait_for(status_of(reader), 0.5)
            found[status] += 1
            writer.transport.abort()

    await asyncio.gather(*(client() for _ in range(8)))
    return found


def fuzz(options: argparse.Namespace) -> None:
    text = "the same vector as before"
    truth = Encoder(options.model).encode([text])
    words = ("-m", "trundle", "serve", options.model, "--port", "0", "-q")
    options.rate = 0
    with running_server(*words) as (port, pid):
        files, before = len(list(Path(f"/proc/{pid}/fd").iterdir())), memory_of(pid)
        found = asyncio.run(fuzzed(port, options.seconds, random.Random(options.seed)))
        time.sleep(1)
        _, wrong = asyncio.run(honest(port, options, 100, truth, [request_bytes(text)]))
        open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        print(
            f"{sum(found.values()):,} connections: "
            + ", ".join(f"{n:,} {s}" for s, n in sorted(found.items()))
        )
        print(f"server errors (5xx): {sum(n for s, n in found.items() if s.startswith('5'))}")
        print(f"wrong answers afterwards: {dict(wrong) or 0}; open files: {files}, then {open_now}")
        print(f"memory of the server, MB: {before:.0f}, then {memory_of(pid):.0f}")


def main() -> None:
    parser = harness.make_parser(__doc__, "load", "fuzz")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    (load if options.what == "load" else fuzz)(options)


if __name__ == "__main__":
    main()

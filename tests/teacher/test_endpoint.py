"""An endpoint teacher against a real server on this machine that misbehaves on demand."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trundle
from trundle.data.texts import Text
from trundle.embedder import Embedder
from trundle.errors import BadInput, BadModel, TrundleError, UserError
from trundle.teacher import endpoint
from trundle.teacher.endpoint import _endpoint_embedder, _endpoint_id, _Poster, _read_answer
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest

KEY = "sk-very-secret-0123456789"
VARIABLE = "TEST_EMBEDDINGS_KEY"
LIBRARY = Path(trundle.__file__).parent

Behaviour = Callable[["Handler", dict[str, Any]], None]


def embedding(text: str, width: int = 3) -> list[float]:
    return [float(len(text)), float(ord(text[0])), *([0.25] * (width - 2))]


def rows(texts: Sequence[str], width: int = 3) -> list[dict[str, Any]]:
    return [
        {"object": "embedding", "index": i, "embedding": embedding(t, width)} for i, t in enumerate(texts)
    ]


class Handler(BaseHTTPRequestHandler):
    """Does what the server's script says for this request, and what is right once the script is over."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        behave = self.server.script.pop(0) if self.server.script else good
        behave(self, body)

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Behaviour] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.closing = Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is what some tests are about."""


def good(handler: Handler, body: dict[str, Any]) -> None:
    data = rows(body["input"], body.get("dimensions", 3))[::-1]
    handler.answer(json.dumps({"object": "list", "data": data, "model": body["model"]}).encode())


def status(code: int, content: bytes = b"", **headers: str) -> Behaviour:
    return lambda handler, _body: handler.answer(content, code, **headers)


def says(content: bytes) -> Behaviour:
    return status(200, content)


def hangs_up(handler: Handler, _body: dict[str, Any]) -> None:
    handler.close_connection = True


def cut_short(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.wfile.write(json.dumps({"data": rows(body["input"])}).encode())
    handler.close_connection = True


def silent(handler: Handler, _body: dict[str, Any]) -> None:
    handler.server.closing.wait(20)
    handler.close_connection = True


def drips(handler: Handler, _body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.closing.wait(0.02):
        handler.wfile.write(b" ")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv(VARIABLE, KEY)
    with Server() as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.closing.set()
        running.shutdown()
        thread.join()


def teacher(server: Server, **options: Any) -> Embedder:
    return _endpoint_embedder(server.url, "big", **{"key_variable": VARIABLE, "timeout": 5.0, **options})


def test_batches_and_order(server: Server) -> None:
    texts = [f"{'x' * i}." for i in range(7)]
    big = teacher(server, batch_size=3)
    np.testing.assert_array_equal(big.document(texts), np.array([embedding(t) for t in texts], np.float32))
    np.testing.assert_array_equal(big.query(texts[:1]), np.array([embedding(".")], np.float32))
    assert big.text([]).shape == (0, 3)
    paths, headers, bodies = zip(*server.requests, strict=True)
    assert set(paths) == {"/v1/embeddings"}
    assert [body["input"] for body in bodies] == [texts[:3], texts[3:6], texts[6:], ["."]]
    assert all(body["model"] == "big" and body["encoding_format"] == "float" for body in bodies)
    assert all("dimensions" not in body for body in bodies)
    assert {header["Authorization"] for header in headers} == {f"Bearer {KEY}"}


def test_no_key_is_sent_where_none_is_set(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    big = teacher(server)
    monkeypatch.delenv(VARIABLE)
    big.text(["a"])
    teacher(server, key_variable=None).text(["a"])
    monkeypatch.setenv(VARIABLE, "set-later")
    big.text(["a"])
    sent = [headers.get("Authorization") for _, headers, _ in server.requests]
    assert sent == [None, None, "Bearer set-later"]


def patience(trouble: Behaviour) -> float:
    """Seconds: few only where silence is what is tested."""
    return 1.0 if trouble in (silent, drips) else 30.0


@pytest.mark.parametrize(
    "trouble",
    [
        status(429),
        status(429, Retry_After="0"),
        status(500),
        status(503, b"busy"),
        hangs_up,
        cut_short,
        silent,
        drips,
    ],
    ids=["429", "429 with header", "500", "503", "hangs up", "cut short", "silent", "drips"],
)
def test_temporary_failures_are_retried(server: Server, trouble: Behaviour) -> None:
    server.script = [trouble, trouble]
    vectors = teacher(server, timeout=patience(trouble)).text(["ab"])
    np.testing.assert_array_equal(vectors, [embedding("ab")])
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (status(429, b'{"error": {"message": "too many"}}'), "429: too many"),
        (status(500, b"<html>oops</html>"), "500: <html>oops"),
        (silent, "no data for 1 seconds"),
        (drips, "no data for 1 seconds"),
        (hangs_up, "disconnected"),
        (cut_short, "complete message body"),
    ],
    ids=["429", "500", "silent", "drips", "hangs up", "cut short"],
)
def test_a_lasting_failure_is_an_error_after_the_retries(
    server: Server, trouble: Behaviour, message: str
) -> None:
    server.script = [trouble] * 9
    with pytest.raises(BadModel, match=f"failed 3 times.*{message}.*run again"):
        teacher(server, timeout=patience(trouble), retries=2).text(["ab"])
    assert len(server.requests) == 3


def test_a_rejected_connection_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server() as gone:
        url = gone.url
    monkeypatch.setattr(_Poster, "sleep", lambda *_: pytest.fail("waited for nobody"))
    with pytest.raises(BadModel, match=r"no server responds at .*/v1/embeddings .*refused.*start the server"):
        _endpoint_embedder(url, "big").text(["a"])


def test_a_server_that_answered_before_may_be_restarting(server: Server) -> None:
    poster = _Poster(url=server.url + "/embeddings", key_variable=None, retries=2, timeout=30.0)
    body = json.dumps({"model": "big", "input": ["ab"]}).encode()
    poster.post(body, limit=10_000)
    with Server() as gone:
        moved = replace(poster, url=gone.url + "/embeddings")
    with pytest.raises(BadModel, match=r"failed 3 times.*refused"):
        moved.post(body, limit=10_000)


@pytest.mark.parametrize("ending", ["", "/", "/embeddings", "/embeddings/"])
def test_the_whole_address_may_be_given(server: Server, ending: str) -> None:
    _endpoint_embedder(server.url + ending, "big", key_variable=None).text(["ab"])
    assert [path for path, _, _ in server.requests] == ["/v1/embeddings"]
    assert _endpoint_id(server.url + ending, "big") == _endpoint_id(server.url, "big")


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        (
            status(401, f'{{"error": {{"message": "bad key {KEY}"}}}}'.encode()),
            BadInput,
            f"{VARIABLE} to a valid key",
        ),
        (status(403), BadInput, f"{VARIABLE} to a valid key"),
        (status(404, b'{"error": {"message": "no model big"}}'), BadModel, "no model big"),
        (status(400, f"you sent {KEY} and long text".encode()), BadInput, r"you sent \[key\] and long text"),
        (status(400, b'{"error": "deep"}'), BadInput, "deep"),
        (status(302, Location="http://127.0.0.1:9/elsewhere"), BadInput, "another address"),
        (status(307, Location="http://127.0.0.1:9/elsewhere"), BadInput, "another address"),
    ],
    ids=["401", "403", "404", "400", "400 odd", "302", "307"],
)
def test_permanent_failures_are_not_retried(
    server: Server, trouble: Behaviour, kind: type[TrundleError], message: str
) -> None:
    server.script = [trouble]
    with pytest.raises(kind, match=message):
        teacher(server).text(["ab"])
    assert len(server.requests) == 1


def test_a_missing_key_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    server.script = [status(401), status(401)]
    with pytest.raises(BadInput, match=f"{VARIABLE} to its key, which is not set"):
        teacher(server).text(["ab"])
    with pytest.raises(BadInput, match="name the environment variable"):
        teacher(server, key_variable=None).text(["ab"])


def data(*embeddings: Any) -> bytes:
    return json.dumps({"data": [{"index": i, "embedding": e} for i, e in enumerate(embeddings)]}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"<html>hello</html>", "not JSON.*<html>"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no list of embeddings"),
        (b'{"data": {}}', "no list of embeddings"),
        (b'{"data": [1, 2]}', "no list of embeddings"),
        (data([1.0]), "1 vectors for 2 texts"),
        (data([1.0], [1.0], [1.0]), "3 vectors for 2 texts"),
        (b'{"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [1]}]}', "did not number"),
        (b'{"data": [{"index": [], "embedding": [1]}, {"embedding": [1]}]}', "did not number"),
        (data([1.0], "AACAPw=="), "no list of numbers for 'second'"),
        (data([1.0], ["1.0"]), "no list of numbers for 'second'"),
        (data([1.0], [None]), "no list of numbers for 'second'"),
        (data([1.0], [[1.0], [1.0, 2.0]]), "no list of numbers for 'second'"),
        (data([1.0], []), "no list of numbers for 'second'"),
        (data([1.0], [True]), "no list of numbers for 'second'"),
        (data([1.0], [float("nan")]), "NaN or infinity for 'second'"),
        (data([1.0], [1e300]), "NaN or infinity for 'second'"),
        (data([1.0], [0.0]), "zeros for 'second'"),
        (data([1.0], [1.0, 2.0]), "several widths"),
    ],
)
def test_invalid_responses_are_rejected(server: Server, content: bytes, message: str) -> None:
    server.script = [says(content)]
    with pytest.raises(BadModel, match=message):
        teacher(server).text(["first", "second"])
    assert len(server.requests) == 1


def test_an_endless_answer_and_a_changing_width_are_rejected(server: Server) -> None:
    server.script = [says(b" " * (3 << 20))]
    with pytest.raises(BadModel, match="more than 1048576 bytes"):
        teacher(server).text(["a"])
    server.script = [good, says(data([1.0]))]
    with pytest.raises(BadModel, match="width 1, not 3"):
        teacher(server, batch_size=1).text(["a", "b"])


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["data", "index", "embedding"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_answer_is_vectors_or_a_clear_error(raw: bytes) -> None:
    try:
        vectors = _read_answer(raw, ["first"], "somewhere")
    except BadModel:
        return
    assert vectors.dtype == np.float32
    assert vectors.shape[0] == 1
    assert np.isfinite(vectors).all()
    assert vectors.any()


@pytest.mark.parametrize("written", ["7", "date", "nonsense", "-3"])
def test_retry_after_is_respected(server: Server, written: str) -> None:
    asked = format_datetime(datetime.now(UTC) + timedelta(seconds=30)) if written == "date" else written
    server.script = [status(429, Retry_After=asked)] * 2
    waits: list[float] = []
    poster = _Poster(url=server.url, key_variable=None, retries=4, timeout=5.0, sleep=waits.append)
    poster.post(b'{"input": [], "model": "m"}', limit=1000)
    least, most = {"7": (7, 7), "date": (20, 31)}.get(written, (0.0005, 0.002))
    assert all(least <= wait <= most for wait in waits)
    assert len(waits) == 2


def test_waits_double_up_to_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 1.0)
    server.script = [status(503)] * 9
    waits: list[float] = []
    poster = _Poster(url=server.url, key_variable=None, retries=9, timeout=5.0, sleep=waits.append)
    poster.post(b'{"input": [], "model": "m"}', limit=1000)
    longest = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))


def test_a_retry_after_beyond_the_limit_is_an_error(server: Server) -> None:
    server.script = [status(429, b"come back tomorrow", Retry_After="86400")]
    with pytest.raises(BadModel, match=r"wait 86400 seconds \(429: come back tomorrow\)"):
        teacher(server).text(["a"])


def test_the_key_is_never_shown(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    big = teacher(server, retries=1)
    poster = _Poster(url=server.url, key_variable=VARIABLE, retries=1, timeout=5.0)
    texts = [Text(text=f"text {i}", kind="query") for i in range(5)]
    wanted = Manifest(teacher=_endpoint_id(server.url, "big"), shard_size=2)
    build_targets(texts, big, wanted, tmp_path / "t")
    seen = [
        repr(big),
        repr(poster),
        *(file.read_bytes().decode("latin-1") for file in (tmp_path / "t").iterdir()),
    ]
    echo = f'{{"error": {{"message": "{KEY}"}}}}'.encode()
    for trouble in (
        status(400, echo),
        status(401, echo),
        status(404, echo),
        status(500, echo),
        says(b"junk"),
    ):
        server.script = [trouble] * 2
        with pytest.raises(UserError) as raised:
            big.text(["a"])
        error: BaseException | None = raised.value
        while error is not None:
            seen += [str(error), repr(error), repr(vars(error))]
            trace = error.__traceback__
            while trace is not None:
                if Path(trace.tb_frame.f_code.co_filename).is_relative_to(LIBRARY):
                    seen.append(repr(trace.tb_frame.f_locals))
                trace = trace.tb_next
            error = error.__context__
    captured = capfd.readouterr()
    seen += [caplog.text, captured.out, captured.err]
    assert len(seen) > 30
    assert not [place for place in seen if KEY in place]


@pytest.mark.parametrize("key", ["sk-secret\nX-Other: 1", "sk secret", "sk-ſecret"])
def test_a_key_invalid_in_a_header_is_rejected_without_showing_it(
    server: Server, monkeypatch: Any, key: str
) -> None:
    monkeypatch.setitem(os.environ, VARIABLE, key)
    with pytest.raises(BadInput, match=f"{VARIABLE} holds spaces or odd characters") as raised:
        teacher(server).text(["a"])
    assert key[:5] not in str(raised.value)
    assert server.requests == []


def test_a_key_with_a_line_end_is_stripped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f" {KEY}\n")
    teacher(server).text(["a"])
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("server/v1", "is not a valid URL"),
        ("ftp://server/v1", "is not a valid URL"),
        ("http://", "is not a valid URL"),
        ("http://server:port/v1", "is not a valid URL"),
        ("http://server/a b", "is not a valid URL"),
        ("http://server/ü", "is not a valid URL"),
        ("http://me:secret@server/v1", "must hold no key"),
        ("http://server/v1?key=secret", "must hold no key"),
    ],
)
def test_an_invalid_address_or_one_with_a_secret_is_rejected(url: str, message: str) -> None:
    for use in (_endpoint_embedder, _endpoint_id):
        with pytest.raises(BadInput, match=message) as raised:
            use(url, "big")
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"retries": -1}, {"timeout": 0}], ids=str)
def test_impossible_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        _endpoint_embedder("http://server/v1", "big", **options)


def test_identity_follows_what_is_asked_for() -> None:
    asked = [
        _endpoint_id("http://server/v1", "big"),
        _endpoint_id("http://other/v1", "big"),
        _endpoint_id("http://server/v1", "small"),
    ]
    assert len(set(asked)) == 3
    assert _endpoint_id("http://server/v1/", "big") == asked[0]


def test_finished_shards_survive_a_server_that_dies(server: Server, tmp_path: Path) -> None:
    texts = [Text(text=f"text {i}") for i in range(7)]
    server.script = [good, good, *([status(500)] * 2)]
    wanted = Manifest(teacher=_endpoint_id(server.url, "big"), shard_size=2)
    with pytest.raises(BadModel, match="failed 2 times"):
        build_targets(texts, teacher(server, retries=1), wanted, tmp_path)
    server.requests.clear()
    targets = build_targets(texts, teacher(server), wanted, tmp_path)
    assert [body["input"] for _, _, body in server.requests] == [["text 4", "text 5"], ["text 6"]]
    np.testing.assert_array_equal(
        targets.vectors(range(7)), np.array([embedding(text.text) for text in texts], dtype=np.float32)
    )
    server.requests.clear()
    build_targets(texts, teacher(server), wanted, tmp_path)
    assert server.requests == []

"""What clients get: the runtime's vectors, and one sentence for each error."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pico
from live_server import LiveServer, running
from trundle.runtime.encoder import Encoder
from trundle.serve.settings import ServerSettings, _Served


def given(answer: Any, dtype: type = np.float32) -> np.ndarray:
    rows = [row["embedding"] for row in answer.json()["data"]]
    return np.array(
        [np.frombuffer(base64.b64decode(row), dtype) if isinstance(row, str) else row for row in rows]
    )


def test_the_openai_package_gets_the_runtimes_vectors(server: LiveServer, student: Encoder) -> None:
    from openai import BadRequestError, NotFoundError, OpenAI  # here, because it takes a second to import

    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    truth = student.encode(pico.TEXTS)
    answer = client.embeddings.create(model="small", input=pico.TEXTS)
    np.testing.assert_allclose([row.embedding for row in answer.data], truth, atol=1e-5)
    assert [row.index for row in answer.data] == list(range(len(pico.TEXTS)))
    plain = client.embeddings.create(model="small", input="queries are short", encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, student.encode("queries are short"), atol=1e-5)
    assert plain.usage.prompt_tokens == len(student.read(["queries are short"])[0])
    short = client.embeddings.create(model="small", input=pico.TEXTS, dimensions=8)
    np.testing.assert_allclose(
        [row.embedding for row in short.data], student.encode(pico.TEXTS, dimensions=8), atol=1e-5
    )
    assert [model.id for model in client.models.list()] == ["small", "big"]
    with pytest.raises(NotFoundError, match="use one of: small, big"):
        client.embeddings.create(model="text-embedding-3-small", input="a")
    with pytest.raises(BadRequestError, match="has 32 dimensions, not 33"):
        client.embeddings.create(model="small", input="a", dimensions=33)


@pytest.mark.parametrize("form", ["float", "base64"])
@pytest.mark.parametrize(("dtype", "output"), [("float", "float32"), ("int8", "int8"), ("binary", "binary")])
def test_every_kind_of_number_in_both_forms(
    server: LiveServer, student: Encoder, form: str, dtype: str, output: Any
) -> None:
    answer = server.embed(input=pico.TEXTS, output_dtype=dtype, encoding_format=form)
    truth = student.encode(pico.TEXTS, output=output)
    np.testing.assert_allclose(given(answer, truth.dtype.type), truth, atol=1e-5)


def test_queries_by_the_student_documents_by_the_teacher(
    server: LiveServer, student: Encoder, teacher: Encoder
) -> None:
    text = "a small model that shares the frame"
    cases = (
        ({"model": "small", "input_type": "query"}, student.encode_query(text), "small"),
        ({"model": "small", "input_type": "document"}, teacher.encode_document(text), "big"),
        ({"input_type": "document"}, teacher.encode_document(text), "big"),
        ({"model": "small"}, student.encode(text), "small"),
        ({"model": "big", "input_type": "query"}, teacher.encode_query(text), "big"),
    )
    for words, truth, name in cases:
        answer = server.embed(input=text, **words)
        np.testing.assert_allclose(given(answer)[0], truth, atol=1e-5)
        assert answer.json()["model"] == name
    assert not np.allclose(student.encode_query(text), student.encode(text), atol=1e-3)


def test_a_model_alone_answers_for_both_sides(alone: _Served, student: Encoder) -> None:
    with running(alone, ServerSettings(page=False)) as live:
        answer = live.embed(input="an index", input_type="document")
        np.testing.assert_allclose(given(answer)[0], student.encode_document("an index"), atol=1e-5)
        assert live.get("/").status == 404


BAD: list[tuple[bytes | dict[str, Any], int, str]] = [
    (b"{", 400, "JSON"),
    (b"", 400, "JSON"),
    (b"\xff\xfe", 400, "JSON"),
    (b"[]", 400, "object"),
    (b'"text"', 400, "object"),
    (b'{"input": "a", "input": ', 400, "JSON"),
    ({}, 400, "input must be a text"),
    ({"input": []}, 400, "one or more texts"),
    ({"input": None}, 400, "input must be a text"),
    ({"input": 7}, 400, "input must be a text"),
    ({"input": ["a", None]}, 400, "input must be a text"),
    ({"input": [1, 2, 3]}, 400, "check_embedding_ctx_length=False"),
    ({"input": [[1, 2, 3]]}, 400, "not token ids"),
    (b'{"input": "\\ud800"}', 400, ""),
    ({"input": "a", "model": "other"}, 404, "use one of: small, big"),
    ({"input": "a", "model": 3}, 400, "model"),
    ({"input": "a", "dimensions": 33}, 400, "pass 1 to 32"),
    ({"input": "a", "dimensions": 10**30}, 400, "dimensions"),
    ({"input": "a", "dimensions": 0}, 400, "dimensions"),
    ({"input": "a", "dimensions": "8"}, 400, "dimensions"),
    ({"input": "a", "dimensions": True}, 400, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ({"input": "a", "input_type": "passage"}, 400, "input_type"),
    ({"input": "a", "output_dtype": "float16"}, 400, "output_dtype"),
    ({"input": ["a"] * 2049}, 400, "send 2048 or fewer"),
    ({"input": "a" * 10_000_000}, 413, "send fewer texts at once"),
]


@pytest.mark.parametrize(("content", "status", "said"), BAD, ids=range(len(BAD)))
def test_bad_bodies_get_one_sentence(server: LiveServer, content: Any, status: int, said: str) -> None:
    answer = server.post("/v1/embeddings", content)
    assert answer.status == status
    error = answer.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert server.embed(input="still here").status == 200


def test_unusual_requests_that_are_allowed(server: LiveServer, student: Encoder) -> None:
    texts = ["", " ", "\x00", "🙂" * 50, "word " * 5000, "a\nb"]
    answer = server.embed(input=texts, user="somebody", unknown_field=1)
    assert answer.status == 200
    np.testing.assert_allclose(given(answer), student.encode(texts), atol=1e-5)
    assert server.embed(input="a", encoding_format=None).status == 200


def test_wrong_addresses_and_methods(server: LiveServer) -> None:
    assert server.get("/nowhere").status == 404
    assert server.get("/v1/embeddings").status == 405
    assert "see /openapi.json" in server.get("/nowhere").json()["error"]["message"]


def test_health_and_figures(server: LiveServer) -> None:
    assert server.get("/health").json() == {"status": "ok", "models": ["small", "big"]}

    def figures() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(server.get("/metrics").body.decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    before = figures()
    server.embed(input=["one", "two", "three"], input_type="query")
    server.embed(input=[])
    after = figures()
    grown = {key: value - before.get(key, 0) for key, value in after.items()}
    assert grown["trundle_texts_total", "small", "query"] == 3
    assert grown["trundle_requests_total", "/v1/embeddings", "200"] == 1
    assert grown["trundle_requests_total", "/v1/embeddings", "400"] == 1
    assert grown["trundle_batch_texts_sum", "small"] == 3
    assert after["trundle_waiting_texts", "small"] == 0
    assert grown["trundle_tokens_total", "small"] > 9


def test_token_limit(alone: _Served) -> None:
    with running(alone, ServerSettings(most_tokens=20)) as live:
        assert live.embed(input="a few words").status == 200
        answer = live.embed(input=["many more words than before"] * 10)
        assert answer.status == 400
        assert "more than 20 tokens" in answer.json()["error"]["message"]

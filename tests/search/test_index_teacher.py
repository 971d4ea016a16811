"""From an index, a table, a store or an endpoint to a small model within a budget, on pico models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

import trundle
from compressing import compress
from live_server import running
from pico import different_texts
from recorded_progress import RecordedProgress
from trundle.data.texts import Text
from trundle.embedder import Embedder
from trundle.errors import BadInput, BadModel, UserError
from trundle.model import encode
from trundle.model.load import load
from trundle.pipeline.run import Request
from trundle.recipe import make_recipe
from trundle.records import PLANNING_FILE, read_lineage
from trundle.runtime.encoder import Encoder
from trundle.search import training_source
from trundle.search.limits import TeacherOptions
from trundle.search.search import compress_to_budget
from trundle.search.trials import Outcome
from trundle.serve.settings import open_served
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest

TEXTS = different_texts(700)
QUERIES = [f"what about {text}" for text in TEXTS[:300]]
BUDGET = "1MB"


@pytest.fixture
def teacher(pico_folders: Callable[[str], Path]) -> str:
    """The model that made the index: another architecture than the student's."""
    return str(pico_folders("mpnet", 1))


@pytest.fixture
def student(pico_folders: Callable[[str], Path]) -> str:
    return str(pico_folders("bert", 2))


@pytest.fixture(scope="module")
def vectors(pico_model: Callable[[str], SentenceTransformer]) -> list[np.ndarray]:
    return list(pico_model("mpnet", 1).encode(TEXTS, normalize_embeddings=True))


@pytest.fixture
def rows(tmp_path: Path, vectors: list[np.ndarray]) -> str:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS, "vector": vectors}), file)
    return str(file)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that models encode as teachers."""
    found: list[str] = []
    make = encode.labelling_embedder

    def counted(*given: Any, **named: Any) -> Embedder:
        def wrap(call: Any) -> Any:
            return lambda texts: found.extend(texts) or call(texts)

        return make(*given, **named).through(wrap)

    monkeypatch.setattr(training_source, "labelling_embedder", counted)
    return found


@pytest.fixture
def table(postgres: Any, vectors: list[np.ndarray]) -> str:
    psycopg = pytest.importorskip("psycopg", reason="needs the extra postgres")
    with psycopg.connect(postgres.url) as database:
        database.execute("CREATE EXTENSION IF NOT EXISTS vector")
        database.execute("CREATE TABLE lessons (id int PRIMARY KEY, content text, embedding vector(32))")
        stored = zip(range(len(TEXTS)), TEXTS, (str(row.tolist()) for row in vectors), strict=True)
        database.cursor().executemany("INSERT INTO lessons VALUES (%s, %s, %s)", list(stored))
        database.execute("INSERT INTO lessons VALUES (-1, NULL, NULL)")
    return f"{postgres.url}&table=lessons"


@pytest.mark.usefixtures("quick")
def test_an_index_teaches_by_its_rows_alone(table: str, student: str, tmp_path: Path) -> None:
    output, progress = tmp_path / "small", RecordedProgress()
    outcome = compress(
        index=table, budget=BUDGET, students=[student], minutes=0.03, output=output, progress=progress
    )
    assert isinstance(outcome, Outcome)
    assert outcome.before is None
    assert outcome.check is not None
    assert outcome.check.index.endswith("table lessons")
    assert outcome.check.total == len(TEXTS) + 1
    assert outcome.check.teacher is None
    assert outcome.check.rows is not None
    assert outcome.check.rows.queries >= 20
    assert outcome.check.agreement > 0.2, "ten of 700 by chance agree in 0.014"
    assert "documents are not queries" in " ".join(outcome.check.says())
    assert any("left out 1 with no vector" in line for line in progress.lines)
    lineage = read_lineage(output)
    assert lineage is not None
    assert outcome.run is not None
    assert outcome.run.fidelity is not None
    of_weights = lineage["scores"][f"l2 distance to {outcome.check.index}"]
    assert outcome.run.fidelity.distance != pytest.approx(of_weights, abs=1e-4), "the int8 graph is measured"
    assert lineage["space"] == outcome.check.index
    assert lineage["source"] == student
    assert json.loads((output / PLANNING_FILE).read_text())["index"]["agreement"] == outcome.check.agreement
    encoder = Encoder(output)
    vector = encoder.embed_query("a text")
    assert len(vector) == 32
    np.testing.assert_allclose(np.linalg.norm(vector), 1, atol=1e-3)
    np.testing.assert_allclose(encoder.embed_documents(["a text", "more"])[0], vector, atol=1e-6)
    assert encoder.embed_documents([]) == []


@pytest.mark.usefixtures("quick")
def test_who_made_the_index_labels_queries_and_pieces(
    rows: str, teacher: str, pico_folders: Callable[[str], Path], tmp_path: Path, asked: list[str]
) -> None:
    student = str(pico_folders("bert"))
    (tmp_path / "queries.txt").write_text("\n".join(QUERIES), encoding="utf-8")
    request = Request(source=teacher, output=tmp_path / "small", progress=(progress := RecordedProgress()))
    options = TeacherOptions(index=rows, queries=str(tmp_path / "queries.txt"), calls=400)
    outcome = compress_to_budget(
        request, ["14k-params"], minutes=0.03, students=[student], teacher_options=options
    )
    assert outcome.check is not None
    assert outcome.check.teacher == teacher
    assert outcome.check.rows is not None
    assert len(set(asked) - set(TEXTS)) <= 400
    assert set(asked) & set(QUERIES)
    assert len(set(asked) & set(TEXTS)) == 32, "rows have their vectors already; some show who made the index"
    assert any("gets at most 400 texts, about" in line for line in progress.lines)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["table", "store"])
def test_tables_and_stores_teach_in_the_same_way(
    rows: str, teacher: str, student: str, tmp_path: Path, kind: str
) -> None:
    name = rows
    if kind == "store":
        name = str(tmp_path / "store")
        model = encode.labelling_embedder(load(teacher), name="teacher")
        build_targets(
            [Text(text=text, kind="document") for text in TEXTS], model, Manifest(teacher="t"), name
        )
    outcome = compress(name, budget=BUDGET, students=[student], minutes=0.03)
    assert outcome.run is not None
    assert outcome.run.output is not None
    assert outcome.check is not None
    assert Encoder(outcome.run.output).dimensions == 32


@pytest.mark.usefixtures("quick")
def test_an_endpoint_gets_as_many_texts_as_allowed(
    pico_folders: Callable[[str], Path], student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    sent: list[str] = []
    from trundle.teacher import endpoint

    post = endpoint._EmbeddingsClient._batch

    def counted(self: Any, texts: Any) -> Any:
        sent.extend(texts)
        return post(self, texts)

    monkeypatch.setattr(endpoint._EmbeddingsClient, "_batch", counted)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    with running(open_served(str(pico_folders("mpnet", 1)), name="large")) as server:
        outcome = compress(
            f"{server.url}/v1",
            budget=BUDGET,
            students=[student],
            minutes=0.03,
            teacher_model="large",
            teacher_calls=300,
            corpus=trundle.read_corpus([str(tmp_path / "texts.txt")], seed=0),
            output=tmp_path / "small",
        )
    assert outcome.run is not None
    assert 100 < len(sent) <= 300
    assert len(set(sent)) == len(sent)
    lineage = read_lineage(tmp_path / "small")
    assert lineage is not None
    assert lineage["steps"][-1]["options"]["teacher_model"] == "large"


@pytest.mark.usefixtures("quick")
def test_a_search_interrupted_in_its_check_does_not_train_again(
    rows: str, student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trundle.pipeline.run._KEPT_AFTER", 0.0)
    words: dict[str, Any] = {"budget": BUDGET, "students": [student], "minutes": 0.03}
    with monkeypatch.context() as patch:
        patch.setattr(training_source._TrainingSource, "check", stopped)
        with pytest.raises(KeyboardInterrupt):
            compress(index=rows, output=tmp_path / "small", **words)
    monkeypatch.setattr("trundle.methods.align.align.run_training", stopped)
    assert compress(index=rows, output=tmp_path / "small", **words).check is not None


@pytest.mark.usefixtures("quick")
def test_an_endpoint_that_fails_ends_the_search(
    student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise BadModel("no server responds; start the server")

    monkeypatch.setattr("trundle.teacher.endpoint._EmbeddingsClient._batch", down)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    corpus, progress = trundle.read_corpus([str(tmp_path / "texts.txt")], seed=0), RecordedProgress()
    with pytest.raises(UserError, match="start the server"):
        compress(
            "http://127.0.0.1:9/v1",
            budget=BUDGET,
            students=[student],
            minutes=0.03,
            teacher_model="large",
            corpus=corpus,
            progress=progress,
        )
    assert not any("is refused" in line for line in progress.lines)


@pytest.mark.usefixtures("quick")
def test_the_length_is_learned_for_inner_products(
    rows: str, student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trundle.teacher import teacher as teachers

    table = pq.read_table(rows)
    lengths = np.linspace(1, 9, len(TEXTS))[:, None] * np.stack(table.column("vector").to_pylist())
    file = tmp_path / "long.parquet"
    pq.write_table(pa.table({"text": TEXTS, "vector": list(lengths)}), file)
    open_reader = teachers.open_reader

    def with_metric(*given: Any, **named: Any) -> Any:
        reader: Any = open_reader(*given, **named)
        reader.metric = "inner product"
        return reader

    monkeypatch.setattr(teachers, "open_reader", with_metric)
    outcome = compress(index=str(file), budget=BUDGET, students=[student], minutes=0.03)
    assert outcome.run is not None
    model = outcome.run.model
    assert model.similarity_fn_name == "dot"
    assert np.linalg.norm(model.encode(TEXTS[:50]), axis=1).std() > 0.1
    assert outcome.run.output is not None
    np.testing.assert_allclose(
        Encoder(outcome.run.output, graph="int8").encode(TEXTS[:5]),
        model.encode(TEXTS[:5]),
        rtol=0.3,
        atol=0.3,
    )


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "name what to compress"),
    ("", {"index": "mysql://host/db"}, "mysql:// is not an index"),
    ("", {"index": "nowhere.parquet"}, "there is no index"),
    ("", {"index": "ROWS", "queries": "queries.txt"}, "--teacher"),
    ("http://127.0.0.1:9/v1", {"index": "ROWS"}, "--teacher-model"),
    ("ROWS", {"index": "ROWS"}, "own texts only"),
    ("model", {"queries": "queries.txt"}, "--index"),
    ("model", {"calls": 5}, "--teacher-calls"),
]


@pytest.mark.parametrize(("source", "teacher_options", "message"), WRONG)
def test_bad_input_is_rejected_before_a_model_is_opened(
    source: str,
    teacher_options: dict[str, Any],
    message: str,
    tmp_path: Path,
    rows: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trundle.search.search.load", lambda *_, **__: pytest.fail("a model was opened"))
    given = {name: rows if value == "ROWS" else value for name, value in teacher_options.items()}
    request = Request(source=rows if source == "ROWS" else source, output=tmp_path / "small")
    with pytest.raises(BadInput, match=message):
        compress_to_budget(request, [BUDGET], students=["s"], teacher_options=TeacherOptions(**given))
    with pytest.raises(BadInput, match="pass a size such as 12MB"):
        compress_to_budget(
            Request(source="", output=tmp_path / "small"),
            ["10x"],
            students=["s"],
            teacher_options=TeacherOptions(index=rows),
        )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_model_that_did_not_make_the_index_is_rejected(
    rows: str, student: str, tmp_path: Path, dry_run: bool
) -> None:
    request = Request(source=student, output=tmp_path / "small", dry_run=dry_run)
    with pytest.raises(BadInput, match="differ from those of"):
        compress_to_budget(request, ["14k-params"], teacher_options=TeacherOptions(index=rows))


@pytest.mark.usefixtures("quick")
def test_a_dry_run_sends_nothing(rows: str, student: str) -> None:
    progress, nowhere = RecordedProgress(), "http://127.0.0.1:9/v1"  # nothing listens there
    request = Request(source=nowhere, dry_run=True, progress=progress)
    options = TeacherOptions(index=rows, calls=100, model="m")
    outcome = compress_to_budget(request, ["14k-params"], students=[student], teacher_options=options)
    assert outcome.run is None
    assert any("would get at most 100 texts" in line for line in progress.lines)


def test_align_learns_from_an_index_and_records_no_password(
    rows: str, student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trundle.teacher import teacher as teachers

    open_reader, address = teachers.open_reader, "postgresql://me:s3cr3t@host/db?table=chunks"
    opened: list[str] = []

    def locally(where: str, **named: Any) -> Any:
        opened.append(where)
        reader: Any = open_reader(rows, **named)
        reader.where = "host/db, table chunks"
        return reader

    monkeypatch.setattr(teachers, "open_reader", locally)
    recipe = make_recipe([("align", {"teacher": address, "steps": 3, "texts": 50})], name="align")
    run = compress(student, recipe, output=tmp_path / "small")
    assert opened == [address]
    assert run.model.get_embedding_dimension() == 32
    assert run.steps[0].facts["texts"] == 45  # of 50: the others are for validation
    written = [file.read_bytes() for file in (tmp_path / "small").rglob("*") if file.is_file()]
    assert b"s3cr3t" not in b"".join(written)
    assert "s3cr3t" not in json.dumps(run.as_json())
    assert "postgresql://me@host/db?table=chunks" in json.dumps(run.as_json())

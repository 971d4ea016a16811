"""The command `trundle targets build`, and a student trained on its vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.teacher.targets import open_targets


def test_a_store_is_built_and_trained_on(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    teacher, store = str(tmp_path / "teacher"), str(tmp_path / "store")
    model = SentenceTransformer(str(pico_folders("mpnet", 1)), device="cpu")
    model.prompts = {"query": "q: ", "plain": "p: "}
    model.default_prompt_name = "plain"
    model.save_pretrained(teacher)
    data = tmp_path / "texts.jsonl"
    rows = [(f"{text} {number}", f"about {text} {number % 9}") for number in range(30) for text in pico.TEXTS]
    data.write_text("\n".join(json.dumps({"query": query, "document": about}) for query, about in rows))
    code, out, err = run("targets", "build", teacher, "-d", str(data), "-o", store)
    assert code == 0, err
    assert f"trundle align STUDENT --teacher {store}" in out
    code, out, _ = run("targets", "build", teacher, "-d", str(data), "-o", store, "--json")
    assert json.loads(out)["texts"] == (30 + 9) * len(pico.TEXTS)
    targets = open_targets(store)
    queries = targets.texts([0, 2])
    vectors = model.encode_query(queries)
    assert targets.vectors([0, 2]) == pytest.approx(vectors, abs=1e-3)

    small = tmp_path / "small"
    code, _, err = run(
        "align", str(pico_folders("bert", 1)), "--teacher", store, "--steps", "2", "-o", str(small)
    )
    assert code == 0, err
    student = SentenceTransformer(str(small), device="cpu")
    assert (student.prompts["query"], student.default_prompt_name) == ("q: ", "plain")
    assert student.get_embedding_dimension() == model.get_embedding_dimension()


def test_impossible_builds_give_one_sentence(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(pico_folders("bert", 1))
    table, other, store = (str(tmp_path / name) for name in ("a.parquet", "b.parquet", "store"))
    pq.write_table(pa.table({"text": pico.TEXTS}), table)
    pq.write_table(pa.table({"body_": pico.TEXTS}), other)
    (tmp_path / "c.txt").write_text("a text\n")
    build = ("targets", "build", model, "-o", store, "-q")
    assert run(*build, "-d", table)[0] == 0
    for words, says in (
        ((*build, "-d", table, "-d", str(tmp_path / "c.txt")), "was made from other texts"),
        (
            ("targets", "build", str(pico_folders("mpnet", 1)), "-o", store, "-d", table),
            "was made by another teacher",
        ),
        ((*build, "-d", other), "no column known to hold texts (columns: body_)"),
        ((*build, "-d", table, "--workers", "2"), "--workers goes with --ray"),
        ((*build, "-d", table, "--threads", "2"), "--threads goes with --ray or --runtime"),
        ((*build, "-d", table, "--runtime"), "has not been exported; run: trundle export"),
        (
            ("targets", "build", "https://server/v1", "-o", store, "-d", table),
            "is not a model; pass a model folder",
        ),
        (("align", model, "--teacher", store, "--data", table, "-o", "x"), "leave --data out"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert says in err
        assert err.count("trundle:") == 1


def test_without_ray_one_process_builds_and_the_extra_is_named(
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or "trundle.scale." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "c.txt").write_text("a text\n")
    build = ("targets", "build", str(pico_folders("bert", 1)), "-d", str(tmp_path / "c.txt"), "-o")
    assert run(*build, str(tmp_path / "store"))[0] == 0
    code, _, err = run(*build, str(tmp_path / "other"), "--ray")
    assert code == 2
    assert "--ray needs packages that are not installed: pip install 'trundle[scale]'" in err


def test_ray_takes_an_optional_address(
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray", reason="needs a cluster: pip install 'trundle[scale]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test's cluster may still be there
    table = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pico.TEXTS}), table)
    (tmp_path / "c.txt").write_text("a text\n")
    build = ("targets", "build", str(pico_folders("bert", 1)), "-o", str(tmp_path / "store"))
    for words, says in (
        (("-d", str(tmp_path / "c.txt"), "--ray"), "is not parquet, the only format a cluster reads"),
        (("--ray", "-d", str(tmp_path / "c.txt")), "is not parquet, the only format a cluster reads"),
        (("-d", table, "--ray", "127.0.0.1:1"), "no cluster responds at 127.0.0.1:1"),
        (("-d", table, "--ray=somewhere"), "is not the address of a Ray cluster; write HOST:PORT"),
    ):
        code, _, err = run(*build, *words)
        assert code == 2
        assert says in err
    assert not (tmp_path / "store").exists()

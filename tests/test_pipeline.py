"""The spine on pico models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.artifact import read_lineage
from trundle.data import Text
from trundle.data.corpus import read_corpus
from trundle.errors import BadInput, ImpossibleCut
from trundle.pipeline import compress, queries_and_documents
from trundle.recipe import parse_recipe, read_recipe


@pytest.fixture
def texts(tmp_path: Path) -> str:
    file = tmp_path / "texts.txt"
    file.write_text(
        "\n".join(f"{text} {number}" for number in range(40) for text in pico.TEXTS), encoding="utf-8"
    )
    return str(file)


def test_start_to_end(pico_folders: Callable[[str], Path], texts: str, tmp_path: Path) -> None:
    source = str(pico_folders("bert"))
    run = compress(
        source,
        read_recipe("half", ["align.texts=100"]),
        output=tmp_path / "small",
        corpus=read_corpus([texts], seed=1),
        seed=1,
    )
    assert [step.call.step.name for step in run.steps] == ["depth", "align"]
    assert run.after.layers == 2
    assert run.fidelity is not None
    assert run.fidelity.cosine > 0.9
    small = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    np.testing.assert_allclose(small.encode(pico.TEXTS), run.result.text(pico.TEXTS), atol=1e-6)
    lineage = read_lineage(tmp_path / "small")
    assert lineage is not None
    assert lineage["before"]["layers"] == 4
    assert lineage["data"][0]["texts"] == 40 * len(pico.TEXTS)
    assert lineage["scores"]["cosine to the original"] == pytest.approx(run.fidelity.cosine, abs=1e-4)
    assert "keep 2 of 4 layers" in (tmp_path / "small" / "README.md").read_text()


def test_a_second_run_on_the_result_remembers_the_first(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    compress(
        str(pico_folders("bert")),
        parse_recipe("steps: [depth: {keep: 3}]", name="x"),
        output=tmp_path / "three",
    )
    compress(
        str(tmp_path / "three"), parse_recipe("steps: [depth: {keep: 1}]", name="x"), output=tmp_path / "one"
    )
    lineage = read_lineage(tmp_path / "one")
    assert lineage is not None
    assert lineage["parent"]["after"]["layers"] == 3


def test_a_dry_run_writes_nothing_and_forecasts_the_truth(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    recipe = read_recipe("half", ["align.texts=50"])
    corpus = read_corpus([texts], seed=0)
    dry = compress(str(pico_folders("bert")), recipe, output=tmp_path / "x", corpus=corpus, dry_run=True)
    assert not (tmp_path / "x").exists()
    assert [step.applied for step in dry.steps] == [True, False]
    real = compress(str(pico_folders("bert")), recipe, output=tmp_path / "x", corpus=corpus)
    assert dry.after.as_json() == real.after.as_json()


def test_refusals_come_before_work(pico_folders: Callable[[str], Path], texts: str, tmp_path: Path) -> None:
    source, half = str(pico_folders("bert")), read_recipe("half")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    with pytest.raises(BadInput, match="exists already"):
        compress(source, half, output=tmp_path / "taken")
    with pytest.raises(BadInput, match="say where they are with --data"):
        compress(source, half, output=tmp_path / "out")
    alone, corpus = parse_recipe("steps: [align: {}]", name="x"), read_corpus([texts], seed=0)
    with pytest.raises(BadInput, match="--teacher"):
        compress(source, alone, output=tmp_path / "out", corpus=corpus)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{keep: 0}", "0 can't be kept; give 1 to 4"),
        ("{keep: -1}", "-1 can't be kept"),
        ("{keep: 5}", "has 4 layers, so 5 can't be kept"),
        ("{}", "say how many of the 4 layers"),
        ("{keep: 2, fraction: 50%}", "not both"),
        ("{fraction: 100%}", "under 1"),
        ("{fraction: -0.1}", "at least 0"),
        ("{fraction: 0.99}", "0 can't be kept"),
    ],
)
def test_impossible_depths(options: str, says: str, pico_folders: Callable[[str], Path]) -> None:
    with pytest.raises(ImpossibleCut, match=says):
        compress(str(pico_folders("bert")), parse_recipe(f"steps: [depth: {options}]", name="x"), output=None)


def test_align_to_a_named_teacher_of_another_kind(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    """Another family, tokenizer and pooling: the student lands in the teacher's space, normalised as the teacher is."""
    teacher = pico_folders("llama")
    recipe = parse_recipe(f"steps: [align: {{texts: 200, steps: 0, teacher: '{teacher}'}}]", name="x")
    compress(str(pico_folders("bert")), recipe, output=tmp_path / "out", corpus=read_corpus([texts], seed=0))
    student, large = (
        SentenceTransformer(str(folder), device="cpu") for folder in (tmp_path / "out", teacher)
    )
    ours, theirs = student.encode(pico.TEXTS), large.encode(pico.TEXTS)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    assert np.mean(np.sum(ours * theirs, axis=1)) > np.mean(np.sum(np.roll(ours, 1, axis=0) * theirs, axis=1))


def test_roles_of_texts_without_a_kind() -> None:
    texts = [Text(text=str(number), kind=None) for number in range(8)]
    queries, documents = queries_and_documents(texts)
    assert queries == ["0", "4"]
    assert not set(queries) & set(documents)
    queries, documents = queries_and_documents([Text(text=str(n), kind="query") for n in range(4)])
    assert (queries, documents) == (["0", "2"], ["1", "3"])

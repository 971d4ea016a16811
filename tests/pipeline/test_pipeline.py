"""The pipeline from start to end on pico models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

import pico
from compressing import compress
from recorded_progress import RecordedProgress
from trundle.cache import cache_folder
from trundle.data.corpus import Corpus, read_corpus
from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput, ImpossibleCut, WriteFailed
from trundle.evaluate.fidelity import FEWEST_DOCUMENTS, queries_and_documents
from trundle.methods import METHODS
from trundle.model.save import weight_bytes
from trundle.pipeline.compress import compare_held_out, run_recipe
from trundle.pipeline.run import Request, Run
from trundle.recipe import parse_recipe, read_recipe, single
from trundle.records import read_lineage
from trundle.teacher.targets import open_targets

MANY = 140


def repeated(file: Path, times: int) -> str:
    file.write_text(
        "\n".join(f"{text} {number}" for number in range(times) for text in pico.TEXTS), encoding="utf-8"
    )
    return str(file)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Enough to train on; too few are held out to compare the result with its teacher."""
    return repeated(tmp_path / "texts.txt", 60)


@pytest.fixture
def many_texts(tmp_path: Path) -> str:
    return repeated(tmp_path / "texts.txt", MANY)


def test_start_to_end(pico_folders: Callable[[str], Path], many_texts: str, tmp_path: Path) -> None:
    source = str(pico_folders("bert"))
    run = compress(
        source,
        read_recipe("half", ["align.texts=100"]),
        output=tmp_path / "small",
        corpus=read_corpus([many_texts], seed=1),
        seed=1,
    )
    assert [step.call.method.name for step in run.steps] == ["depth", "align"]
    assert run.after.layers == 2
    assert run.fidelity is not None
    assert run.fidelity.cosine > 0.9
    small = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    np.testing.assert_allclose(small.encode(pico.TEXTS), run.result.text(pico.TEXTS), atol=1e-6)
    lineage = read_lineage(tmp_path / "small")
    assert lineage is not None
    assert lineage["before"]["layers"] == 4
    assert lineage["data"][0]["texts"] == MANY * len(pico.TEXTS)
    assert lineage["scores"]["cosine to the original"] == pytest.approx(run.fidelity.cosine, abs=1e-4)
    assert "keep 2 of 4 layers" in (tmp_path / "small" / "README.md").read_text()


def test_a_slow_comparison_uses_fewer_texts_and_says_so(
    pico_folders: Callable[[str], Path], many_texts: str, tmp_path: Path
) -> None:
    corpus, progress = read_corpus([many_texts], seed=1), RecordedProgress()
    request = Request(source=str(pico_folders("bert")), output=tmp_path / "small", corpus=corpus, seed=1)
    request = replace(request, measured_seconds=0.0, progress=progress)
    run = run_recipe(request, single(METHODS["depth"], {"keep": 2}))
    assert run.fidelity is not None
    assert run.fidelity.documents < 2 * FEWEST_DOCUMENTS
    assert "compared on 67 of" in progress.lines[-1]
    compared = {"queries": run.fidelity.queries, "documents": run.fidelity.documents}
    assert (read_lineage(tmp_path / "small") or {})["compared"] == compared
    on = f"{run.fidelity.queries} queries and {run.fidelity.documents} documents"
    assert on in (tmp_path / "small" / "README.md").read_text()
    without_limit = replace(request, measured_seconds=math.inf)
    teacher = replace(run.teacher, embedder=run.original)
    again = compare_held_out(teacher, run.result, without_limit, compared)
    assert again == run.fidelity


def test_a_model_in_memory_gives_a_model_in_memory(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    source, recipe = str(pico_folders("bert")), read_recipe("half", ["align.texts=100"])
    corpus = read_corpus([texts], seed=1)
    by_name = compress(source, recipe, output=tmp_path / "small", corpus=corpus)
    model = SentenceTransformer(source, device="cpu")
    before = model.encode(pico.TEXTS)
    in_memory = compress(model, recipe, corpus=corpus)
    assert in_memory.output is None
    np.testing.assert_array_equal(in_memory.model.encode(pico.TEXTS), by_name.model.encode(pico.TEXTS))
    np.testing.assert_array_equal(model.encode(pico.TEXTS), before)


def test_a_second_run_on_the_result_keeps_the_lineage(
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


def test_a_dry_run_writes_nothing_and_predicts_exact_sizes(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    recipe = read_recipe("half", ["align.texts=50"])
    corpus = read_corpus([texts], seed=0)
    dry = compress(str(pico_folders("bert")), recipe, output=tmp_path / "x", corpus=corpus, dry_run=True)
    assert not (tmp_path / "x").exists()
    assert [step.applied for step in dry.steps] == [True, False]
    real = compress(str(pico_folders("bert")), recipe, output=tmp_path / "x", corpus=corpus)
    assert dry.after.as_json() == real.after.as_json()


@pytest.mark.parametrize(
    "steps",
    [
        "[{weights: {sparsity: 50%, structure: neuron, method: magnitude}}, "
        "{align: {steps: 2, texts: 60, start: keep}}]",
        "[{width: {widths: 1/2, result: 1/2, objective: contrast, steps: 2}}, "
        "{contrast: {train: full, steps: 2}}]",
    ],
)
def test_a_dry_run_plans_methods_after_a_planned_cut(
    steps: str, pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [
        {"query": f"{text} {row}", "positive": f"{row} {text}"} for row in range(30) for text in pico.TEXTS
    ]
    data = tmp_path / "tuples.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    recipe, corpus = parse_recipe(f"steps: {steps}", name="x"), read_corpus([str(data)], seed=0)
    source = str(pico_folders("bert", 2))
    told = compress(source, recipe, output=None, corpus=corpus, dry_run=True)
    made = compress(source, recipe, output=tmp_path / "out", corpus=corpus)
    assert told.after == made.after
    assert told.after.parameters < told.before.parameters


def test_invalid_requests_are_rejected_before_any_work(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    source, half = str(pico_folders("bert")), read_recipe("half")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    with pytest.raises(BadInput, match="already exists"):
        compress(source, half, output=tmp_path / "taken")
    with pytest.raises(BadInput, match="pass them with --data"):
        compress(source, half, output=tmp_path / "out")
    alone, corpus = parse_recipe("steps: [align: {}]", name="x"), read_corpus([texts], seed=0)
    with pytest.raises(BadInput, match="--teacher"):
        compress(source, alone, output=tmp_path / "out", corpus=corpus)
    taken_out = parse_recipe("steps: [width: {extract: 1/2}]", name="x")
    with pytest.raises(BadInput, match="--pair needs a model in its teacher's space"):
        compress(source, taken_out, output=tmp_path / "out", corpus=corpus, pair=True)
    assert not (tmp_path / "out").exists()


def test_a_closed_form_encodes_no_more_texts_than_needed(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trundle.methods.align.teacher_vectors.RIDGE_TEXTS", 50)
    corpus = read_corpus([texts], seed=0)
    for name, steps in (
        ("depth", "[{depth: {keep: 2}}, {align: {steps: 0}}]"),
        ("width", "[{width: {extract: 1/2}}]"),
    ):
        recipe = parse_recipe(f"steps: {steps}", name=name)
        compress(str(pico_folders("bert")), recipe, output=tmp_path / name, corpus=corpus)
    stores = list((cache_folder() / "targets").iterdir())
    assert [len(open_targets(store)) for store in stores] == [50]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{keep: 0, order: spread}", "no layers to spread"),
        ("{keep: -1}", "it can't keep -1"),
        ("{keep: 5}", "has 4 layers, so it can't keep 5"),
        ("{}", "choose how many layers"),
        ("{keep: 2, drop: 50%}", "leave one of them out"),
        ("{drop: 100%}", "under 1"),
        ("{drop: -0.1}", "at least 0"),
        ("{drop: 0.99}", "leaves none; use keep: 0"),
    ],
)
def test_impossible_depths(options: str, says: str, pico_folders: Callable[[str], Path]) -> None:
    with pytest.raises(ImpossibleCut, match=says):
        compress(str(pico_folders("bert")), parse_recipe(f"steps: [depth: {options}]", name="x"), output=None)


def test_align_to_a_named_teacher_of_another_kind(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    """Another family, tokenizer and pooling: the student gets into the teacher's space and normalisation."""
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


@pytest.fixture(scope="module")
def small_and_teacher(
    pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """Two of four layers, and the model they come from."""
    two = tmp_path_factory.mktemp("small") / "two"
    compress(str(pico_folders("bert")), parse_recipe("steps: [depth: {keep: 2}]", name="x"), output=two)
    return str(two), str(pico_folders("bert"))


def align(student: str, output: Path, corpus: Corpus | None, **options: object) -> Run:
    return compress(student, single(METHODS["align"], options), output=output, corpus=corpus)


def test_training_brings_a_student_closer_to_its_teacher(
    small_and_teacher: tuple[str, str], many_texts: str, tmp_path: Path
) -> None:
    small, teacher = small_and_teacher
    corpus = read_corpus([many_texts], seed=0)
    start = align(small, tmp_path / "start", corpus, teacher=teacher, steps=0, start="random")
    trained = align(
        small,
        tmp_path / "trained",
        corpus,
        teacher=teacher,
        steps=60,
        batch_size=16,
        learning_rate=1e-3,
        start="random",
    )
    assert start.fidelity is not None
    assert trained.fidelity is not None
    assert trained.fidelity.distance < start.fidelity.distance
    assert trained.fidelity.teacher == teacher
    facts = trained.steps[0].facts
    assert facts["validation_texts"] > 0
    assert facts["best_step"] > 0
    lines = [json.loads(line) for line in (tmp_path / "trained" / "align.jsonl").read_text().splitlines()]
    assert lines[0]["validation"] > lines[-1]["validation"]
    assert (
        f"in the vector space of `{Path(teacher).name}`" in (tmp_path / "trained" / "README.md").read_text()
    )


@pytest.mark.parametrize("start", ["random", "keep"])
def test_other_starts(start: str, small_and_teacher: tuple[str, str], texts: str, tmp_path: Path) -> None:
    small, teacher = small_and_teacher
    run = align(
        small,
        tmp_path / "x",
        read_corpus([texts], seed=0),
        teacher=teacher,
        steps=3,
        start=start,
        batch_size=8,
    )
    assert run.steps[0].facts["steps"] == 3
    assert len(SentenceTransformer(str(tmp_path / "x"), device="cpu")) == (4 if start == "random" else 3)


def test_a_table_of_vectors_is_a_teacher(
    small_and_teacher: tuple[str, str], texts: str, tmp_path: Path
) -> None:
    small, teacher = small_and_teacher
    lines = Path(texts).read_text(encoding="utf-8").splitlines()
    vectors = SentenceTransformer(teacher, device="cpu").encode(lines)
    pq.write_table(pa.table({"text": lines, "vector": list(vectors)}), tmp_path / "vectors.parquet")
    table = str(tmp_path / "vectors.parquet")
    align(small, tmp_path / "out", None, teacher=table, steps=30, batch_size=16, learning_rate=1e-3)
    before, after = (
        SentenceTransformer(folder, device="cpu").encode(lines[:50])
        for folder in (small, str(tmp_path / "out"))
    )
    assert (
        np.linalg.norm(after - vectors[:50], axis=1).mean()
        < np.linalg.norm(before - vectors[:50], axis=1).mean()
    )
    with pytest.raises(BadInput, match="contains its texts"):
        align(small, tmp_path / "no", read_corpus([texts], seed=0), teacher=table, steps=1)
    with pytest.raises(BadInput, match="no vectors for new texts"):
        align(small, tmp_path / "no", None, teacher=table, steps=1, augment="spans")
    few = align(small, tmp_path / "few", None, teacher=table, steps=1, texts=40)
    assert few.steps[0].facts["texts"] + few.steps[0].facts["validation_texts"] == 40


def test_a_training_on_other_texts_does_not_resume_the_first(
    small_and_teacher: tuple[str, str], texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed after training is taken up again by the same command, and by no other."""
    small, teacher = small_and_teacher
    options = {"teacher": teacher, "steps": 4, "batch_size": 8, "start": "keep"}
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))

    def broken(*_: object, **__: object) -> None:
        raise WriteFailed("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("trundle.pipeline.compress.save", broken)
        with pytest.raises(WriteFailed):
            align(small, tmp_path / "a", read_corpus([texts], seed=0), **options)
    kept = list((cache_folder() / "runs").iterdir())
    assert kept
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"quite another text, number {n}" for n in range(200)))
    align(small, tmp_path / "b", read_corpus([str(other)], seed=0), **options)
    assert set(kept) <= set((cache_folder() / "runs").iterdir())
    again = align(small, tmp_path / "a", read_corpus([texts], seed=0), **options)
    assert again.steps[0].facts["steps"] == 4
    assert not set(kept) & set((cache_folder() / "runs").iterdir())


def test_prompts_and_their_default_come_from_the_teacher(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    teacher = SentenceTransformer(str(pico_folders("bert", 1)), device="cpu")
    teacher.prompts, teacher.default_prompt_name = {"query": "find: ", "plain": "say: "}, "plain"
    teacher.save_pretrained(str(tmp_path / "teacher"), create_model_card=False)
    student = SentenceTransformer(str(pico_folders("mpnet", 1)), device="cpu")
    student.prompts, student.default_prompt_name = {"sts": "x "}, "sts"
    student.save_pretrained(str(tmp_path / "student"), create_model_card=False)
    corpus = read_corpus([texts], seed=0)
    align(
        str(tmp_path / "student"),
        tmp_path / "out",
        corpus,
        teacher=str(tmp_path / "teacher"),
        steps=2,
        batch_size=8,
    )
    aligned = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert aligned.prompts["query"] == "find: "
    assert aligned.default_prompt_name == "plain"


def test_a_half_precision_model_is_trained_in_full_and_saved_in_half(
    pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    SentenceTransformer(str(pico_folders("qwen3")), device="cpu").bfloat16().save_pretrained(
        str(tmp_path / "half")
    )
    recipe = parse_recipe("steps: [depth: {keep: 2}, align: {steps: 2, batch_size: 8, texts: 40}]", name="x")
    run = run_recipe(
        Request(
            source=str(tmp_path / "half"),
            output=tmp_path / "out",
            corpus=read_corpus([texts], seed=0),
            measured_texts=20,
        ),
        recipe,
    )
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    assert run.after.file_bytes == weight_bytes(tmp_path / "out")


def test_a_second_run_uses_cached_teacher_vectors(
    small_and_teacher: tuple[str, str], texts: str, tmp_path: Path
) -> None:
    small, teacher = small_and_teacher
    corpus = read_corpus([texts], seed=7)
    reads: list[str] = []

    def watched(most: int | None, seed: int) -> Iterator[Text]:
        reads.append("train")
        return corpus.distinct_train(most, seed)

    def align(steps: int) -> Run:
        recipe = single(METHODS["align"], {"teacher": teacher, "steps": steps, "texts": 150})
        return compress(small, recipe, output=None, corpus=replace(corpus, distinct_texts=watched), seed=7)

    first, second = align(1), align(2)
    assert reads == ["train"]
    assert first.steps[0].facts["texts"] == second.steps[0].facts["texts"]


def test_held_out_texts_are_not_trained_on(texts: str, tmp_path: Path) -> None:
    """Neither as it stands, nor as a piece of a longer text, nor from another file."""
    long = tmp_path / "long.jsonl"
    lines = Path(texts).read_text(encoding="utf-8").splitlines()
    long.write_text(
        "\n".join(
            json.dumps({"text": f"Before it. {line[0].upper() + line[1:]}. After it."}) for line in lines
        )
    )
    corpus = read_corpus([texts, str(long)], seed=0)
    kept = {text.text for part in (corpus.validation, corpus.held_out) for text in part()}
    train = [text.text for text in corpus.train()]
    assert kept
    assert len(set(train)) + len(kept) == len({text.text for text in read_texts([texts, str(long)])})
    assert not kept & set(train)
    assert not any(corpus.may_train_on(text) for text in kept)
    assert all(corpus.may_train_on(text) for text in train)

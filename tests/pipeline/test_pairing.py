"""Two models in one folder: each side equals its model alone, also without trundle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from compressing import compress
from trundle.data.corpus import read_corpus
from trundle.errors import BadInput
from trundle.model.heads import paired
from trundle.pipeline.pair import _share_a_space, pair
from trundle.recipe import parse_recipe
from trundle.records import read_lineage

LONG = " ".join(pico.TEXTS)


def without_trundle(folder: Path, texts: list[str]) -> dict[str, np.ndarray]:
    """The vectors where no module of trundle can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "trundle"]:
            patch.setitem(sys.modules, name, None)
        model = SentenceTransformer(str(folder), device="cpu")
        return {
            "query": model.encode_query(texts),
            "document": model.encode_document(texts),
            "text": model.encode(texts),
        }


def alone(
    student: SentenceTransformer, teacher: SentenceTransformer, texts: list[str]
) -> dict[str, np.ndarray]:
    return {
        "query": student.encode_query(texts),
        "document": teacher.encode_document(texts),
        "text": teacher.encode(texts),
    }


def model(family: str, folder: Path, **settings: object) -> SentenceTransformer:
    """A pico model with prompts and a length of its own, saved to `folder`."""
    made = pico.model(
        family, str(folder.with_name(f"{folder.name} backbone")), normalize=bool(settings["normalize"])
    )
    made.prompts, made.default_prompt_name = settings["prompts"], settings["default"]
    made.max_seq_length = settings["length"]
    made.save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def test_a_pair_is_each_model_alone_without_trundle(tmp_path: Path) -> None:
    student = model(
        "bert",
        tmp_path / "student",
        normalize=True,
        prompts={"query": "asked: ", "document": "said by the small one: "},
        default=None,
        length=12,
    )
    teacher = model(
        "llama",
        tmp_path / "teacher",
        normalize=False,
        prompts={"query": "find: ", "document": "told: ", "other": "as the crow flies: "},
        default="other",
        length=40,
    )
    made = pair(str(tmp_path / "student"), str(tmp_path / "teacher"), output=tmp_path / "both")
    texts = [*pico.TEXTS, LONG]
    expected = alone(student, teacher, texts)
    found = without_trundle(tmp_path / "both", texts)
    for role, vectors in expected.items():
        np.testing.assert_allclose(found[role], vectors, atol=1e-6, err_msg=role)
    assert len({expected[role][0].tobytes() for role in expected}) == 3  # three prompts, so three vectors
    assert made.width == 32
    assert read_lineage(tmp_path / "both")["steps"][0]["facts"]["query_parameters"] == made.query_parameters
    card = (tmp_path / "both" / "README.md").read_text(encoding="utf-8")
    assert "encode_query" in card
    assert "`student`" in card


def test_without_prompts_the_pair_has_none(pico_model: Callable[[str], SentenceTransformer]) -> None:
    student, teacher = pico_model("bert"), pico_model("mpnet")
    both = paired(student, teacher)
    assert not any(both.prompts.values())
    for role, vectors in alone(student, teacher, pico.TEXTS).items():
        encode = {"query": both.encode_query, "document": both.encode_document, "text": both.encode}[role]
        np.testing.assert_allclose(encode(pico.TEXTS), vectors, atol=1e-6, err_msg=role)


def test_a_prompt_for_plain_encode_that_has_no_name_of_its_own_gets_one(tmp_path: Path) -> None:
    both = {"prompts": {"query": "ask: "}, "length": 40, "normalize": True}
    student = model("bert", tmp_path / "student", default=None, **both | {"prompts": {"query": "small: "}})
    teacher = model("bert", tmp_path / "teacher", default="query", **both)
    made = paired(student, teacher)
    for role, vectors in alone(student, teacher, pico.TEXTS).items():
        encode = {"query": made.encode_query, "document": made.encode_document, "text": made.encode}[role]
        np.testing.assert_allclose(encode(pico.TEXTS), vectors, atol=1e-6, err_msg=role)


def test_compress_writes_the_pair_beside_its_result(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(f"{text} {number}" for number in range(30) for text in pico.TEXTS), "utf-8")
    teacher, small = pico_folders("bert"), tmp_path / "small"
    run = compress(
        str(teacher),
        parse_recipe("steps: [depth: {keep: 2}, align: {steps: 0}]", name="x"),
        output=small,
        corpus=read_corpus([str(file)], seed=0),
        pair=True,
    )
    assert run.pair == tmp_path / "small-pair"
    both = SentenceTransformer(str(run.pair), device="cpu")
    np.testing.assert_allclose(
        both.encode_query(pico.TEXTS),
        SentenceTransformer(str(small), device="cpu").encode(pico.TEXTS),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        both.encode_document(pico.TEXTS),
        SentenceTransformer(str(teacher), device="cpu").encode(pico.TEXTS),
        atol=1e-6,
    )
    lineage = read_lineage(run.pair)
    assert lineage["space"] == str(teacher)
    assert [step["step"] for step in lineage["parent"]["steps"]] == ["depth", "align"]
    assert not list(tmp_path.glob(".*"))


def test_unrelated_models_are_detected(pico_model: Callable[[str], SentenceTransformer]) -> None:
    bert = pico_model("bert")
    assert _share_a_space(bert, bert)
    assert not _share_a_space(bert, pico_model("mpnet"))


def test_models_that_do_not_form_a_pair_are_rejected(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    bert, out = str(pico_folders("bert")), tmp_path / "out"
    pico.model("bert", str(tmp_path / "wide backbone"), hidden_size=64).save_pretrained(
        str(tmp_path / "wide")
    )
    with pytest.raises(BadInput, match="32 dimensions, the teacher's 64"):
        pair(bert, str(tmp_path / "wide"), output=out)
    for black_box in ("https://server/v1", "vectors.parquet"):
        with pytest.raises(BadInput, match="is not a model; pass the teacher"):
            pair(bert, black_box, output=out)
    with pytest.raises(BadInput, match="is an input of this command"):
        pair(bert, str(tmp_path / "wide"), output=bert, replace=True)
    with pytest.raises(BadInput, match="add align to the recipe"):
        compress(bert, parse_recipe("steps: [depth: {keep: 2}]", name="x"), output=out, pair=True)
    assert not out.exists()

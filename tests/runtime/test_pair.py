"""A pair in the runtime: each side gives the same vectors as in torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer

import pico
from trundle.bench.child import _engines_of
from trundle.errors import BadInput, BadModel
from trundle.export.exporting import Exported, export_model
from trundle.export.open import open_encoder
from trundle.export.quantise import ExportOptions, Limits
from trundle.pipeline.pair import _save_pair
from trundle.records import read_lineage
from trundle.runtime.encoder import Encoder

CALIBRATION = [f"{text} {number}" for number in range(7) for text in pico.TEXTS]


@pytest.fixture(scope="module")
def pair(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with prompts of their own, one length each, in one torch folder."""
    folder = tmp_path_factory.mktemp("pairs") / "both"
    student = SentenceTransformer(str(pico_folders("bert", 1)), device="cpu")
    teacher = SentenceTransformer(str(pico_folders("mpnet", 1)), device="cpu")
    student.prompts, student.max_seq_length = {"query": "how do I "}, 9
    teacher.prompts, teacher.default_prompt_name = {"document": "the ", "other": "so "}, "other"
    _save_pair(student, teacher, names=("small", "big"), output=folder)
    return folder


@pytest.fixture(scope="module")
def exported_pair(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The pair as two graphs in a folder of their own."""
    return export_model(str(pair), to="onnx", output=tmp_path_factory.mktemp("pairs") / "out")


def check_sides(encoder: Encoder, pair: Path) -> None:
    truth = SentenceTransformer(str(pair), device="cpu")
    wanted = {
        "query": truth.encode_query(pico.TEXTS),
        "document": truth.encode_document(pico.TEXTS),
        None: truth.encode(pico.TEXTS),
    }
    assert len({vectors[0].tobytes() for vectors in wanted.values()}) == 3
    for side, vectors in wanted.items():
        np.testing.assert_allclose(encoder.encode(pico.TEXTS, side=side), vectors, atol=1e-5)  # type: ignore[arg-type]
        streamed = list(encoder.stream(pico.TEXTS, side=side))  # type: ignore[arg-type]
        np.testing.assert_allclose(streamed, vectors, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_query(pico.TEXTS), wanted["query"], atol=1e-5)
    np.testing.assert_allclose(encoder.encode_document(pico.TEXTS), wanted["document"], atol=1e-5)


def test_a_pair_runs_without_torch(pair: Path, exported_pair: Exported) -> None:
    made, out = exported_pair, exported_pair.folder.parent
    assert made.documents is not None
    assert [made.folder, made.documents.folder] == [out / "query", out / "document"]
    assert not list(out.rglob("*.safetensors"))
    assert read_lineage(out) == read_lineage(pair)
    encoder = Encoder(out, threads=2)
    assert encoder.is_pair
    assert encoder.parameters * 4 == made.float_bytes + made.documents.float_bytes
    check_sides(encoder, pair)
    np.testing.assert_array_equal(
        Encoder(out / "query", threads=2).encode_query(pico.TEXTS), encoder.encode_query(pico.TEXTS)
    )


def test_graphs_join_the_pair_and_each_other(pair: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair, tmp_path / "both"))
    export_model(str(folder), to="onnx")
    with pytest.raises(BadInput, match="pass --force"):
        export_model(str(folder), to="onnx")
    before = sorted(folder.rglob("*"))
    with pytest.raises(BadModel, match="loses too much"):
        export_model(
            str(folder),
            to="onnx",
            precision="int8",
            options=ExportOptions(calibrate=CALIBRATION, limits=Limits(cosine=1e-9)),
        )
    assert sorted(folder.rglob("*")) == before
    wide = Limits(cosine=1, agreement=1)
    export_model(
        str(folder), to="onnx", precision="int8", options=ExportOptions(calibrate=CALIBRATION, limits=wide)
    )
    assert _engines_of(str(folder)) == ["torch", "onnx-float32", "onnx-int8"]
    assert Encoder(folder).graph.precision == "int8"
    check_sides(Encoder(folder, graph="onnx-float32"), folder)
    file = next(folder.rglob("*.safetensors"))
    save_file({name: weight * 1.5 for name, weight in load_file(file).items()}, file)
    for place in (folder, folder / "query"):
        with pytest.raises(BadModel, match=r"weights .* have changed"):
            Encoder(place)


def test_a_pair_without_graphs_is_exported_into_the_cache(pair: Path) -> None:
    check_sides(open_encoder(str(pair)), pair)


def test_an_incomplete_pair_and_models_of_different_spaces(exported_pair: Exported, tmp_path: Path) -> None:
    shutil.copytree(exported_pair.folder.parent, tmp_path / "out")
    with pytest.raises(BadInput, match="pass query, document or None"):
        Encoder(tmp_path / "out").encode("a", side="passage")  # type: ignore[arg-type]
    (tmp_path / "out" / "document").rename(tmp_path / "document")
    with pytest.raises(BadModel, match="document"):
        Encoder(tmp_path / "out")
    narrow = pico.model("bert", str(tmp_path / "backbone"), hidden_size=16, num_hidden_layers=1)
    narrow.save_pretrained(str(tmp_path / "narrow"))
    export_model(str(tmp_path / "narrow"), to="onnx", output=tmp_path / "out" / "document")
    with pytest.raises(BadModel, match="32 dimensions for queries and 16 for documents"):
        Encoder(tmp_path / "out")


def test_a_side_chooses_the_prompt_of_a_single_model(
    exported: Path, torch_model: SentenceTransformer
) -> None:
    encoder = Encoder(exported)
    assert not encoder.is_pair
    np.testing.assert_allclose(
        encoder.encode(pico.TEXTS, side="query"), torch_model.encode_query(pico.TEXTS), atol=1e-5
    )
    assert encoder.encode("a", side="query", prompt="").shape == (32,)

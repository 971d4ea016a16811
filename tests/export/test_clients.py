"""The exported folder in sentence-transformers, fastembed and transformers.js, if they are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.export.exporting import export_model
from trundle.export.open import as_sentence_transformer
from trundle.export.quantise import ExportOptions, Limits

TEXTS = [f"{text} {number}" for number in range(7) for text in pico.TEXTS]
NODE_MODULES = Path(os.environ.get("TRUNDLE_NODE_MODULES", "node_modules")).absolute()

SCRIPT = """
import { pathToFileURL } from 'node:url';
const [modules, folder, dtype] = process.argv.slice(2);
const library = pathToFileURL(`${modules}/@huggingface/transformers/dist/transformers.node.mjs`);
const { AutoModel, AutoTokenizer, env } = await import(library);
env.allowRemoteModels = false;
env.localModelPath = folder.slice(0, folder.lastIndexOf('/') + 1);
const name = folder.slice(folder.lastIndexOf('/') + 1);
const tokenizer = await AutoTokenizer.from_pretrained(name);
const model = await AutoModel.from_pretrained(name, { dtype });
const texts = JSON.parse(await new Response(process.stdin).text());
const rows = [];
for (const text of texts) {
  const { sentence_embedding } = await model(tokenizer([text], { padding: true, truncation: true }));
  rows.push(...sentence_embedding.tolist());
}
process.stdout.write(JSON.stringify(rows));
"""


@pytest.fixture(scope="module")
def folder(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico BERT with a float and an int8 graph."""
    copy = Path(shutil.copytree(pico_folders("bert", 2), tmp_path_factory.mktemp("clients") / "model"))
    export_model(str(copy), to="onnx")
    export_model(
        str(copy),
        to="onnx",
        precision="int8",
        options=ExportOptions(calibrate=TEXTS, limits=Limits(cosine=0.01, agreement=0.6)),
    )
    return copy


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)


def check(found: np.ndarray, wanted: np.ndarray, least: float) -> None:
    cosines = (found * wanted).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    assert found.shape == wanted.shape
    assert cosines.mean() >= least


@pytest.mark.parametrize(("graph", "least"), [("onnx-float32", 0.999), ("onnx-int8", 0.99)])
def test_sentence_transformers(folder: Path, wanted: np.ndarray, graph: str, least: float) -> None:
    model = as_sentence_transformer(folder, graph=graph)
    assert isinstance(model, SentenceTransformer)
    check(model.encode(TEXTS), wanted, least)
    assert model.get_embedding_dimension() == 32
    assert model.similarity(model.encode(TEXTS[:1]), model.encode(TEXTS[:1])).shape == (1, 1)


@pytest.mark.parametrize(("file", "least"), [("model.onnx", 0.999), ("model_quantized.onnx", 0.99)])
def test_fastembed(folder: Path, wanted: np.ndarray, file: str, least: float) -> None:
    fastembed = pytest.importorskip("fastembed", reason="needs pip install fastembed")
    from fastembed.common.model_description import ModelSource, PoolingType

    fastembed.TextEmbedding.add_custom_model(
        model=f"pico/{file}",
        pooling=PoolingType.DISABLED,
        normalization=False,
        sources=ModelSource(hf="pico/pico"),
        dim=32,
        model_file=f"onnx/{file}",
    )
    model = fastembed.TextEmbedding(f"pico/{file}", specific_model_path=str(folder))
    found = np.array([next(iter(model.embed([text]))) for text in TEXTS])
    check(found, wanted, least)


@pytest.mark.parametrize(("dtype", "least"), [("fp32", 0.999), ("q8", 0.99)])
def test_transformers_js(folder: Path, wanted: np.ndarray, dtype: str, least: float, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    if not (NODE_MODULES / "@huggingface" / "transformers").is_dir():
        pytest.skip("needs npm i --ignore-scripts @huggingface/transformers, in TRUNDLE_NODE_MODULES")
    script = tmp_path / "encode.mjs"
    script.write_text(SCRIPT)
    command = ["node", str(script), str(NODE_MODULES), str(folder), dtype]
    done = subprocess.run(command, input=json.dumps(TEXTS), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(np.array(json.loads(done.stdout)), wanted, least)

"""The runtime against sentence-transformers, and its errors for bad input."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.quantization import quantize_embeddings

import pico
from trundle.errors import BadInput, BadModel
from trundle.runtime.description import Graph
from trundle.runtime.encoder import Encoder
from trundle.runtime.engines import _choose, _may_overflow, _OpenVinoSession

TEXTS = [f"{text} {number}" for number in range(40) for text in (*pico.TEXTS, "fox " * number)]

ALLOWED = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top in {"trundle", *sys.argv[2].split(",")}:
            return None
        raise ImportError(f"{name} is behind the wall")
sys.meta_path.insert(0, Wall())
"""


def walled(code: str, folder: Path, allowed: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh process that can import trundle, the standard library and what is allowed."""
    command = [sys.executable, "-c", ALLOWED + code, str(folder), allowed]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def encoder(exported: Path) -> Encoder:
    return Encoder(exported, threads=2)


def test_vectors_are_those_of_torch(encoder: Encoder, torch_model: SentenceTransformer) -> None:
    np.testing.assert_allclose(encoder.encode(TEXTS), torch_model.encode(TEXTS), atol=1e-5)
    assert encoder.encode("one text").shape == (32,)
    assert encoder.encode([]).shape == (0, 32)


def test_roles_and_prompts_are_those_of_torch(encoder: Encoder, torch_model: SentenceTransformer) -> None:
    some = TEXTS[:9]
    for ours, theirs in (
        (encoder.encode_query(some), torch_model.encode_query(some)),
        (encoder.encode_document(some), torch_model.encode_document(some)),
        (encoder.encode(some, prompt_name="other"), torch_model.encode(some, prompt_name="other")),
        (encoder.encode(some, prompt="my own "), torch_model.encode(some, prompt="my own ")),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nothing_but_the_runtime_is_needed(exported: Path) -> None:
    code = (
        "from trundle import Encoder\nv = Encoder(sys.argv[1]).encode(['a text', 'b'])\n"
        "print(v.shape, any(n in sys.modules for n in ('torch', 'transformers', 'sentence_transformers')))"
    )
    done = walled(code, exported, "numpy,tokenizers,onnxruntime")
    assert done.stdout == "(2, 32) False\n", done.stderr


def test_without_openvino_the_other_graph_runs_with_a_warning(exported: Path, tmp_path: Path) -> None:
    folder = damaged(exported, tmp_path)
    content = json.loads((folder / "encoder.json").read_text())
    other = {**content["graphs"][0], "engine": "openvino", "path": "openvino/openvino_model.xml"}
    (folder / "encoder.json").write_text(json.dumps(content | {"graphs": [*content["graphs"], other]}))
    (folder / "openvino").mkdir()
    (folder / "openvino" / "openvino_model.xml").touch()
    code = (
        "import platform\nplatform.machine = lambda: 'x86_64'\n"
        "sys.modules['openvino'] = None\nfrom trundle import Encoder\n"
        "print(Encoder(sys.argv[1], graph=sys.argv[3] if len(sys.argv) > 3 else None).encode('a').shape)"
    )
    done = walled(code, folder, "numpy,tokenizers,onnxruntime")
    assert done.stdout == "(32,)\n", done.stderr
    assert "openvino is not installed: onnx/model.onnx is run by onnx instead" in done.stderr
    (folder / "encoder.json").write_text(json.dumps(content | {"graphs": [other]}))
    assert "pip install 'trundle[openvino]'" in walled(code, folder, "numpy,tokenizers,onnxruntime").stderr


@pytest.mark.parametrize(
    ("machine", "engine"), [("x86_64", "openvino"), ("AMD64", "openvino"), ("aarch64", "onnx")]
)
def test_the_library_that_is_faster_on_the_processor_comes_first(
    machine: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("trundle.runtime.engines.installed", lambda _: True)
    graphs = [
        Graph(path=f"{engine}-{precision}", engine=engine, precision=precision)
        for precision in ("float32", "int8")
        for engine in ("onnx", "openvino")
    ]
    assert _choose(graphs, None, Path(), print).path == f"{engine}-int8"
    assert _choose(graphs, "float32", Path(), print).path == f"{engine}-float32"
    assert _choose(graphs, "openvino", Path(), print).path == "openvino-int8"


@pytest.mark.parametrize(
    ("bits", "flags", "warned"),
    [(8, "sse2 avx2", True), (8, "sse2 avx512_vnni", False), (7, "sse2 avx2", False), (8, "asimd", False)],
)
def test_int8_that_can_overflow_is_detected(
    bits: int, flags: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr("trundle.runtime.engines._CPU_FLAGS", tmp_path / "cpuinfo")
    graph = Graph(path="x", engine="onnx", precision="int8", facts={"bits of a weight": bits})
    assert _may_overflow(graph) == warned


def test_the_order_of_texts_changes_nothing(encoder: Encoder) -> None:
    order = list(range(len(TEXTS)))
    random.Random(0).shuffle(order)
    straight = encoder.encode(TEXTS)
    np.testing.assert_allclose(encoder.encode([TEXTS[place] for place in order]), straight[order], atol=1e-5)
    np.testing.assert_allclose([encoder.encode(text) for text in TEXTS[:20]], straight[:20], atol=1e-5)


def test_a_stream_gives_the_same_vectors_in_order(encoder: Encoder) -> None:
    given = (text for text in TEXTS)
    np.testing.assert_allclose(list(encoder.stream(given, ahead=7)), encoder.encode(TEXTS), atol=1e-5)


def test_a_stream_reads_ahead_no_further_than_documented(encoder: Encoder) -> None:
    read = []

    def source() -> object:
        for text in TEXTS:
            read.append(text)
            yield text

    next(encoder.stream(source(), ahead=5))  # type: ignore[arg-type]
    assert len(read) == 5


def test_many_threads_at_once(exported: Path) -> None:
    encoder = Encoder(exported, threads=2)
    wanted, found = encoder.encode(TEXTS), {}

    def work(number: int) -> None:
        found[number] = encoder.encode(TEXTS[number:])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, vectors in found.items():
        np.testing.assert_allclose(vectors, wanted[number:], atol=1e-5)
    assert len(found) == 6


def test_fewer_dimensions_are_the_first_ones_at_length_one(encoder: Encoder) -> None:
    short, whole = encoder.encode(TEXTS, dimensions=8), encoder.encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)
    part = whole[:, :8]
    np.testing.assert_allclose(short, part / np.linalg.norm(part, axis=1, keepdims=True), atol=1e-5)


def test_int8_and_binary_vectors(encoder: Encoder) -> None:
    whole = encoder.encode(TEXTS)
    small = encoder.encode(TEXTS, output="int8")
    assert small.dtype == np.int8
    assert (np.abs(small).max(axis=1) == 127).all()
    cosines = (small * whole).sum(axis=1) / np.linalg.norm(small.astype(np.float32), axis=1)
    assert cosines.min() > 0.9999
    signs = encoder.encode(TEXTS, output="binary")
    np.testing.assert_array_equal(signs, quantize_embeddings(whole, precision="binary"))
    np.testing.assert_array_equal(
        encoder.encode(TEXTS, dimensions=16, output="binary"), quantize_embeddings(whole[:, :16], "binary")
    )


def test_ten_thousand_texts_at_once(encoder: Encoder) -> None:
    vectors = encoder.encode([f"text {number % 100}" for number in range(10_000)])
    assert vectors.shape == (10_000, 32)
    np.testing.assert_allclose(vectors[:100], vectors[9900:], atol=1e-5)


@pytest.mark.parametrize(
    ("texts", "options", "says"),
    [
        (["fine", 3], {}, "text 2 has the type int, not str"),
        ([None], {}, "text 1 has the type NoneType"),
        (["\ud800"], {}, "an unpaired surrogate"),
        (5, {}, "have the type int; pass a str"),
        (["a"], {"output": "float64"}, "choose one of float32, int8, binary"),
        (["a"], {"dimensions": 0}, "choose 1 to 32"),
        (["a"], {"dimensions": 64}, "choose 1 to 32"),
        (
            ["a"],
            {"prompt_name": "poem"},
            "choose one of: document, other, query|choose one of: query, document, other",
        ),
    ],
)
def test_bad_texts_and_options(
    encoder: Encoder, texts: list[str], options: dict[str, object], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        encoder.encode(texts, **options)  # type: ignore[arg-type]


def test_one_text_is_no_list_and_a_list_no_text(encoder: Encoder) -> None:
    with pytest.raises(BadInput, match=r"pass \[text\]"):
        encoder.embed_documents("abc")
    with pytest.raises(BadInput, match="call it once for each query"):
        encoder.embed_query(["a", "b"])  # type: ignore[arg-type]


def test_openvino_runs_for_more_callers_than_it_has_threads(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    names = ("input_ids", "attention_mask")
    given = [openvino.op.Parameter(openvino.Type.i64, openvino.PartialShape([-1, -1])) for _ in names]
    for name, node in zip(names, given, strict=True):
        node.output(0).set_names({name})
    added = openvino.opset13.convert(openvino.opset13.add(*given), "f32")
    added.output(0).set_names({"sentence_embedding"})
    openvino.save_model(openvino.Model([added], given), tmp_path / "model.xml")
    session = _OpenVinoSession(tmp_path / "model.xml", threads=1, streams=1, bfloat16=False)
    ids = np.arange(6).reshape(2, 3)
    session(ids, ids)
    held = session._free.pop()  # by a caller that does not go on
    np.testing.assert_array_equal(session(ids, ids), 2 * ids)
    assert session._free != [held]


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"graph": "openvino"}, {"graph": "int4"}])
def test_invalid_encoder_arguments(exported: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        Encoder(exported, **wrong)  # type: ignore[arg-type]


def damaged(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "damaged"))


def test_a_truncated_graph(exported: Path, tmp_path: Path) -> None:
    folder = damaged(exported, tmp_path)
    graph = folder / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:1000])
    with pytest.raises(BadModel, match="damaged or truncated"):
        Encoder(folder)
    graph.unlink()
    with pytest.raises(BadModel, match="missing; export the model again"):
        Encoder(folder)


def test_a_graph_of_another_width(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    about = json.loads((folder / "encoder.json").read_text())
    (folder / "encoder.json").write_text(json.dumps(about | {"dimensions": 65_536}))
    with pytest.raises(BadModel, match="says"):
        Encoder(folder).encode(["a text"])


def test_folders_that_are_not_exported(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="there is no folder"):
        Encoder(tmp_path / "nowhere")
    with pytest.raises(BadModel, match="run: trundle export"):
        Encoder(tmp_path)
    folder = damaged(exported, tmp_path)
    description = json.loads((folder / "encoder.json").read_text())
    for content in (
        "{",
        "[]",
        json.dumps(description | {"surplus": 1}),
        json.dumps(description | {"format": 99}),
    ):
        (folder / "encoder.json").write_text(content)
        with pytest.raises(BadModel, match="export the model again"):
            Encoder(folder)
    (folder / "encoder.json").write_text(json.dumps(description))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BadModel, match=r"tokenizer\.json can't be read"):
        Encoder(folder)

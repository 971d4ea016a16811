"""What export writes, what it rejects, and what a failure leaves behind."""

from __future__ import annotations

import errno
import json
import os
import platform
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import pico
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, BadModel
from trundle.export import exporting, int8, tracing
from trundle.export.exporting import export_model
from trundle.export.int8 import _rows_in_int8
from trundle.export.open import open_encoder
from trundle.export.quantise import ExportOptions, Limits, _spread, _tries
from trundle.export.tracing import _neighbour_agreement
from trundle.model.matrices import grid_weights, put_on_grid
from trundle.precision import Precision
from trundle.runtime.description import is_exported, read_description
from trundle.runtime.encoder import Encoder
from trundle.runtime.engines import is_x86

TEXTS = [f"{text} {number}" for number in range(7) for text in pico.TEXTS]
WIDE = Limits(cosine=0.05, agreement=0.6)
ANY = Limits(cosine=1, agreement=1)


@pytest.fixture
def model(pico_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pico_folders("bert", 2), tmp_path / "model"))


def listing(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)


def test_the_graph_is_what_clients_expect(model: Path) -> None:
    exported = export_model(str(model), to="onnx")
    graph = onnx.load(model / "onnx" / "model.onnx")
    assert [each.name for each in graph.graph.input] == ["input_ids", "attention_mask"]
    assert [each.name for each in graph.graph.output] == ["sentence_embedding", "token_embeddings"]
    assert graph.opset_import[0].version == exported.graph.facts["opset"] == 18
    assert SentenceTransformer(str(model), device="cpu").encode("still opens").shape == (32,)


@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_smaller_graphs_are_near_and_do_not_depend_on_order(engine: str, model: Path) -> None:
    if engine == "openvino":
        pytest.importorskip("nncf", reason="needs pip install 'trundle[openvino]'")
        if not is_x86(platform.machine()):
            pytest.skip("openvino's int8 is refused on this processor")
    wanted = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    sizes = {}
    half = "float16" if engine == "onnx" else "bfloat16"
    levels = [("float32", 0.999999), (half, 0.999), ("int8", 0.97)]
    for size, least in levels + ([("int8+int4_tokens", 0.95)] if engine == "onnx" else []):
        made = export_model(
            str(model), to=engine, precision=size, options=ExportOptions(calibrate=TEXTS, limits=WIDE)
        )  # type: ignore[arg-type]
        sizes[size] = made.file_bytes
        encoder = Encoder(model, graph=f"{engine}-{made.graph.precision}", threads=2)
        straight = encoder.encode(TEXTS)
        assert cosines(straight, wanted).min() > least
        order = list(range(len(TEXTS)))
        random.Random(1).shuffle(order)
        shuffled = encoder.encode([TEXTS[place] for place in order])
        if size != half:  # 16 bits round by themselves at 1e-3
            np.testing.assert_allclose(shuffled, straight[order], atol=1e-5)
    assert sizes["int8"] < sizes["float32"]
    if engine == "onnx":  # names are a large part of a small graph
        assert sizes["int8+int4_tokens"] < sizes["int8"]
        named = onnx.load(model / "onnx" / "model_quantized.onnx").graph
        assert [each.name for each in named.output] == ["sentence_embedding", "token_embeddings"]
        inner = {name for node in named.node for name in node.output} - {each.name for each in named.output}
        assert max(map(len, inner)) <= 3
    assert Encoder(model).graph.precision == "int8"
    assert {graph["precision"] for graph in json.loads((model / "encoder.json").read_text())["graphs"]} >= {
        "float32",
        "int8",
    }


def test_openvinos_int8_is_rejected_if_it_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(BadInput, match="use --to onnx"):
        export_model(str(model), to="openvino", precision="int8", options=ExportOptions(calibrate=TEXTS))
    assert not (model / "openvino").exists()


def test_int8_that_loses_too_much_is_rejected_and_leaves_nothing(model: Path) -> None:
    before = listing(model)
    with pytest.raises(BadModel, match="loses too much on these texts"):
        export_model(
            str(model),
            to="onnx",
            precision="int8",
            options=ExportOptions(calibrate=TEXTS, limits=Limits(cosine=1e-9)),
        )
    assert listing(model) == before


@pytest.mark.parametrize(
    ("overflows", "asked", "bits"), [(True, None, 7), (False, None, 8), (True, False, 8), (False, True, 7)]
)
def test_int8_has_the_bits_that_this_processor_can_add_up(
    overflows: bool, asked: bool | None, bits: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trundle.export.quantise._int8_overflows", lambda: overflows)
    options = ExportOptions(calibrate=TEXTS, limits=ANY, older_cpus=asked)
    made = export_model(str(model), to="onnx", precision="int8", options=options)
    assert made.graph.facts["bits of a weight"] == bits


def test_matmuls_that_lose_too_much_stay_in_float(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One neuron is scaled up and its readers down: the same vectors, but int8 loses much in one matmul."""
    # Otherwise this outlier costs nothing.
    monkeypatch.setattr(int8, "_SHIFTS", (0.0,))
    monkeypatch.setattr(int8, "_OUTLIERS", 0)
    opened = SentenceTransformer(str(model), device="cpu")
    block = opened[0].model.encoder.layer[1]
    with torch.no_grad():
        block.intermediate.dense.bias[3] += 4000
        block.output.dense.weight[:, 3] /= 4000
    opened.save_pretrained(str(model))
    whole_int8 = export_model(
        str(model), to="onnx", precision="int8", options=ExportOptions(calibrate=TEXTS, limits=ANY)
    )
    assert whole_int8.graph.facts["matmuls in float"] == []
    less = Limits(cosine=0.7 * (1 - whole_int8.closeness.mean_cosine), agreement=1)
    made = export_model(
        str(model),
        to="onnx",
        precision="int8",
        options=ExportOptions(calibrate=TEXTS, limits=less),
        force=True,
    )
    assert 1 - made.closeness.mean_cosine <= less.cosine
    assert "layer.1/output/dense" in made.graph.facts["matmuls in float"][0]
    assert len(made.graph.facts["matmuls in float"]) < 6


def test_weights_too_large_for_one_file_are_stored_next_to_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_LARGEST_IN_ONE_FILE", 1000)
    wanted = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    export_model(str(model), to="onnx")
    assert {file.name for file in (model / "onnx").iterdir()} == {"model.onnx", "model.onnx_data"}
    assert (model / "onnx" / "model.onnx_data").stat().st_size > (
        model / "onnx" / "model.onnx"
    ).stat().st_size
    np.testing.assert_allclose(Encoder(model).encode(TEXTS), wanted, atol=1e-5)
    export_model(str(model), to="onnx", precision="int8", options=ExportOptions(calibrate=TEXTS, limits=WIDE))
    assert cosines(Encoder(model, graph="int8").encode(TEXTS), wanted).min() > 0.97


def test_a_graph_of_two_gigabytes_is_not_asked_for_its_size(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protobuf raises for such a message; a message that large would take the tests 10 GB."""

    def too_large(_self: onnx.ModelProto) -> int:
        raise ValueError("message too large")

    monkeypatch.setattr(onnx.ModelProto, "ByteSize", too_large)
    export_model(str(model), to="onnx", precision="float16")


def changed_weights(model: Path) -> SentenceTransformer:
    opened = SentenceTransformer(str(model), device="cpu")
    with torch.no_grad():
        for weight in opened.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    opened.save_pretrained(str(model), create_model_card=False)
    return opened


def test_graphs_of_other_weights_are_not_run(model: Path, tmp_path: Path) -> None:
    export_model(str(model), to="onnx")
    export_model(str(model), to="onnx", precision="float16")
    (model / "onnx" / "notes").mkdir()
    (model / "onnx" / "notes" / "mine.txt").write_text("precious")
    moved = Path(shutil.copytree(model, tmp_path / "moved", copy_function=shutil.copy))  # the times differ
    assert Encoder(moved).encode(TEXTS).shape == (len(TEXTS), 32)
    wanted = changed_weights(model).encode(TEXTS)
    with pytest.raises(BadModel, match=r"weights .* have changed .*--force"):
        Encoder(model)
    export_model(str(model), to="onnx", force=True)
    assert [each.path for each in read_description(model).graphs] == ["onnx/model.onnx"]
    assert cosines(Encoder(model).encode(TEXTS), wanted).min() > 0.99999
    assert listing(model / "onnx") == ["model.onnx", "notes", "notes/mine.txt"]


def test_a_graph_of_an_older_revision_is_not_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revisions = [Path(shutil.copytree(model, model.parent / name)) for name in ("first", "second")]
    changed_weights(revisions[1])
    for revision in (*revisions, revisions[0]):
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, at=revision, **__: str(at))
        wanted = SentenceTransformer(str(revision), device="cpu").encode(TEXTS)
        assert cosines(open_encoder("someone/model").encode(TEXTS), wanted).min() > 0.99999


def test_a_disk_without_hard_links_keeps_other_graphs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_paths: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    export_model(str(model), to="onnx")
    export_model(str(model), to="onnx", precision="float16")
    assert len(listing(model / "onnx")) == 2


def test_a_graph_that_does_not_run_by_default_says_so(model: Path) -> None:
    progress = RecordedProgress()
    export_model(str(model), to="onnx", precision="float16", progress=progress)
    assert not any("by default" in line for line in progress.lines)
    export_model(str(model), to="onnx", progress=progress)
    assert any("graph='onnx-float32'" in line for line in progress.lines)
    assert Encoder(model).graph.precision == "float16"
    assert Encoder(model, graph="onnx-float32").graph.precision == "float32"


@pytest.mark.parametrize("again", [False, True])
def test_a_kill_while_the_graph_is_put_in_place(
    model: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Neither the folder of graphs nor its description may stand for the other one's model."""

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    if again:
        export_model(str(model), to="onnx")
        changed_weights(model)
    for moment in ("swap_folders", "write_atomic"):
        with monkeypatch.context() as patched:
            patched.setattr(exporting, moment, killed)
            with pytest.raises(Killed):
                export_model(str(model), to="onnx", force=again)
        if again:
            with pytest.raises(BadModel):
                Encoder(model)
        else:
            assert not is_exported(model)
    export_model(str(model), to="onnx", force=again)
    wanted = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    assert cosines(Encoder(model).encode(TEXTS), wanted).min() > 0.99999


def test_a_model_is_not_replaced_by_its_own_graph(model: Path) -> None:
    before = listing(model)
    with pytest.raises(BadInput, match="is an input of this command"):
        export_model(str(model), to="onnx", output=model, force=True)
    assert listing(model) == before


def test_both_tracers_agree_and_the_faster_is_kept(tmp_path: Path) -> None:
    shallow = pico.model("bert", str(tmp_path / "backbone"), num_hidden_layers=1)
    shallow.save_pretrained(str(tmp_path / "model"))
    made = export_model(str(tmp_path / "model"), to="onnx", options=ExportOptions(try_both=True))
    assert made.graph.facts["tracer"] in {"torchscript", "dynamo"}
    assert made.graph.facts["dynamo / torchscript, seconds"] > 0
    assert made.closeness.largest_difference < 1e-5


def test_a_tokenizer_changed_on_loading_is_saved_with_the_graph(model: Path) -> None:
    settings_file = model / "sentence_bert_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"do_lower_case": True}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    export_model(str(model), to="onnx")
    shouted = [text.upper() for text in TEXTS[:7]]
    wanted = SentenceTransformer(str(model), device="cpu").encode(shouted)
    np.testing.assert_allclose(Encoder(model).encode(shouted), wanted, atol=1e-5)


def test_existing_graphs_are_not_replaced_without_force(model: Path, tmp_path: Path) -> None:
    export_model(str(model), to="onnx")
    with pytest.raises(BadInput, match="pass --force"):
        export_model(str(model), to="onnx")
    export_model(str(model), to="onnx", force=True)
    with pytest.raises(BadInput, match="-o FOLDER"):
        export_model("some/hub-name", to="onnx")
    with pytest.raises(BadInput, match="--data"):
        export_model(str(model), to="onnx", precision="int8")
    with pytest.raises(BadInput, match="too few"):
        export_model(str(model), to="onnx", precision="int8", options=ExportOptions(calibrate=["one", "two"]))


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4), min_size=1, max_size=20))
def test_int8_rows_are_exact_to_half_a_step(rows: list[list[float]]) -> None:
    table = np.array(rows, dtype=np.float32)
    small, scales = _rows_in_int8(table)
    assert np.all(np.abs(small * scales - table) <= scales * 0.501 + 1e-12)


def test_neighbours() -> None:
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    assert _neighbour_agreement(vectors, 3 * vectors) == 1
    assert _neighbour_agreement(vectors, vectors[::-1].copy()) < 0.5


@given(st.integers(0, 300))
def test_each_try_keeps_more_in_float_but_at_most_half(count: int) -> None:
    names = [str(number) for number in range(count)]
    tries = _tries(names)
    assert tries[0] == []
    assert [len(each) for each in tries] == sorted({len(each) for each in tries})
    assert all(each == names[: len(each)] and len(each) <= count / 2 for each in tries)


@given(st.integers(1, 500), st.integers(1, 200))
def test_a_spread_reaches_from_first_to_last(length: int, count: int) -> None:
    chosen = _spread(range(length), count)
    assert chosen[0] == 0
    assert len(chosen) <= count
    assert length - chosen[-1] <= max(1, -(-length // count))


@pytest.mark.parametrize("precision", ["int8", "int4+int8"])
def test_a_channel_with_outliers_does_not_cost_the_others_their_precision(
    precision: Precision, tmp_path: Path
) -> None:
    model = pico.model(
        "bert", str(tmp_path / "backbone"), hidden_size=64, intermediate_size=128, num_hidden_layers=2
    )
    with torch.no_grad():
        for layer in model[0].model.encoder.layer:
            layer.intermediate.dense.bias[5] = 300.0
            layer.output.dense.weight[:, 5] *= 0.01
    put_on_grid(grid_weights(model))
    model.save_pretrained(str(tmp_path / "model"))
    exported = export_model(
        str(tmp_path / "model"),
        to="onnx",
        precision=precision,
        options=ExportOptions(calibrate=TEXTS, limits=ANY),
    )
    assert exported.closeness.mean_cosine > 0.998


@pytest.mark.parametrize("precision", ["int8", "int4+int8"])
def test_a_token_with_outliers_does_not_cost_the_others_their_precision(
    precision: Precision, tmp_path: Path
) -> None:
    """A decoder whose first token is hundreds of times as large as the others in the middle of each MLP."""
    model = pico.model("llama", str(tmp_path / "backbone"), hidden_size=64, intermediate_size=128)
    backbone = model[0].model
    first = model.preprocess(TEXTS)["input_ids"][:, 0].unique()
    with torch.no_grad():
        backbone.embed_tokens.weight[:, 7] = 0
        backbone.embed_tokens.weight[first, 7] = 8 * backbone.embed_tokens.weight.std()
        for layer in backbone.layers:
            layer.mlp.down_proj.weight *= 300  # so that the small values of the other tokens matter
            layer.mlp.down_proj.weight[7] = 0  # this channel only tells which token is large
            layer.self_attn.o_proj.weight[7] = 0
            for matrix in (layer.mlp.gate_proj, layer.mlp.up_proj):
                matrix.weight[:, 7] = 20 * matrix.weight.std()
    put_on_grid(grid_weights(model))
    model.save_pretrained(str(tmp_path / "model"))
    exported = export_model(
        str(tmp_path / "model"),
        to="onnx",
        precision=precision,
        options=ExportOptions(calibrate=TEXTS, limits=ANY),
    )
    assert exported.closeness.mean_cosine > 0.997

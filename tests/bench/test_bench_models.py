"""A complete benchmark of a tiny model and of a graph, and of a folder that is no model."""

from __future__ import annotations

import json
import runpy
import string
import subprocess
import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizer

from trundle.bench import rounds
from trundle.bench.child import _WEIGHT_FILES, _engines_of, _load_torch
from trundle.bench.rounds import BenchOptions, _BenchedModel, _Worker, bench
from trundle.bench.workload import _TABLE, BenchResult, _BenchSettings, caution, rows, short_names
from trundle.errors import BadInput, BadModel
from trundle.export.exporting import export_model
from trundle.precision import FORMATS, graph_format

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "a", "in", "old", "new", "house", "river", "school", "changes", "brings", ".", ",", "?"]
LETTERS = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]


def make_model(folder: Path, layers: int) -> str:
    """A BERT too small to be good for anything, in the standard layout."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + WORDS + LETTERS)}
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    bare = folder / "bare"
    BertModel(config).save_pretrained(bare)
    BertTokenizer(vocab=vocabulary).save_pretrained(bare)
    model = SentenceTransformer(
        modules=[Transformer(str(bare)), Pooling(32, "mean"), Normalize()], device="cpu"
    )
    saved = folder / f"{layers}-layers"
    model.save_pretrained(str(saved))
    return str(saved)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model for torch, and a smaller one that is exported: its worker starts without torch."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    export_model(make_model(folder / "b", 1), to="onnx", output=folder / "small")
    return [make_model(folder / "a", 2), str(folder / "small")]


@pytest.fixture(scope="module")
def result(models: list[str]) -> BenchResult:
    """Without what keeps the benchmark fair, pauses and new processes: no test here compares speeds."""
    kept: dict[str, _Worker] = {}

    def worker(entry: _BenchedModel, how: _BenchSettings) -> AbstractContextManager[_Worker]:
        if entry.engine in kept:
            return kept[entry.engine]
        return nullcontext(kept.setdefault(entry.engine, start(entry, how)))

    start = rounds._worker
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds, "_PAUSE", 0.0)
        patched.setattr(rounds, "_worker", worker)
        options = BenchOptions(rounds=2, seconds=0.05, batch_size=8, threads=1)
        return bench(models, options=options, all_engines=True)


def test_sizes_are_those_of_the_models(models: list[str], result: BenchResult) -> None:
    sources = [models[0], str(Path(models[1]).parent / "b" / "1-layers")]
    files = ["model.safetensors", graph_format("onnx", "float32").file]
    for folder, source, file, figures in zip(models, sources, files, result.models, strict=True):
        model = SentenceTransformer(source, device="cpu")
        assert figures.model == folder
        assert figures.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert figures.dimensions == model.get_embedding_dimension()
        assert figures.max_tokens == model.max_seq_length
        assert figures.weights_bytes == (Path(folder) / file).stat().st_size
        assert figures.folder_bytes == sum(
            file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()
        )


def test_an_exported_folder_is_benched_by_its_graphs(models: list[str], result: BenchResult) -> None:
    assert [_engines_of(model) for model in models] == [["torch"], ["onnx-float32"]]
    assert [figures.engine for figures in result.models] == ["torch", "onnx-float32"]


def test_every_graph_that_can_be_exported_can_be_benched() -> None:
    for row in FORMATS:
        assert fnmatch(row.file, _WEIGHT_FILES[row.name])


def test_every_measure_has_its_rounds(result: BenchResult) -> None:
    for figures in result.models:
        for measured in (
            figures.short_texts_per_second,
            figures.long_texts_per_second,
            figures.short_latency_p50,
            figures.long_latency_p50,
        ):
            assert len(measured.rounds) == 2
            assert min(measured.rounds) > 0
        for p50, p95 in (
            (figures.short_latency_p50, figures.short_latency_p95),
            (figures.long_latency_p50, figures.long_latency_p95),
        ):
            assert all(low <= high for low, high in zip(p50.rounds, p95.rounds, strict=True))
        assert figures.start_seconds.value > figures.load_seconds.value > 0
        assert figures.peak_memory_bytes > figures.own_memory_bytes > figures.bare_memory_bytes > 0


def test_the_result_is_json_with_what_is_needed_to_repeat_it(result: BenchResult) -> None:
    stored = json.loads(json.dumps(result.as_dict()))
    first, second = stored["models"]
    assert set(first["ratios_to_first"].values()) == {1.0}
    assert second["ratios_to_first"]["parameters"] == second["parameters"] / first["parameters"]
    assert second["ratios_to_first"]["long texts/s"] == pytest.approx(
        second["long_texts_per_second"]["value"] / first["long_texts_per_second"]["value"]
    )
    assert stored["settings"]["threads"] == 1
    assert stored["settings"]["batch_size"] == 8
    assert len(stored["settings"]["texts_fingerprint"]) == 64
    assert stored["machine"]["cpu"]
    assert stored["machine"]["memory_bytes"] > 1e8
    assert {"python", "torch", "sentence-transformers"} <= set(stored["versions"])


def test_the_table_has_a_column_per_model(result: BenchResult) -> None:
    heading, *lines = rows(result)
    assert heading == ("", "2-layers", "small onnx-float32")
    assert [line[0] for line in lines] == list(_TABLE)
    assert {len(line) for line in lines} == {3}
    parameters = lines[0]
    assert parameters[1] == f"{result.models[0].parameters / 1e6:.2f} M"
    assert parameters[2].endswith(f"({result.models[1].parameters / result.models[0].parameters:.2f}×)")


def test_unknown_figures_are_left_empty(result: BenchResult) -> None:
    unknown = replace(result, models=(result.models[0], replace(result.models[1], weights_bytes=None)))
    assert rows(unknown)[2][2] == "–"


def test_a_warning_if_other_programs_use_the_cores(result: BenchResult) -> None:
    machine = replace(result.machine, cores=4)
    assert caution(replace(result, machine=machine, other_cores=2.9)) is None
    assert caution(replace(result, machine=machine, other_cores=None)) is None
    assert "3.5 of 4 cores" in str(caution(replace(result, machine=machine, other_cores=3.5)))


def test_names_are_short_unless_ambiguous() -> None:
    assert short_names(["a/small", "b/small", "c/large"]) == ["a/small", "b/small", "large"]
    assert short_names(["/a/x/model", "/a/y/model", "/b/z"]) == ["x/model", "y/model", "z"]
    assert short_names(["/a/x", "/a/x"]) == ["x", "x (2)"]


def test_a_folder_that_is_no_model_is_rejected(tmp_path: Path) -> None:
    """What a worker does with such an error is tested with the other errors of workers."""
    with pytest.raises(BadModel, match="pass a model folder"):
        _load_torch(str(tmp_path), threads=1, batch_size=1)


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"seconds": float("nan")}, {"threads": -1}, {"timeout": float("inf")}]
)
def test_invalid_numbers_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="pass a number above zero"):
        bench(["unused"], options=BenchOptions(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("multiplies", [False, True])
def test_bfloat16_is_left_out_where_it_is_emulated(
    multiplies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In benchmarks/runtime.py: torch would emulate it, a hundred times slower."""
    path = Path(__file__).parents[2] / "benchmarks" / "runtime.py"
    monkeypatch.syspath_prepend(str(path.parent))
    runtime, raced = SimpleNamespace(**runpy.run_path(str(path))), list[str]()
    stubs = {
        "multiplies_bf16": lambda _device: multiplies,
        "prepare": lambda *_: ["onnx-int8"],
        "race": lambda names, *_: raced.extend(names),
        "show": lambda *_: None,
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(runtime.engines.__globals__, name, stub)
    runtime.engines(Namespace(work=tmp_path, models=["m"], calibrate=[], rounds=1, tasks=None, threads=1))
    assert {"sentence-transformers float32", "trundle onnx-int8"} <= set(raced)
    assert ("sentence-transformers bfloat16" in raced) is multiplies


def test_the_parent_process_does_not_import_torch() -> None:
    script = (
        "import sys\nfrom trundle.bench.rounds import bench\nfrom trundle.errors import BadInput\n"
        "try:\n    bench([])\nexcept BadInput as error:\n    print(error)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "there is no model to bench; pass at least one folder or hub name\n[]\n"

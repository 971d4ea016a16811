"""What is read from a folder, and the errors for one that can't be read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from trundle.errors import BadInput
from trundle.evaluate.fidelity import Fidelity
from trundle.methods.vocabulary import _read_ranges, _write_ranges
from trundle.pipeline.compress import _headline
from trundle.records import PLANNING_FILE, Lineage, TrainingRecord, read_planning, read_training_log
from trundle.report.reading import (
    _count_ids,
    _read_runs,
    _read_training,
    _stored_quality,
    _teacher_of,
    _thinned,
    _weigh,
)
from trundle.report.report import check_output, make_report


def test_a_run_describes_its_steps(run_folder: Path) -> None:
    (run,) = _read_runs([run_folder])
    assert [step.step for step in run.steps] == ["vocabulary", "depth", "align"]
    assert run.coverage is not None
    assert run.coverage.kept == 120
    assert run.layer_losses is not None
    assert len(run.layer_losses.losses) == 4
    assert run.layer_losses.kept == run.layers
    assert run.trainings[0].step == "align"
    assert run.trainings[0].validation
    assert run.planning is not None
    assert [len(one.rungs) for one in run.planning.candidates] == [2, 1, 0]
    assert sum(one.kept for one in run.pruned) == 2 * 30 + 2 * 50
    assert run.alignment is not None
    assert sum(run.alignment.counts) == sum(one.weights for one in run.pruned)
    assert run.form.bytes == sum(file.stat().st_size for file in run_folder.rglob("*.safetensors"))


def test_the_size_of_weights_is_read_without_loading_the_model(
    pico_folders: Callable[[str], Path], pico_model: Callable[[str], SentenceTransformer]
) -> None:
    folder = pico_folders("bert")
    size, parameters = _weigh(folder)
    assert parameters == sum(weight.numel() for weight in pico_model("bert").parameters())
    assert size == sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def test_the_records_of_compress_are_read_back() -> None:
    near = Fidelity(
        student="s",
        teacher="a/b, own index",
        queries=1,
        documents=20,
        cosine=0.9,
        distance=0.4,
        k=7,
        agreement_asymmetric=0.8,
        agreement_standard=0.6,
        closest=(),
        farthest=(),
    )
    kept = _stored_quality(_headline(near))
    assert kept is not None
    assert (kept.k, kept.cosine, kept.distance) == (7, 0.9, 0.4)
    assert (kept.agreement_asymmetric, kept.agreement_standard) == (0.8, 0.6)
    assert _stored_quality({"something else": 1.0}) is None


def test_the_vector_space_of_a_model() -> None:
    aligned = {
        "source": "cut",
        "space": "teacher",
        "parent": {"source": "big", "space": None, "parent": None},
    }
    assert _teacher_of(aligned) == "teacher"
    assert _teacher_of({"source": "small", "space": None, "parent": aligned}) == "teacher"
    assert _teacher_of({"source": "big", "space": "the original", "parent": None}) == "big"
    assert _teacher_of({"source": "big", "space": None, "parent": None}) == "big"


def test_a_model_made_in_stages_stays_in_the_space_of_its_source() -> None:
    """Also where that source was made of another model."""
    large = Lineage(source="largest", space="the original")
    stage = Lineage(source="large", space="the original", parent=asdict(large))
    whole = Lineage(source="stage", space="large", parent=asdict(stage)).after_parent()
    assert _teacher_of(asdict(whole)) == "large"


def test_candidates_of_two_models_have_different_names(tmp_path: Path) -> None:
    nothing = {"bytes": 1, "parameters": None, "milliseconds": None}
    one = {"name": "6 layers", "parameters": 1, "bytes": 1, "milliseconds": None, "rungs": []}
    content = {
        "budget": nothing,
        "teacher": nothing,
        "candidates": [
            one | {"base": "models/large", "outcome": "not tried"},
            one | {"base": "models/small", "outcome": "chosen"},
        ],
        "chosen": "6 layers",
        "predicted": nothing,
        "measured": nothing,
    }
    (tmp_path / PLANNING_FILE).write_text(json.dumps(content))
    plan = read_planning(tmp_path)
    assert plan is not None
    assert [each.name for each in plan.candidates] == ["6 layers, of large", "6 layers, of small"]
    assert plan.chosen == "6 layers, of small"


@given(st.sets(st.integers(0, 500)))
def test_token_ids_are_counted_as_the_method_writes_them(ids: set[int]) -> None:
    written = _write_ranges(tuple(sorted(ids)))
    assert _count_ids(written) == len(ids)
    assert _read_ranges(written) == tuple(sorted(ids))


@given(st.lists(st.integers(), min_size=1), st.integers(2, 50))
def test_thinning_keeps_both_ends(values: list[int], most: int) -> None:
    left = _thinned(values, most)
    assert len(left) == min(len(values), most)
    assert (left[0], left[-1]) == (values[0], values[-1])


def test_folders_that_are_no_runs(
    tmp_path: Path, pico_folders: Callable[[str], Path], another_run: Path
) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        _read_runs([tmp_path / "nowhere"])
    with pytest.raises(BadInput, match=r"has no trundle\.json"):
        _read_runs([pico_folders("bert")])
    with pytest.raises(BadInput, match="at least one folder"):
        _read_runs([])
    lineage = json.loads((another_run / "trundle.json").read_text())
    (another_run / "trundle.json").write_text(json.dumps(lineage | {"format": 99}))
    with pytest.raises(BadInput, match="another version"):
        _read_runs([another_run])
    (another_run / "trundle.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(BadInput, match="can't be read as a run"):
        _read_runs([another_run])


def test_measures_of_a_validation_are_curves(another_run: Path) -> None:
    records = [
        TrainingRecord(step=0, validation=0.9, measures={"agreement@10": 0.25}),
        TrainingRecord(step=4, epoch=0.5, loss=0.7, lr=1e-4, seconds=1.0),
        TrainingRecord(step=8, loss=0.6, validation=0.5, measures={"agreement@10": 0.5}),
    ]
    (another_run / "align.jsonl").write_text("".join(record.as_line() for record in records))
    assert read_training_log(another_run, "align") == tuple(records)
    (training,) = _read_runs([another_run])[0].trainings
    assert training.loss == ((4, 0.7), (8, 0.6))
    assert training.validation == ((0, 0.9), (8, 0.5))
    assert training.watched == {"agreement@10": ((0, 0.25), (8, 0.5))}


def test_damaged_files_are_named(another_run: Path) -> None:
    (another_run / "align.jsonl").write_text("{")
    with pytest.raises(BadInput, match=r"align\.jsonl is damaged"):
        _read_training(another_run, "align")
    (another_run / "align.jsonl").unlink()
    (another_run / "planning.json").write_text("[]")
    with pytest.raises(BadInput, match=r"planning\.json is damaged"):
        _read_runs([another_run])
    (another_run / "trundle.json").write_text("[" * 100_000)
    with pytest.raises(BadInput, match=r"trundle\.json is damaged"):
        _read_runs([another_run])


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), bytes(8)])
def test_damaged_weights_are_named(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(BadInput, match=r"model\.safetensors is truncated or damaged"):
        _weigh(tmp_path)


def test_missing_teachers(run_folder: Path, another_run: Path, texts_file: Path) -> None:
    lineage = json.loads((another_run / "trundle.json").read_text())
    (another_run / "trundle.json").write_text(json.dumps(lineage | {"source": "/gone/model"}))
    with pytest.raises(BadInput, match="different teachers"):
        make_report([run_folder, another_run], data=[str(texts_file)])
    with pytest.raises(BadInput, match="there is no folder for the teacher"):
        make_report([another_run], data=[str(texts_file)])
    assert make_report([run_folder, another_run]).teacher is None


def test_output_paths_of_a_page(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"end it in \.html"):
        check_output(tmp_path / "report.pdf")
    with pytest.raises(BadInput, match="can't be written"):
        check_output(tmp_path / "nowhere" / "report.html")


def test_stored_records_are_drawn_without_torch(run_folder: Path, tmp_path: Path) -> None:
    """A report of stored records must not wait for the import of torch."""
    lines = (
        "import sys; from trundle.report.report import make_report, write_report; "
        f"write_report(make_report([{str(run_folder)!r}]), {str(tmp_path / 'r.html')!r}); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", lines], check=True)
    assert (tmp_path / "r.json").is_file()

"""Reports that load the models: the same figures as evaluate, and graphs instead of torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from trundle.bench.workload import BenchResult, _BenchSettings, _ModelFigures, _of_rounds, this_machine
from trundle.errors import BadInput
from trundle.evaluate.comparison import compare
from trundle.evaluate.scoring import find_tasks
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.report.contents import _Report
from trundle.report.page import _headline, _notes, _page, _summary
from trundle.report.reading import _read_runs
from trundle.report.report import _find_tasks_in, make_report


def test_tasks_are_scored_as_evaluate_scores_them(run_folder: Path, tasks_folder: Path) -> None:
    report = make_report([run_folder], tasks=[str(tasks_folder)], speed=False)
    (run,) = report.runs
    scores = {one.task: one for one in report.of(run).tasks}
    teacher = embedder(load(run.teacher), name="teacher")
    found = compare(
        [embedder(load(run.folder), name="run")], teacher=teacher, tasks=find_tasks(["all"], tasks_folder)
    )
    for result in found.results[1]:
        shown = scores[result.task]
        assert result.score == (shown.standard if result.mode == "standard" else shown.asymmetric)
    assert scores["alike"].asymmetric is None
    quality = report.quality(run)
    assert quality is not None
    assert quality.share_standard == next(share.share for share in found.shares if share.mode == "standard")
    html = _page(report)
    assert "Labelled tasks" in html
    assert 'id="searches"' not in html


def test_a_task_may_be_named_by_its_own_path(tasks_folder: Path) -> None:
    assert [task.name for task in _find_tasks_in([str(tasks_folder / "sts" / "alike.parquet")])] == ["alike"]
    assert {task.name for task in _find_tasks_in([str(tasks_folder)])} == {"alike", "find"}
    with pytest.raises(BadInput, match="is not a path to a task"):
        _find_tasks_in([str(tasks_folder / "nothing")])


def test_what_is_shown_is_what_was_measured(full_report: _Report) -> None:
    for run in full_report.runs:
        found = full_report.of(run)
        assert found.quality is not None
        assert "queries" in found.quality.measured
        assert [len(search.student.documents) for search in found.searches] == [10] * len(found.searches)
        assert {row.precision for row in found.shortened[0].rows} == {"float32", "int8", "binary"}
        whole = found.shortened[0].rows[0]
        assert whole.scores["teacher"] == 1
        assert whole.scores["asymmetric"] == pytest.approx(found.quality.agreement_asymmetric)
        assert found.farthest[0].distance >= found.nearest[-1].distance
    assert full_report.tokens is not None
    shares = [share for _, share in full_report.tokens.points]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_too_few_texts_are_rejected(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    with pytest.raises(BadInput, match="too few"):
        make_report([run_folder], data=[str(tmp_path / "few.txt")], speed=False)


def test_an_exported_graph_is_what_is_measured(run_folder: Path, texts_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra export")
    pytest.importorskip("onnx", reason="needs the extra export")
    from trundle.export.exporting import export_model

    folder = tmp_path / "exported"
    shutil.copytree(run_folder, folder)
    export_model(str(folder), to="onnx")
    run, plain = _read_runs([folder, run_folder])
    assert (plain.form.engine, run.form.engine) == ("torch", "onnx-float32")
    assert [form.engine for form in run.forms] == ["torch", "onnx-float32"]
    assert run.form.bytes == sum(file.stat().st_size for file in (folder / "onnx").iterdir())
    report = make_report([folder, run_folder], data=[str(texts_file)], speed=False)
    graph, torch = (report.of(one).quality for one in report.runs)
    assert graph is not None
    assert torch is not None
    assert graph.cosine == pytest.approx(torch.cosine, abs=1e-4)
    html = _page(report)
    assert "trundle import Encoder" in html
    assert "onnx-float32" in html


def figures(model: str, latency: float) -> _ModelFigures:
    once = _of_rounds([latency])
    measured = {field.name: once for field in fields(_ModelFigures) if field.type == "_Measurement"}
    counted = {field.name: 1 for field in fields(_ModelFigures) if "int" in str(field.type)}
    return _ModelFigures(model=model, engine="torch", device="cpu", **measured, **counted)  # type: ignore[arg-type]


def test_a_finished_speed_measurement_is_not_repeated(
    bare_folder: Path, pico_folders: Callable[[str], Path], texts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = str(pico_folders("bert"))
    raced = BenchResult(
        models=(figures(teacher, 0.004), figures(str(bare_folder), 0.002)),
        settings=_BenchSettings(**{field.name: 1 for field in fields(_BenchSettings)}),  # type: ignore[arg-type]
        machine=this_machine(),
        other_cores=0.0,
        versions={},
    )
    monkeypatch.setattr("trundle.report.report.bench", None)
    report = make_report([bare_folder], data=[str(texts_file)], speed=raced)
    found = {one.model: 1e3 * one.short_latency_p50.value for one in raced.models}
    assert report.teacher is not None
    assert report.teacher.speed is not None
    assert report.teacher.speed.milliseconds == pytest.approx(found[teacher], abs=1e-3)
    speed = report.of(report.runs[0]).speed
    assert speed is not None
    assert speed.milliseconds == pytest.approx(found[str(bare_folder)], abs=1e-3)
    assert "2.00×" in _headline(report)
    assert "busy" not in _headline(report) + _notes(report)
    disturbed = make_report([bare_folder], data=[str(texts_file)], speed=replace(raced, other_cores=99.0))
    assert "faster queries on busy cores" in _headline(disturbed)
    assert "× faster on busy cores" in _summary(disturbed)
    assert "other programs kept 99.0 of" in _notes(disturbed)

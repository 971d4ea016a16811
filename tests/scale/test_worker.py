"""The work of a cluster in one process: ranges in any order, interrupted workers, and errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trundle.errors import BadInput, BadModel
from trundle.folders import absolute_name
from trundle.scale import shard_writer
from trundle.scale.shard_plan import _list_parts, _ShardPlanner, _ShardRange, _split_ranges
from trundle.scale.shard_writer import (
    _MAX_FAILURES,
    TeacherSpec,
    _check_range,
    _hash_texts,
    _reset_failures,
    _ShardWriter,
    _WorkerSettings,
    build_local,
)
from trundle.teacher.labelling import start_or_resume
from trundle.teacher.shards import Manifest, read_record, recorded
from trundle.teacher.targets import open_targets

SHARD = 50
pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture
def work(tables: Path, tmp_path: Path) -> list[tuple[_ShardRange, bytes]]:
    pieces = _list_parts([str(tables)])
    assert len(pieces) > 6
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    survey = _ShardPlanner(scratch, parts=len(pieces), rows=0)
    for number, piece in enumerate(pieces):
        survey.add(number, *_hash_texts(piece))
    repeats = survey.duplicates()
    cuts = list(survey.shard_ends(repeats, SHARD))
    return list(_split_ranges(pieces, survey.starts, cuts, repeats, 3))


@pytest.fixture
def job(graph: Path, tmp_path: Path) -> _WorkerSettings:
    """A store that is begun."""
    from trundle.scale.shard_writer import _open_teacher

    asked = TeacherSpec(model=str(graph), runtime=True, threads=1)
    teacher = _open_teacher(asked)
    prompts = teacher.used_prompts
    wanted = Manifest(teacher=teacher.identity(), prompts=prompts, dtype="float16", shard_size=SHARD)
    start_or_resume(tmp_path / "store", wanted)
    return _WorkerSettings(
        teacher=asked, identity=teacher.identity(), folder=str(tmp_path / "store"), dtype="float16"
    )


def test_any_order_makes_the_store_of_one_process(
    work: list[tuple[_ShardRange, bytes]], job: _WorkerSettings, tables: Path, tmp_path: Path
) -> None:
    one = build_local([str(tables)], job.teacher, tmp_path / "one", shard_size=SHARD)
    store, writer = Path(job.folder), _ShardWriter(job)
    answers = [writer.write(*stretch).checked() for stretch in reversed(work)]
    assert sum(answer.labelled for answer in answers) == len(one)
    assert sum(answer.texts for answer in answers) == len(one) + one.manifest.repeats
    assert recorded(store) == list(range(len(one.manifest.shards)))
    for number, shard in enumerate(one.manifest.shards):
        record = read_record(store, number)
        assert record is not None
        assert record.shard == shard

    damaged = store / "00004.vectors.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    again = [_ShardWriter(job).write(*stretch).checked().labelled for stretch in work]
    assert sum(again) == one.manifest.shards[4].count, "only what is damaged is made again"
    taken_up = build_local([str(tables)], job.teacher, store, shard_size=SHARD)
    assert taken_up.manifest == one.manifest
    assert sorted(path.name for path in store.iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    ), "records are gone when the manifest stands"


def test_one_process_resumes_what_workers_finished(
    work: list[tuple[_ShardRange, bytes]], job: _WorkerSettings, tables: Path, tmp_path: Path
) -> None:
    _ShardWriter(job).write(*work[0]).checked()
    finished = {path: path.stat().st_mtime_ns for path in Path(job.folder).glob("*.vectors.npy")}
    assert len(finished) == 3
    build_local([str(tables)], job.teacher, job.folder, shard_size=SHARD)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(open_targets(job.folder)) > 3 * SHARD


def test_other_texts_in_a_finished_shard_are_rejected(
    work: list[tuple[_ShardRange, bytes]], job: _WorkerSettings
) -> None:
    _ShardWriter(job).write(*work[0]).checked()
    moved = work[1][0].model_copy(update={"first": 0})
    with pytest.raises(BadInput, match="was made from other texts"):
        _ShardWriter(job).write(moved, work[1][1]).checked()
    with pytest.raises(BadInput, match="was made from other texts"):
        _check_range(Path(job.folder), moved, work[1][1]).checked()
    for stretch in work[:2]:
        _check_range(Path(job.folder), *stretch).checked()


def test_a_worker_with_a_wrong_or_missing_model_gives_one_sentence(
    work: list[tuple[_ShardRange, bytes]],
    job: _WorkerSettings,
    graph: Path,
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    absent = TeacherSpec(model=str(tmp_path / "gone"), runtime=True)
    other = tmp_path / "other"
    shutil.copytree(graph, other)
    description = other / "encoder.json"
    description.write_text(description.read_text().replace("how do I ", "what is "))
    broken = tmp_path / "broken"
    shutil.copytree(graph, broken)
    (broken / "onnx" / "model.onnx").write_bytes(b"no graph")
    for changed, error, says in (
        (job.model_copy(update={"teacher": absent}), BadModel, "can't open .*gone: there is no folder"),
        (
            job.model_copy(update={"teacher": TeacherSpec(model=str(broken), runtime=True)}),
            BadModel,
            "can't open",
        ),
        (job.model_copy(update={"folder": str(tmp_path)}), BadInput, "on a disk that all nodes share"),
        (
            job.model_copy(update={"teacher": TeacherSpec(model=str(other), runtime=True)}),
            BadModel,
            "holds another model",
        ),
    ):
        with pytest.raises(error, match=says) as caught:
            _ShardWriter(changed).write(*work[0]).checked()
        assert str(caught.value).startswith("a worker on ")
        assert "\n" not in str(caught.value)


def test_a_stretch_that_kills_its_workers_is_not_retried_forever(
    work: list[tuple[_ShardRange, bytes]], job: _WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    writer = _ShardWriter(job)
    with monkeypatch.context() as patch:
        patch.setattr(shard_writer, "encode_by_role", die)
        for _ in range(_MAX_FAILURES):
            with pytest.raises(Killed):
                writer.write(*work[0])
    with pytest.raises(BadInput, match="10 workers died one after the other"):
        writer.write(*work[0]).checked()
    assert writer.write(*work[1]).checked().labelled
    _reset_failures(Path(job.folder))
    assert writer.write(*work[0]).checked().labelled


def test_a_folder_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_name("model") == str(tmp_path / "model")
    assert absolute_name("owner/name") == "owner/name"

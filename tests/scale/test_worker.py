"""The work of a cluster without one: stretches in any order, workers that stop in the middle, and what goes wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trundle.errors import BadInput, BadModel
from trundle.scale import worker
from trundle.scale.local import _MOST, Asked, _forget, build_alone, everywhere
from trundle.scale.pieces import _list_pieces
from trundle.scale.survey import _cut_stretches, _Stretch, _Survey
from trundle.scale.worker import _check_stretch, _Job, _ShardWriter, _survey_piece
from trundle.teacher.labelling import begun
from trundle.teacher.shards import Manifest, read_record, recorded
from trundle.teacher.targets import open_targets

SHARD = 50
pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture
def work(tables: Path, tmp_path: Path) -> list[tuple[_Stretch, bytes]]:
    pieces = _list_pieces([str(tables)])
    assert len(pieces) > 6
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    survey = _Survey(scratch, pieces=len(pieces), rows=0)
    for number, piece in enumerate(pieces):
        survey.add(number, *_survey_piece(piece))
    repeats = survey.repeats()
    cuts = list(survey.cuts(repeats, SHARD))
    return list(_cut_stretches(pieces, survey.starts, cuts, repeats, 3))


@pytest.fixture
def job(graph: Path, tmp_path: Path) -> _Job:
    """A store that is begun."""
    from trundle.scale.local import _open_teacher

    asked = Asked(model=str(graph), runtime=True, threads=1)
    teacher = _open_teacher(asked)
    prompts = dict(teacher.prompts)
    wanted = Manifest(teacher=teacher.identity, prompts=prompts, dtype="float16", shard_size=SHARD)
    begun(tmp_path / "store", wanted)
    return _Job(asked=asked, identity=teacher.identity, folder=str(tmp_path / "store"), dtype="float16")


def test_any_order_makes_the_store_of_one_process(
    work: list[tuple[_Stretch, bytes]], job: _Job, tables: Path, tmp_path: Path
) -> None:
    one = build_alone([str(tables)], job.asked, tmp_path / "one", shard_size=SHARD)
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
    taken_up = build_alone([str(tables)], job.asked, store, shard_size=SHARD)
    assert taken_up.manifest == one.manifest
    assert sorted(path.name for path in store.iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    ), "records are gone when the manifest stands"


def test_one_process_takes_up_what_workers_have_finished(
    work: list[tuple[_Stretch, bytes]], job: _Job, tables: Path, tmp_path: Path
) -> None:
    _ShardWriter(job).write(*work[0]).checked()
    finished = {path: path.stat().st_mtime_ns for path in Path(job.folder).glob("*.vectors.npy")}
    assert len(finished) == 3
    build_alone([str(tables)], job.asked, job.folder, shard_size=SHARD)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(open_targets(job.folder)) > 3 * SHARD


def test_other_texts_in_a_finished_shard_are_refused(work: list[tuple[_Stretch, bytes]], job: _Job) -> None:
    _ShardWriter(job).write(*work[0]).checked()
    moved = work[1][0].model_copy(update={"first": 0})
    with pytest.raises(BadInput, match="was made from other texts"):
        _ShardWriter(job).write(moved, work[1][1]).checked()
    with pytest.raises(BadInput, match="was made from other texts"):
        _check_stretch(Path(job.folder), moved, work[1][1]).checked()
    for stretch in work[:2]:
        _check_stretch(Path(job.folder), *stretch).checked()


def test_what_a_worker_lacks_is_one_sentence(
    work: list[tuple[_Stretch, bytes]],
    job: _Job,
    graph: Path,
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    absent = Asked(model=str(tmp_path / "gone"), runtime=True)
    other = tmp_path / "other"
    shutil.copytree(graph, other)
    description = other / "encoder.json"
    description.write_text(description.read_text().replace("how do I ", "what is "))
    broken = tmp_path / "broken"
    shutil.copytree(graph, broken)
    (broken / "onnx" / "model.onnx").write_bytes(b"no graph")
    for changed, error, says in (
        (job.model_copy(update={"asked": absent}), BadModel, "can't open .*gone: there is no folder"),
        (job.model_copy(update={"asked": Asked(model=str(broken), runtime=True)}), BadModel, "can't open"),
        (job.model_copy(update={"folder": str(tmp_path)}), BadInput, "on a disk that all nodes share"),
        (
            job.model_copy(update={"asked": Asked(model=str(other), runtime=True)}),
            BadModel,
            "holds another model",
        ),
    ):
        with pytest.raises(error, match=says) as caught:
            _ShardWriter(changed).write(*work[0]).checked()
        assert str(caught.value).startswith("a worker on ")
        assert "\n" not in str(caught.value)


def test_a_stretch_that_kills_its_workers_is_given_up(
    work: list[tuple[_Stretch, bytes]], job: _Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    writer = _ShardWriter(job)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "encode_by_role", die)
        for _ in range(_MOST):
            with pytest.raises(Killed):
                writer.write(*work[0])
    with pytest.raises(BadInput, match="10 workers have died at this one after the other"):
        writer.write(*work[0]).checked()
    assert writer.write(*work[1]).checked().labelled
    _forget(Path(job.folder))
    assert writer.write(*work[0]).checked().labelled


def test_a_folder_is_named_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert everywhere("model") == str(tmp_path / "model")
    assert everywhere("owner/name") == "owner/name"

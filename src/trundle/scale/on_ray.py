"""A store of teacher vectors by all workers of a Ray cluster: the same files as one process writes.

Two passes of Ray Data over the pieces of the sources. In the first, tasks hash the texts, and this process learns which
are repeats and where shards end. In the second, actors that hold the teacher read the texts of their shards, encode
them and write the files. Between driver and workers go hashes and short answers, never texts or vectors.

A worker that dies is started again and its stretch done again, less what it had finished; so it is with the driver.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trundle.errors import OtherTexts, TrundleError, WriteFailed
from trundle.progress import SILENT, Progress
from trundle.scale.cluster import _HERE, _calm_data, _connected, _divide, _Workers, ray, ray_data
from trundle.scale.local import Asked, _forget, _open_teacher
from trundle.scale.pieces import _list_pieces, _nothing_in, _Piece
from trundle.scale.survey import _cut_stretches, _Stretch, _stretch_length, _Survey
from trundle.scale.worker import _Answer, _check_stretch, _failed, _Job, _ShardWriter, _survey_piece
from trundle.teacher.labelling import SHARD_SIZE, begun, other_texts, other_width
from trundle.teacher.shards import Dtype, Manifest, Record, drop_records, read_record, recorded, write_record
from trundle.teacher.targets import Targets, open_targets

_PLAN = ".plan-"


def build_on_ray(
    sources: Sequence[str],
    asked: Asked,
    folder: str | Path,
    *,
    address: str = _HERE,
    workers: int | None = None,
    dtype: Dtype = "float16",
    shard_size: int = SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text; what is there already is not computed again.

    Sources are parquet, here or in object storage. All nodes must see `folder` and the model under the same paths.
    """
    pieces = _list_pieces(sources)
    path = Path(folder).resolve()
    with _connected(address), _calm_data():
        each = _divide(workers, asked.threads, may_use_gpus=not asked.runtime)
        teacher = _open_teacher(asked)
        manifest = begun(
            path,
            Manifest(
                teacher=teacher.identity,
                prompts=dict(teacher.prompts),
                dtype=dtype,
                shard_size=shard_size,
                default_prompt=teacher.default_prompt,
            ),
        )
        del teacher
        for number, shard in enumerate(manifest.shards):
            write_record(path, number, Record(width=manifest.width, shard=shard))
        job = _Job(asked=asked, identity=manifest.teacher, folder=str(path), dtype=dtype, workers=each.count)
        _forget(path)
        try:
            with _scratch(path) as scratch:
                survey = _surveyed(pieces, Path(scratch), progress)
                repeats = survey.repeats()
                cuts = list(survey.cuts(repeats, shard_size))
                length = _stretch_length(len(cuts), each.count)
                work = list(_cut_stretches(pieces, survey.starts, cuts, repeats, length))
            _check_same_texts(path, manifest, len(cuts), work)
            _label(work, job, each, progress)
        except TrundleError as error:
            done = len(recorded(path))
            if manifest.complete:
                drop_records(path)
            elif done and not isinstance(error, OtherTexts):
                progress.say(f"{done} shards are finished in {path}; running again goes on from there")
            raise
    left_out = int(survey.starts[-1]) - sum(cut.kept for cut in cuts)
    if left_out:
        progress.say(f"{left_out} repeated texts were left out")
    _finish(path, manifest, len(cuts), left_out)
    return open_targets(path)


def _survey_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a task of the first pass does to a row."""
    piece = _Piece.model_validate_json(batch["piece"][0])
    answer, hashes, lengths = _Answer(), b"", b""
    try:
        hashes, lengths = _survey_piece(piece)
    except Exception as error:
        answer = _failed(error, "can't read its texts")
    return {
        "number": batch["number"],
        "hashes": [hashes],
        "lengths": [lengths],
        "answer": [answer.model_dump_json()],
    }


def _check_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a task does to a stretch that was begun in an earlier run."""
    stretch = _Stretch.model_validate_json(batch["stretch"][0])
    answer = _check_stretch(Path(batch["folder"][0]), stretch, batch["repeats"][0])
    return {"answer": [answer.model_dump_json()]}


class _Labeller:
    """What an actor of the second pass does to a row; it opens the teacher once."""

    def __init__(self, job: str) -> None:
        self._writer = _ShardWriter(_Job.model_validate_json(job))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One stretch, one answer."""
        stretch = _Stretch.model_validate_json(batch["stretch"][0])
        return {"answer": [self._writer.write(stretch, batch["repeats"][0]).model_dump_json()]}


def _surveyed(pieces: Sequence[_Piece], scratch: Path, progress: Progress) -> _Survey:
    """The first pass."""
    survey = _Survey(scratch, pieces=len(pieces), rows=sum(piece.rows for piece in pieces))
    items = [{"number": number, "piece": piece.model_dump_json()} for number, piece in enumerate(pieces)]
    rows = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(_survey_row, batch_size=1)
    with progress.task("reading texts", len(pieces)) as advance:
        for row in rows.iter_rows():
            _Answer.model_validate_json(row["answer"]).checked()
            survey.add(int(row["number"]), row["hashes"], row["lengths"])
            advance(1)
    texts_of: dict[tuple[str, str], int] = {}
    for piece, count in zip(pieces, survey.counts.tolist(), strict=True):
        file = (piece.storage, piece.path)
        texts_of[file] = texts_of.get(file, 0) + count
    for piece in pieces:
        if not texts_of[piece.storage, piece.path]:
            raise _nothing_in(piece)
    return survey


def _label(work: Sequence[tuple[_Stretch, bytes]], job: _Job, each: _Workers, progress: Progress) -> None:
    """The second pass; texts count when their stretch is done."""
    with progress.task("teacher vectors", sum(stretch.texts for stretch, _ in work)) as advance:
        for answer in _answers(work, job, each):
            advance(answer.checked().texts)


def _answers(work: Sequence[tuple[_Stretch, bytes]], job: _Job, each: _Workers) -> Iterator[_Answer]:
    """One answer for each stretch; Ray Data starts workers that died again, and gives them the same stretch."""
    items = [{"stretch": stretch.model_dump_json(), "repeats": repeats} for stretch, repeats in work]
    rows = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Labeller,
        batch_size=1,
        compute=ray_data.ActorPoolStrategy(size=min(each.count, len(items)), max_tasks_in_flight_per_actor=1),
        fn_constructor_args=(job.model_dump_json(),),
        num_cpus=each.cores,
        num_gpus=each.gpus,
    )
    try:
        for row in rows.iter_rows():
            yield _Answer.model_validate_json(row["answer"])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise WriteFailed(
            f"the cluster gave up ({reason}); see that its nodes are well, then run again to go on"
        ) from error


def _scratch(path: Path) -> TemporaryDirectory[str]:
    """A place for the survey beside the shards, where there must be room anyway."""
    for left in path.glob(f"{_PLAN}*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        return TemporaryDirectory(prefix=_PLAN, dir=path)
    except OSError as error:
        raise WriteFailed(
            f"{path} can't be written to ({error.strerror}); free some space and run again"
        ) from error


def _check_same_texts(
    path: Path, manifest: Manifest, shards: int, work: Sequence[tuple[_Stretch, bytes]]
) -> None:
    """A folder of other texts is refused before a shard of these joins it: by how many shards it has, then by each."""
    there = set(recorded(path))
    if (there and max(there) >= shards) or (manifest.complete and len(manifest.shards) != shards):
        raise other_texts(path)
    begun_ones = [
        {"folder": str(path), "stretch": stretch.model_dump_json(), "repeats": repeats}
        for stretch, repeats in work
        if not there.isdisjoint(range(stretch.first, stretch.first + len(stretch.sizes)))
    ]
    if begun_ones:
        rows = ray_data.from_items(begun_ones, override_num_blocks=len(begun_ones))
        for row in rows.map_batches(_check_row, batch_size=1).iter_rows():
            _Answer.model_validate_json(row["answer"]).checked()


def _finish(path: Path, manifest: Manifest, shards: int, left_out: int) -> None:
    """Gather the records into the manifest, as one process would have written it."""
    records: list[Record] = []
    for number in range(shards):
        record = read_record(path, number)
        if record is None:
            raise WriteFailed(f"the record of shard {number} in {path} is gone; run again to make it anew")
        if record.width != (records or [record])[0].width:
            raise other_width(records[0].width, record.width)
        records.append(record)
    manifest.model_copy(
        update={
            "shards": tuple(record.shard for record in records),
            "width": records[0].width,
            "normalised": all(record.shard.normalised for record in records),
            "complete": True,
            "repeats": left_out,
        }
    ).write(path)
    drop_records(path)
    _forget(path)

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

from trundle.data.labelling import SHARD_SIZE, begun, other_texts, other_width
from trundle.data.pieces import Piece, list_pieces, nothing_in
from trundle.data.shard_records import Record, drop_records, read_record, recorded, write_record
from trundle.data.shards import Dtype, Manifest
from trundle.data.targets import Targets, open_targets
from trundle.errors import OtherTexts, TrundleError, WriteFailed
from trundle.progress import SILENT, Progress
from trundle.scale.cluster import HERE, Workers, calm_data, connected, divide
from trundle.scale.deaths import forget
from trundle.scale.packages import ray, ray_data
from trundle.scale.stretches import Stretch, cut_stretches, stretch_length
from trundle.scale.survey import Survey
from trundle.scale.teachers import Asked, open_teacher
from trundle.scale.worker import Answer, Job, ShardWriter, check_stretch, failed, survey_piece

PLAN = ".plan-"


def build_on_ray(
    sources: Sequence[str],
    asked: Asked,
    folder: str | Path,
    *,
    address: str = HERE,
    workers: int | None = None,
    dtype: Dtype = "float16",
    shard_size: int = SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text; what is there already is not computed again.

    Sources are parquet, here or in object storage. All nodes must see `folder` and the model under the same paths.
    """
    pieces = list_pieces(sources)
    path = Path(folder).resolve()
    with connected(address), calm_data():
        each = divide(workers, asked.threads, may_use_gpus=not asked.runtime)
        teacher = open_teacher(asked)
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
        job = Job(asked=asked, identity=manifest.teacher, folder=str(path), dtype=dtype, workers=each.count)
        forget(path)
        try:
            with _scratch(path) as scratch:
                survey = _surveyed(pieces, Path(scratch), progress)
                repeats = survey.repeats()
                cuts = list(survey.cuts(repeats, shard_size))
                length = stretch_length(len(cuts), each.count)
                work = list(cut_stretches(pieces, survey.starts, cuts, repeats, length))
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


def survey_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a task of the first pass does to a row."""
    piece = Piece.model_validate_json(batch["piece"][0])
    answer, hashes, lengths = Answer(), b"", b""
    try:
        hashes, lengths = survey_piece(piece)
    except Exception as error:
        answer = failed(error, "can't read its texts")
    return {
        "number": batch["number"],
        "hashes": [hashes],
        "lengths": [lengths],
        "answer": [answer.model_dump_json()],
    }


def check_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a task does to a stretch that was begun in an earlier run."""
    stretch = Stretch.model_validate_json(batch["stretch"][0])
    answer = check_stretch(Path(batch["folder"][0]), stretch, batch["repeats"][0])
    return {"answer": [answer.model_dump_json()]}


class Labeller:
    """What an actor of the second pass does to a row; it opens the teacher once."""

    def __init__(self, job: str) -> None:
        self._writer = ShardWriter(Job.model_validate_json(job))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One stretch, one answer."""
        stretch = Stretch.model_validate_json(batch["stretch"][0])
        return {"answer": [self._writer.write(stretch, batch["repeats"][0]).model_dump_json()]}


def _surveyed(pieces: Sequence[Piece], scratch: Path, progress: Progress) -> Survey:
    """The first pass."""
    survey = Survey(scratch, pieces=len(pieces), rows=sum(piece.rows for piece in pieces))
    items = [{"number": number, "piece": piece.model_dump_json()} for number, piece in enumerate(pieces)]
    rows = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(survey_row, batch_size=1)
    with progress.task("reading texts", len(pieces)) as advance:
        for row in rows.iter_rows():
            Answer.model_validate_json(row["answer"]).checked()
            survey.add(int(row["number"]), row["hashes"], row["lengths"])
            advance(1)
    texts_of: dict[tuple[str, str], int] = {}
    for piece, count in zip(pieces, survey.counts.tolist(), strict=True):
        file = (piece.storage, piece.path)
        texts_of[file] = texts_of.get(file, 0) + count
    for piece in pieces:
        if not texts_of[piece.storage, piece.path]:
            raise nothing_in(piece)
    return survey


def _label(work: Sequence[tuple[Stretch, bytes]], job: Job, each: Workers, progress: Progress) -> None:
    """The second pass; texts count when their stretch is done."""
    with progress.task("teacher vectors", sum(stretch.texts for stretch, _ in work)) as advance:
        for answer in _answers(work, job, each):
            advance(answer.checked().texts)


def _answers(work: Sequence[tuple[Stretch, bytes]], job: Job, each: Workers) -> Iterator[Answer]:
    """One answer for each stretch; Ray Data starts workers that died again, and gives them the same stretch."""
    items = [{"stretch": stretch.model_dump_json(), "repeats": repeats} for stretch, repeats in work]
    rows = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(
        Labeller,
        batch_size=1,
        compute=ray_data.ActorPoolStrategy(size=min(each.count, len(items)), max_tasks_in_flight_per_actor=1),
        fn_constructor_args=(job.model_dump_json(),),
        num_cpus=each.cores,
        num_gpus=each.gpus,
    )
    try:
        for row in rows.iter_rows():
            yield Answer.model_validate_json(row["answer"])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise WriteFailed(
            f"the cluster gave up ({reason}); see that its nodes are well, then run again to go on"
        ) from error


def _scratch(path: Path) -> TemporaryDirectory[str]:
    """A place for the survey beside the shards, where there must be room anyway."""
    for left in path.glob(f"{PLAN}*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        return TemporaryDirectory(prefix=PLAN, dir=path)
    except OSError as error:
        raise WriteFailed(
            f"{path} can't be written to ({error.strerror}); free some space and run again"
        ) from error


def _check_same_texts(
    path: Path, manifest: Manifest, shards: int, work: Sequence[tuple[Stretch, bytes]]
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
        for row in rows.map_batches(check_row, batch_size=1).iter_rows():
            Answer.model_validate_json(row["answer"]).checked()


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
    forget(path)

"""A store of teacher vectors built by the workers of a Ray cluster, with the same bytes as by one process.

Ray Data makes two passes over the file parts. In the first, tasks hash the texts, and the driver finds
duplicates and where shards end. In the second, actors that hold the teacher encode the texts of their shards
and write the files. Only hashes and short results are sent, never texts or vectors. A worker that dies is
restarted and resumes after its last finished shard; so does a driver that is run again.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trundle.data.texts import no_training_rows
from trundle.errors import BadInput, MissingExtra, OtherTexts, TrundleError, WriteFailed
from trundle.folders import scratch_folder
from trundle.progress import SILENT, Progress
from trundle.scale import shard_plan, shard_writer
from trundle.scale.shard_writer import TeacherSpec, _open_teacher
from trundle.teacher import shards as store
from trundle.teacher.labelling import locked_targets, other_texts_error, other_width_error, start_or_resume
from trundle.teacher.targets import Targets, open_targets

try:
    import ray
    import ray.data as ray_data
except ImportError as error:
    raise MissingExtra("--ray", "scale") from error

_HERE = "here"
"""The address of `--ray` without a value: a cluster that Ray finds, or a new one on this machine."""
_CONNECT_SECONDS = 5.0
_STDERR = 2
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
"""Sends no usage statistics, and keeps the logs of Ray's processes in their files."""
_PLAN = "plan"

_Work = Sequence[tuple[shard_plan._ShardRange, bytes]]


@dataclass(frozen=True, kw_only=True)
class _Workers:
    count: int
    cores: int
    gpus: int


def build_on_ray(
    sources: Sequence[str],
    spec: TeacherSpec,
    folder: str | Path,
    *,
    address: str = _HERE,
    workers: int | None = None,
    dtype: store.Dtype = "float16",
    shard_size: int = store.SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text of `sources`; an interrupted build resumes.

    Sources are parquet, local or in object storage. All nodes must see `folder` and the model under the same
    paths.
    """
    parts = shard_plan._list_parts(sources)
    path = Path(folder).resolve()
    # The lock comes first: a second driver would take the plan and the records of this one for its own.
    with locked_targets(path, progress), _connected(address), _quiet_data():
        each = _divide(workers, spec.threads, may_use_gpus=not spec.runtime)
        manifest = _started(path, spec, dtype, shard_size)
        settings = shard_writer._WorkerSettings(
            teacher=spec, identity=manifest.teacher, folder=str(path), dtype=dtype, workers=each.count
        )
        shard_writer._reset_failures(path)
        try:
            with scratch_folder(path, _PLAN) as scratch:
                planner = _hash_parts(parts, scratch, progress)
                duplicates = planner.duplicates()
                ends = list(planner.shard_ends(duplicates, shard_size))
                length = shard_plan._range_length(len(ends), each.count)
                work = list(shard_plan._split_ranges(parts, planner.starts, ends, duplicates, length))
            _check_same_texts(path, manifest, len(ends), work)
            _write_shards(work, settings, each, progress)
        except TrundleError as error:
            done = len(store.recorded(path))
            if manifest.complete:
                store.drop_records(path)
            elif done and not isinstance(error, OtherTexts):
                progress.say(f"{done} shards are finished in {path}; run again to resume")
            raise
        left_out = int(planner.starts[-1]) - sum(shard.kept for shard in ends)
        if left_out:
            progress.say(f"{left_out} duplicate texts were left out")
        _finish(path, manifest, len(ends), left_out)
        return open_targets(path)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to a cluster while the block runs, unless the caller is connected already."""
    if ray.is_initialized():
        yield
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if address != _HERE:
        _check_responds(address)
    try:
        with _no_stderr():
            ray.init(
                address=None if address == _HERE else address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                include_dashboard=False,
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"there is no Ray cluster at {address} ({reason}); start one: ray start") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Silence the notes of Ray's C++ code about its log settings; its errors are raised as exceptions."""
    saved = os.dup(_STDERR)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDERR)
    try:
        yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)
        os.close(null)


def _check_responds(address: str) -> None:
    """Check that a server listens at an address; Ray itself would wait long."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise BadInput(f"{address!r} is not the address of a Ray cluster; write HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BadInput(f"no cluster responds at {address}; start one with ray start --head") from error


@contextmanager
def _quiet_data() -> Iterator[None]:
    """Turn off the progress bars and reports of Ray Data while the block runs."""
    context = ray_data.DataContext.get_current()
    logger = logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)


def _divide(workers: int | None, threads: int | None, *, may_use_gpus: bool) -> _Workers:
    """Return one worker per GPU, or without GPUs one per `threads` cores; too few of them is an error."""
    there = ray.cluster_resources()
    gpus, cores = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    if may_use_gpus and gpus:
        most, each = gpus, _Workers(count=workers or gpus, cores=0, gpus=1)
        what = f"{gpus} GPUs"
    else:
        most = cores // (threads or 1)
        each = _Workers(count=workers or most, cores=threads or 1, gpus=0)
        what = f"{cores} cores, {threads or 1} for each worker"
    if not 0 < each.count <= most:
        raise BadInput(f"the cluster has {what}, too few for {max(1, each.count)} workers; add nodes")
    return each


def _started(path: Path, spec: TeacherSpec, dtype: store.Dtype, shard_size: int) -> store.Manifest:
    """Return the manifest of a new or resumed folder, and write a record of each shard in it."""
    manifest = start_or_resume(path, _open_teacher(spec).manifest(dtype, shard_size))
    for number, shard in enumerate(manifest.shards):
        store.write_record(path, number, store.Record(width=manifest.width, shard=shard))
    return manifest


def _dataset(items: Sequence[Mapping[str, Any]]) -> Any:
    return ray_data.from_items(list(items), override_num_blocks=len(items))


def _rows(dataset: Any) -> Iterator[tuple[Mapping[str, Any], shard_writer._WorkerResult]]:
    """Yield the rows of a dataset with their results; a worker's error is raised."""
    try:
        for row in dataset.iter_rows():
            yield row, shard_writer._WorkerResult.model_validate_json(row["result"]).checked()
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise WriteFailed(f"the cluster failed ({reason}); check its nodes, then run again") from error


def _hash_parts(
    parts: Sequence[shard_plan._FilePart], scratch: Path, progress: Progress
) -> shard_plan._ShardPlanner:
    """Run the first pass; a file without training texts is an error."""
    planner = shard_plan._ShardPlanner(scratch, parts=len(parts), rows=sum(part.rows for part in parts))
    items = [{"number": number, "part": part.model_dump_json()} for number, part in enumerate(parts)]
    with progress.task("reading texts", len(parts)) as advance:
        for row, _ in _rows(_dataset(items).map_batches(_hash_row, batch_size=1)):
            planner.add(int(row["number"]), row["hashes"], row["lengths"])
            advance(1)
    texts_of: Counter[tuple[str, str]] = Counter()
    for part, count in zip(parts, planner.counts.tolist(), strict=True):
        texts_of[part.storage, part.path] += count
    for (_, path), count in texts_of.items():
        if not count:
            raise no_training_rows(path)
    return planner


def _hash_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    part = shard_plan._FilePart.model_validate_json(batch["part"][0])
    result, hashes, lengths = shard_writer._WorkerResult(), b"", b""
    try:
        hashes, lengths = shard_writer._hash_texts(part)
    except Exception as error:
        result = shard_writer._failed(error, "can't read its texts")
    encoded = [result.model_dump_json()]
    return {"number": batch["number"], "hashes": [hashes], "lengths": [lengths], "result": encoded}


def _check_same_texts(path: Path, manifest: store.Manifest, shards: int, work: _Work) -> None:
    """Reject a folder of other texts before anything is written."""
    there = set(store.recorded(path))
    if (there and max(there) >= shards) or (manifest.complete and len(manifest.shards) != shards):
        raise other_texts_error(path)
    started = [
        {"folder": str(path), "range": shard_range.model_dump_json(), "duplicates": duplicates}
        for shard_range, duplicates in work
        if not there.isdisjoint(range(shard_range.first, shard_range.first + len(shard_range.sizes)))
    ]
    if started:
        for _ in _rows(_dataset(started).map_batches(_check_row, batch_size=1)):
            pass


def _check_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    shards = shard_plan._ShardRange.model_validate_json(batch["range"][0])
    result = shard_writer._check_range(Path(batch["folder"][0]), shards, batch["duplicates"][0])
    return {"result": [result.model_dump_json()]}


def _write_shards(
    work: _Work, settings: shard_writer._WorkerSettings, each: _Workers, progress: Progress
) -> None:
    """Run the second pass; Ray Data restarts workers that died and passes them the same range again."""
    items = [{"range": shards.model_dump_json(), "duplicates": duplicates} for shards, duplicates in work]
    dataset = _dataset(items).map_batches(
        _Labeller,
        batch_size=1,
        compute=ray_data.ActorPoolStrategy(size=min(each.count, len(items)), max_tasks_in_flight_per_actor=1),
        fn_constructor_args=(settings.model_dump_json(),),
        num_cpus=each.cores,
        num_gpus=each.gpus,
    )
    with progress.task("teacher vectors", sum(shards.texts for shards, _ in work)) as advance:
        for _, result in _rows(dataset):
            advance(result.texts)


class _Labeller:
    """Writes the shards of one range per row, on a worker; the teacher is opened once."""

    def __init__(self, settings: str) -> None:
        self._writer = shard_writer._ShardWriter(shard_writer._WorkerSettings.model_validate_json(settings))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        shards = shard_plan._ShardRange.model_validate_json(batch["range"][0])
        return {"result": [self._writer.write(shards, batch["duplicates"][0]).model_dump_json()]}


def _finish(path: Path, manifest: store.Manifest, shards: int, left_out: int) -> None:
    """Collect the records into the manifest that one process would have written."""
    records: list[store.Record] = []
    for number in range(shards):
        record = store.read_record(path, number)
        if record is None:
            raise WriteFailed(f"the record of shard {number} in {path} is missing; run again to rebuild it")
        if record.width != (records or [record])[0].width:
            raise other_width_error(records[0].width, record.width)
        records.append(record)
    manifest = manifest.with_shards([record.shard for record in records], records[0].width)
    manifest.model_copy(update={"complete": True, "repeats": left_out}).write(path)
    store.drop_records(path)
    shard_writer._reset_failures(path)

"""A store of teacher vectors built by one process; a cluster writes identical bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trundle.data.corpus import ENVIRONMENT, as_texts
from trundle.data.environment import environment_pairs
from trundle.data.texts import Text, read_texts
from trundle.progress import SILENT, Progress
from trundle.scale.file_parts import _is_remote, _list_parts, _read_parts
from trundle.scale.shard_writer import TeacherSpec, _open_teacher, _reset_failures
from trundle.teacher.labelling import SHARD_SIZE, build_targets
from trundle.teacher.shards import Dtype
from trundle.teacher.targets import Targets


def absolute_name(model: str) -> str:
    """Return a folder as its absolute path, so that workers find it; a hub name is unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def build_local(
    sources: Sequence[str],
    spec: TeacherSpec,
    folder: str | Path,
    *,
    dtype: Dtype = "float16",
    shard_size: int = SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text of `sources`; an interrupted build resumes."""
    streams = [
        _texts(source, progress) for source in sources
    ]  # checks all sources before the model is loaded
    teacher = _open_teacher(spec)
    assert teacher.embedder is not None
    targets = build_targets(
        (text for stream in streams for text in stream),
        teacher.embedder,
        teacher_id=teacher.identity(),
        folder=folder,
        dtype=dtype,
        shard_size=shard_size,
        prompts=teacher.used_prompts,
        default_prompt=teacher.default_prompt_name,
        progress=progress,
    )
    _reset_failures(targets.folder)
    return targets


def _texts(source: str, progress: Progress) -> Iterator[Text]:
    if source == ENVIRONMENT:
        return as_texts(environment_pairs(progress=progress))
    if _is_remote(source):
        return _read_parts(_list_parts([source]))
    return read_texts(source)

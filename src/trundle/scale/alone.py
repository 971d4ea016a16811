"""A store of teacher vectors by this process alone: the pattern the cluster must meet to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import trundle.data as data
from trundle.data.corpus import ENVIRONMENT, as_texts
from trundle.data.labelling import SHARD_SIZE, build_targets
from trundle.data.pieces import is_remote, list_pieces, read_pieces_in_order
from trundle.data.shards import Dtype
from trundle.data.targets import Targets
from trundle.data.texts import Text, read_texts
from trundle.progress import SILENT, Progress
from trundle.scale.deaths import forget
from trundle.scale.teachers import Asked, open_teacher


def build_alone(
    sources: Sequence[str],
    asked: Asked,
    folder: str | Path,
    *,
    dtype: Dtype = "float16",
    shard_size: int = SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text; what is there already is not computed again."""
    texts = _texts(sources, progress)
    teacher = open_teacher(asked)
    targets = build_targets(
        texts,
        teacher.embedder,
        teacher_id=teacher.identity,
        folder=folder,
        dtype=dtype,
        shard_size=shard_size,
        prompts=teacher.prompts,
        default_prompt=teacher.default_prompt,
        progress=progress,
    )
    forget(targets.folder)
    return targets


def _texts(sources: Sequence[str], progress: Progress) -> Iterator[Text]:
    """Source after source, each looked at before the model is loaded."""
    streams = [_stream(source, progress) for source in sources]
    return (text for stream in streams for text in stream)


def _stream(source: str, progress: Progress) -> Iterator[Text]:
    if source == ENVIRONMENT:
        return as_texts(data.environment_pairs(progress=progress))
    if is_remote(source):
        return read_pieces_in_order(list_pieces([source]))
    return read_texts(source)

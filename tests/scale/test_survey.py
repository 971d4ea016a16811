"""Hashing parts in any order gives the shards of one process."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trundle.data.texts import Text
from trundle.embedder import _plain
from trundle.scale import shard_plan
from trundle.scale.shard_plan import _bits_between, _range_length, _ShardPlanner
from trundle.teacher import labelling
from trundle.teacher.labelling import build_targets, text_key
from trundle.teacher.shards import Manifest

texts = st.builds(Text, text=st.text("ab", min_size=1, max_size=7), kind=st.sampled_from(["query", None]))


@settings(max_examples=40)
@given(
    st.lists(st.lists(texts, max_size=12), min_size=1, max_size=5).filter(any),
    st.integers(1, 6),
    st.integers(5, 40),
    st.randoms(),
)
def test_shards_are_those_of_one_process(pieces, shard_size, characters, random) -> None:
    everything = [text for piece in pieces for text in piece]
    with (
        TemporaryDirectory() as one,
        TemporaryDirectory() as scratch,
        patch.object(labelling, "SHARD_CHARACTERS", characters),
        patch.object(shard_plan, "SHARD_CHARACTERS", characters),
        patch.object(shard_plan, "_BUCKET_TEXTS", 7),
    ):
        teacher = _plain("ones", lambda asked: np.ones((len(asked), 2), dtype=np.float32))
        targets = build_targets(everything, teacher, Manifest(teacher="ones", shard_size=shard_size), one)
        survey = _ShardPlanner(Path(scratch), parts=len(pieces), rows=len(everything))
        order = list(range(len(pieces)))
        random.shuffle(order)
        for number in order:
            hashes = b"".join(text_key(text, 1) for text in pieces[number])
            lengths = np.asarray([len(text.text) for text in pieces[number]], dtype="<u4").tobytes()
            survey.add(number, hashes, lengths)
        repeats = survey.duplicates()
        cuts = list(survey.shard_ends(repeats, shard_size))
        kept = np.flatnonzero(_bits_between(repeats, 0, len(everything)) == 0)
        assert [everything[place] for place in kept] == targets.chosen(range(len(targets)))
        assert [cut.kept for cut in cuts] == [shard.count for shard in targets.manifest.shards]
        begin = 0
        for cut in cuts:
            assert int((_bits_between(repeats, begin, cut.end) == 0).sum()) == cut.kept
            begin = cut.end
        assert int(_bits_between(repeats, 0, len(everything)).sum()) == targets.manifest.repeats


def test_stretches_are_longer_for_more_shards() -> None:
    assert [_range_length(shards, 4) for shards in (1, 16, 40, 10_000)] == [1, 1, 2, 16]

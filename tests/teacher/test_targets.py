"""The store of teacher vectors: no text is encoded twice, lost or mixed up."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_teacher import ROLE_OF, WIDTH, Teacher, assert_holds, build, make_texts, vector
from recorded_progress import RecordedProgress
from trundle.data.texts import Text
from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput, BadModel, UserError, WriteFailed
from trundle.teacher import MANIFEST, labelling
from trundle.teacher import targets as targets_module
from trundle.teacher.labelling import _Seen, build_targets
from trundle.teacher.shards import Manifest, is_intact, read_manifest
from trundle.teacher.targets import find_targets, open_share, open_targets

words = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(str.strip)
records = st.builds(
    Text,
    text=st.sampled_from(["a", "b", "ab ", "ä€𝄞", "c\nd", "nul\0"]) | words,
    kind=st.sampled_from(["query", "document", "definition", None]),
)


@settings(max_examples=30)
@given(st.lists(records, min_size=1, max_size=30), st.integers(1, 9), st.sampled_from(["float16", "float32"]))
def test_stores_each_distinct_text_once_in_its_role(texts: list[Text], shard_size: int, dtype: Any) -> None:
    first: dict[tuple[str, str], Text] = {}
    for text in texts:
        first.setdefault((ROLE_OF[text.kind], text.text), text)
    teacher, told = Teacher(), RecordedProgress()
    with TemporaryDirectory() as folder:
        targets = build(Path(folder), texts, teacher, dtype=dtype, shard_size=shard_size, progress=told)
        assert_holds(targets, list(first.values()), 5e-4 if dtype == "float16" else 0)
        assert targets.lengths.tolist() == [len(text.text) for text in first.values()]
        assert targets.lengths.dtype == np.uint32
        assert (targets.width, targets.normalised) == (WIDTH, True)
        assert teacher.asked == len(first)
        assert all(call == sorted(call, key=len, reverse=True) for call in teacher.calls)
        assert told.tasks == [("teacher vectors", len(texts))]
        assert told.units == len(texts)
        assert targets.manifest.repeats == len(texts) - len(first)

        again = Teacher()
        assert_holds(
            build(Path(folder), iter(texts), again, dtype=dtype, shard_size=shard_size), list(first.values())
        )
        assert again.calls == []


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3000), max_size=9000), st.integers(0, 2**32), st.integers(1, 3000))
def test_seen_is_a_set(numbers: list[int], salt: int, at_once: int) -> None:
    keys = [blake2b(f"{salt} {number}".encode(), digest_size=16).digest() for number in numbers]
    seen, reference = _Seen(), set()
    for start in range(0, len(keys), at_once):
        chunk = keys[start : start + at_once]
        for key, new in zip(chunk, seen.add(chunk), strict=True):
            assert new == (key not in reference)
            reference.add(key)
    assert len(seen) == len(reference)


def test_seen_tells_keys_of_one_slot_apart() -> None:
    keys = [bytes(8) + number.to_bytes(8, "little") for number in range(1, 500)]
    seen = _Seen()
    assert seen.add(keys[:300]).all()
    assert seen.add(keys).tolist() == [False] * 300 + [True] * 199


def test_seen_grows_past_its_first_table() -> None:
    keys = [blake2b(str(number).encode(), digest_size=16).digest() for number in range(20_000)]
    seen = _Seen()
    assert seen.add(keys).all()
    assert not seen.add(keys).any()


def test_reads_any_order(tmp_path: Path) -> None:
    texts = make_texts(50)
    targets = build(tmp_path, texts, dtype="float32")
    order = np.random.default_rng(0).integers(0, 50, 5000)
    np.testing.assert_array_equal(
        targets.vectors(order), np.stack([vector(ROLE_OF[texts[i].kind], texts[i].text) for i in order])
    )
    assert targets.texts(order) == [texts[i].text for i in order]
    assert targets.chosen(range(50)) == texts
    assert targets.vectors([]).shape == (0, WIDTH)
    for outside in (-1, 50):
        with pytest.raises(IndexError, match="0 to 49"):
            targets.texts([outside])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_consecutive_rows_come_as_they_are_stored(tmp_path: Path, dtype: Any) -> None:
    targets = build(tmp_path, make_texts(50), dtype=dtype, shard_size=8)
    stored = np.concatenate([np.load(path) for path in sorted(tmp_path.glob("*.vectors.npy"))])
    for start, stop in ((0, 50), (3, 8), (7, 33), (49, 50), (5, 5)):
        found = targets.rows(start, stop)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, stored[start:stop])
    part = targets.split(5, seed=0)[0]
    np.testing.assert_array_equal(part.rows(2, 40), part.vectors(range(2, 40)).astype(dtype))
    (tmp_path / "00002.vectors.npy").write_bytes(b"short")
    with pytest.raises(BadInput, match="truncated; build the folder again"):
        targets.rows(0, 50)
    (tmp_path / "00002.vectors.npy").unlink()
    with pytest.raises(BadInput, match=r"can't be read .*; build the folder again"):
        targets.rows(0, 50)


def test_a_folder_is_verified_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, make_texts(14))
    checked: list[int] = []

    def counted(folder: Path, number: int, shard: Any) -> bool:
        checked.append(number)
        return is_intact(folder, number, shard)

    monkeypatch.setattr(targets_module, "is_intact", counted)
    assert find_targets(tmp_path) is not None
    assert find_targets(tmp_path) is not None
    assert sorted(checked) == [0, 1, 2, 3]
    file = tmp_path / "00001.vectors.npy"
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    os.utime(file, ns=(0, 0))
    assert find_targets(tmp_path) is None
    file.write_bytes(before)
    assert find_targets(tmp_path) is not None


def test_a_teacher_that_likes_many_texts_gets_several_shards_at_once(tmp_path: Path) -> None:
    teacher, texts = Teacher(), [Text(text=f"{number} {'x' * (number % 5)}") for number in range(50)]
    many = replace(teacher.embedder, texts_per_call=16)
    targets = build_targets(texts, many, Manifest(teacher="fake", shard_size=4), tmp_path)
    assert [len(call) for call in teacher.calls] == [4, 8, 16, 16, 6]
    assert list(chain.from_iterable(teacher.calls)) == [text.text for text in texts], "in their own order"
    assert [shard.count for shard in targets.manifest.shards] == [4] * 12 + [2]
    assert_holds(targets, texts)
    mixed, again = make_texts(50), tmp_path / "mixed"
    assert_holds(build_targets(mixed, many, Manifest(teacher="fake", shard_size=4), again), mixed)


def test_a_slow_teacher_gets_one_shard_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "_QUICK_CALL", -1.0)
    teacher, texts = Teacher(), [Text(text=f"{number}") for number in range(20)]
    many = replace(teacher.embedder, texts_per_call=16)
    build_targets(texts, many, Manifest(teacher="fake", shard_size=4), tmp_path)
    assert [len(call) for call in teacher.calls] == [4] * 5


def test_an_error_while_writing_is_raised_and_what_is_on_disk_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, told = make_texts(40), RecordedProgress()
    write = labelling.write_shard

    def failing(folder: Path, number: int, *given: Any, **more: Any) -> Any:
        if number == 3:
            raise WriteFailed("the disk is full; free space, run again")
        return write(folder, number, *given, **more)

    monkeypatch.setattr(labelling, "write_shard", failing)
    with pytest.raises(WriteFailed, match="the disk is full"):
        build(tmp_path, texts, progress=told)
    monkeypatch.undo()
    assert told.lines == [f"12 texts have their vectors in {tmp_path}; run again to resume"]
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.count == 12
    teacher = Teacher()
    assert_holds(build(tmp_path, texts, teacher), texts)
    assert teacher.asked == 28


def test_the_next_texts_are_encoded_while_a_shard_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, write = threading.Event(), labelling.write_shard

    def waiting(*given: Any, **more: Any) -> Any:
        assert second.wait(20), "the second call comes during the first write"
        return write(*given, **more)

    class Told(Teacher):
        def role(self, role: str) -> Any:
            encode = super().role(role)

            def told(texts: Sequence[str]) -> Vectors:
                if self.calls:
                    second.set()
                return encode(texts)

            return told

    monkeypatch.setattr(labelling, "write_shard", waiting)
    texts = [Text(text=f"{number}") for number in range(12)]
    assert_holds(build(tmp_path, texts, Told()), texts)


def test_parts_are_disjoint_and_whole(tmp_path: Path) -> None:
    texts = make_texts(200)
    targets = build(tmp_path, texts, dtype="float32")
    train, held_out = targets.split(15, seed=3)
    assert held_out is not None
    assert (len(train), len(held_out)) == (185, 15)
    ours, theirs = set(train.texts(range(185))), set(held_out.texts(range(15)))
    assert not ours & theirs
    assert ours | theirs == {text.text for text in texts}
    for part in (train, held_out):
        chosen = part.chosen(range(len(part)))
        assert part.lengths.tolist() == [len(text.text) for text in chosen]
        expected = np.stack([vector(ROLE_OF[text.kind], text.text) for text in chosen])
        np.testing.assert_array_equal(part.vectors(range(len(part))), expected)
    inner, rest = train.split(10, seed=4)
    assert rest is not None
    assert set(inner.texts(range(len(inner)))) | set(rest.texts(range(10))) == ours
    assert build(tmp_path / "few", make_texts(9)).split(5, seed=0)[1] is None
    with pytest.raises(IndexError):
        held_out.texts([15])


def test_files_are_plain_numpy_and_utf8(tmp_path: Path) -> None:
    texts = [Text(text="häuser", kind="query"), Text(text="und €", kind=None)]
    build(tmp_path, texts)
    stored = np.load(tmp_path / "00000.vectors.npy")
    assert stored.dtype == np.float16
    np.testing.assert_allclose(stored[0], vector("query", "häuser"), atol=5e-4)
    assert (tmp_path / "00000.texts.bin").read_text("utf-8") == "häuserund €"
    assert np.load(tmp_path / "00000.index.npy")["length"].tolist() == [6, 5]
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.kinds == {"query": 1, "none": 1}


def test_very_long_texts_end_a_shard_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelling, "SHARD_CHARACTERS", 100)
    texts = [Text(text=f"{i} " + "y" * 60) for i in range(7)]
    targets = build(tmp_path, texts)
    assert [shard.count for shard in targets.manifest.shards] == [2, 2, 2, 1]
    assert_holds(targets, texts)


def test_a_teacher_that_does_not_normalise_is_detected(tmp_path: Path) -> None:
    texts = make_texts(10)
    targets = build(tmp_path, texts, Teacher({texts[9].text: np.full(WIDTH, 2.0)}))
    assert not targets.normalised


@pytest.mark.parametrize("part", ["vectors.npy", "texts.bin", "index.npy"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_only_a_damaged_shard_is_computed_again(tmp_path: Path, part: str, damage: str) -> None:
    texts = make_texts(14)
    build(tmp_path, texts)
    file = tmp_path / f"00001.{part}"
    before = file.read_bytes()
    if damage == "delete":
        file.unlink()
    else:
        flipped = before[:-1] + bytes([before[-1] ^ 1])
        file.write_bytes(flipped if damage == "flip" else before[:-1])
    if damage != "flip":
        with pytest.raises(BadInput, match="build the folder again"):
            open_targets(tmp_path)
    teacher, told = Teacher(), RecordedProgress()
    assert_holds(build(tmp_path, texts, teacher, progress=told), texts)
    assert sorted(chain.from_iterable(teacher.calls)) == sorted(text.text for text in texts[4:8])
    assert any("shard 1" in line for line in told.lines)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "other",
    [
        {"teacher_id": "fake 2"},
        {"prompts": {"query": "q: "}},
        {"dtype": "float32"},
        {"shard_size": 5},
        {"texts": make_texts(10)[::-1]},
        {"texts": make_texts(9)},
        {"texts": make_texts(8)},
        {"texts": make_texts(11)},
        {"texts": [Text(text=text.text, kind="query") for text in make_texts(10)]},
    ],
    ids=str,
)
def test_another_teacher_prompt_dtype_or_text_is_rejected(tmp_path: Path, other: dict[str, Any]) -> None:
    build(tmp_path, make_texts(10))
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    teacher = Teacher()
    with pytest.raises(BadInput, match="choose another folder or delete it"):
        build(tmp_path, other.pop("texts", make_texts(10)), teacher, **other)
    assert teacher.calls == []
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_texts_after_a_full_last_shard_are_rejected(tmp_path: Path) -> None:
    build(tmp_path, make_texts(8))
    teacher, told = Teacher(), RecordedProgress()
    with pytest.raises(BadInput, match="other texts"):
        build(tmp_path, make_texts(9), teacher, progress=told)
    assert teacher.calls == []
    assert told.lines == [], "running again would be no use"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.full(WIDTH, np.nan), "NaN or infinity"),
        (np.full(WIDTH, np.inf), "NaN or infinity"),
        (np.zeros(WIDTH), "nothing but zeros"),
        (np.full(WIDTH, 1e6), "store float32"),
        (np.full(WIDTH, 1e-12), "store float32"),
    ],
)
def test_a_bad_vector_names_its_text_and_keeps_finished_shards(
    tmp_path: Path, answer: Any, message: str
) -> None:
    texts = make_texts(14)
    told = RecordedProgress()
    with pytest.raises(UserError, match=message) as raised:
        build(tmp_path, texts, Teacher({texts[9].text: answer}), progress=told)
    assert repr(texts[9].text) in str(raised.value)
    assert told.lines == [f"8 texts have their vectors in {tmp_path}; run again to resume"]
    teacher = Teacher()
    assert_holds(build(tmp_path, texts, teacher), texts)
    assert teacher.asked == 6


@pytest.mark.parametrize(
    "answer", [np.zeros((3, WIDTH)), np.ones(WIDTH), np.ones((4, 0)), np.ones((4, 2, 2))]
)
def test_an_answer_of_the_wrong_shape_is_rejected(tmp_path: Path, answer: Any) -> None:
    teacher = Embedder(name="odd", text=lambda _: answer, query=lambda _: answer, document=lambda _: answer)
    texts = [Text(text=f"{i}", kind="query") for i in range(4)]
    with pytest.raises(BadModel, match="one row per text"):
        build_targets(texts, teacher, Manifest(teacher="odd"), tmp_path)


@pytest.mark.parametrize("kinds", [("query", "query"), ("query", "document")])
def test_a_teacher_that_changes_its_width_is_rejected(tmp_path: Path, kinds: Any) -> None:
    widths = iter((8, 9))

    def encode(texts: Sequence[str]) -> Vectors:
        return np.ones((len(texts), next(widths)), dtype=np.float32)

    teacher = Embedder(name="odd", text=encode, query=encode, document=encode)
    texts = [Text(text=f"{i}", kind=kinds[i // 2]) for i in range(4)]
    shard_size = 2 if kinds[0] == kinds[1] else 4
    with pytest.raises(BadModel, match="width 8 before and 9 now"):
        build_targets(texts, teacher, Manifest(teacher="odd", shard_size=shard_size), tmp_path)


@pytest.mark.parametrize("text", ["", " \n", "half \ud800", 3, None])
def test_an_invalid_text_is_rejected_with_its_number(tmp_path: Path, text: Any) -> None:
    teacher = Teacher()
    with pytest.raises(BadInput, match="text 2 "):
        build(tmp_path, [Text(text="good"), Text(text=text)], teacher)
    assert teacher.calls == []


def test_folders_that_are_no_store_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no texts"):
        build(tmp_path / "none", [])
    with pytest.raises(BadInput, match="shard size is 0"):
        build(tmp_path / "zero", make_texts(2), shard_size=0)
    with pytest.raises(BadInput, match="no teacher vectors"):
        open_targets(tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match=r"other files \((none|thesis.tex)\)"):
        build(tmp_path, make_texts(2))
    with pytest.raises(BadInput, match="choose another folder"):
        build(tmp_path / "thesis.tex", make_texts(2))
    build(tmp_path / "good", make_texts(2))
    for damage in ("", "{}", "[]", '{"format": 1'):
        (tmp_path / "good" / MANIFEST).write_text(damage)
        with pytest.raises(BadInput, match="is damaged"):
            build(tmp_path / "good", make_texts(2))


@pytest.mark.parametrize("processes", [1, 2, 3, 7, 23])
def test_shares_are_disjoint_and_together_everything(tmp_path: Path, processes: int) -> None:
    whole = build(tmp_path, make_texts(23))
    shares = [open_share(tmp_path, rank=rank, processes=processes) for rank in range(processes)]
    assert all(share.is_share for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    found = [text for share in shares for text in share.texts(range(len(share)))]
    assert found == whole.texts(range(23))
    vectors = np.concatenate([share.vectors(range(len(share))) for share in shares])
    assert np.array_equal(vectors, whole.vectors(range(23)))
    learned, validated = shares[0].split(1, seed=0)
    assert learned.is_share
    assert len(learned) + (0 if validated is None else len(validated)) == len(shares[0])


def test_a_share_needs_its_own_shards_alone(tmp_path: Path) -> None:
    build(tmp_path, make_texts(23))
    for file in tmp_path.glob("0000[3-5].*"):
        file.unlink()
    assert len(open_share(tmp_path, rank=0, processes=2)) == 11
    with pytest.raises(BadInput, match="is missing or truncated"):
        open_share(tmp_path, rank=1, processes=2)
    with pytest.raises(BadInput, match="fewer texts than there are processes"):
        open_share(tmp_path, rank=0, processes=24)

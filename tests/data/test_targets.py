"""The store of teacher vectors: nothing asked twice, lost or mixed, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trundle.data import labelling
from trundle.data.labelling import build_targets
from trundle.data.seen import Seen
from trundle.data.shards import MANIFEST, read_manifest
from trundle.data.targets import Targets, open_share, open_targets
from trundle.data.texts import Kind, Text
from trundle.data.vector_table import teacher_from_parquet
from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput, BadModel, UserError, WriteFailed

WIDTH = 8
ROLE_OF = {"query": "query", "document": "document", "definition": "text", None: "text"}
SOURCE = Path(__file__).parents[2] / "src"


def vector(role: str, text: str) -> Vectors:
    """A unit vector that depends on role and text alone."""
    raw = np.frombuffer(blake2b(f"{role} {text}".encode(), digest_size=WIDTH).digest(), dtype=np.uint8)
    row = raw.astype(np.float32) - 127.5
    return (row / np.linalg.norm(row)).astype(np.float32)


class Teacher:
    """Remembers what it was asked, and gives one bad answer where it is told to."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.calls: list[list[str]] = []
        self.answers = answers or {}
        self.embedder = Embedder(
            name="fake", text=self.role("text"), query=self.role("query"), document=self.role("document")
        )

    @property
    def asked(self) -> int:
        return sum(map(len, self.calls))

    def role(self, role: str) -> Callable[[Sequence[str]], Vectors]:
        def encode(texts: Sequence[str]) -> Vectors:
            self.calls.append(list(texts))
            return np.stack([np.asarray(self.answers.get(text, vector(role, text))) for text in texts])

        return encode


class Told:
    """Counts the units and keeps the lines."""

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self.lines: list[str] = []

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:  # noqa: ARG002
        self.total = total
        yield self.add

    def add(self, units: int) -> None:
        self.done += units

    def say(self, line: str) -> None:
        self.lines.append(line)


def build(folder: Path, texts: Any, teacher: Teacher | None = None, **options: Any) -> Targets:
    given_options = {"teacher_id": "fake 1", "shard_size": 4, **options}
    return build_targets(texts, (teacher or Teacher()).embedder, folder=folder, **given_options)


def some(count: int) -> list[Text]:
    kinds: tuple[Kind | None, ...] = ("query", "document", "definition", None)
    return [Text(text=f"text {'x' * (i * 7 % 11)} {i}", kind=kinds[i % 4]) for i in range(count)]


def assert_holds(targets: Targets, texts: Sequence[Text], tolerance: float = 5e-4) -> None:
    everything = range(len(texts))
    assert len(targets) == len(texts)
    assert targets.texts(everything) == [text.text for text in texts]
    assert targets.kinds(everything) == [text.kind for text in texts]
    expected = np.stack([vector(ROLE_OF[text.kind], text.text) for text in texts])
    np.testing.assert_allclose(targets.vectors(everything), expected, atol=tolerance)


words = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(str.strip)
records = st.builds(
    Text,
    text=st.sampled_from(["a", "b", "ab ", "ä€𝄞", "c\nd", "nul\0"]) | words,
    kind=st.sampled_from(["query", "document", "definition", None]),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(records, min_size=1, max_size=30), st.integers(1, 9), st.sampled_from(["float16", "float32"]))
def test_stores_each_distinct_text_once_in_its_role(texts: list[Text], shard_size: int, dtype: Any) -> None:
    first: dict[tuple[str, str], Text] = {}
    for text in texts:
        first.setdefault((ROLE_OF[text.kind], text.text), text)
    teacher, told = Teacher(), Told()
    with TemporaryDirectory() as folder:
        targets = build(Path(folder), texts, teacher, dtype=dtype, shard_size=shard_size, progress=told)
        assert_holds(targets, list(first.values()), 5e-4 if dtype == "float16" else 0)
        assert targets.lengths.tolist() == [len(text.text) for text in first.values()]
        assert targets.lengths.dtype == np.uint32
        assert (targets.width, targets.normalised) == (WIDTH, True)
        assert teacher.asked == len(first)
        assert all(call == sorted(call, key=len, reverse=True) for call in teacher.calls)
        assert told.done == told.total == len(texts)
        assert targets.manifest.repeats == len(texts) - len(first)

        again = Teacher()
        assert_holds(
            build(Path(folder), iter(texts), again, dtype=dtype, shard_size=shard_size), list(first.values())
        )
        assert again.calls == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=9000), st.integers(0, 2**32))
def test_seen_is_a_set(numbers: list[int], salt: int) -> None:
    keys = [blake2b(f"{salt} {number}".encode(), digest_size=16).digest() for number in numbers]
    seen, reference = Seen(), set()
    for key in keys:
        assert seen.add(key) == (key not in reference)
        reference.add(key)
    assert len(seen) == len(reference)


def test_seen_grows_past_its_first_table() -> None:
    keys = [blake2b(str(number).encode(), digest_size=16).digest() for number in range(20_000)]
    seen = Seen()
    assert all(seen.add(key) for key in keys)
    assert not any(seen.add(key) for key in keys)


def test_reads_any_order(tmp_path: Path) -> None:
    texts = some(50)
    targets = build(tmp_path, texts, dtype="float32")
    order = np.random.default_rng(0).integers(0, 50, 5000)
    np.testing.assert_array_equal(
        targets.vectors(order), np.stack([vector(ROLE_OF[texts[i].kind], texts[i].text) for i in order])
    )
    assert targets.texts(order) == [texts[i].text for i in order]
    assert (targets.text(7), targets.kind(7)) == (texts[7].text, texts[7].kind)
    assert targets.chosen(range(50)) == texts
    assert targets.vectors([]).shape == (0, WIDTH)
    for outside in (-1, 50):
        with pytest.raises(IndexError, match="0 to 49"):
            targets.text(outside)


def test_parts_are_disjoint_and_whole(tmp_path: Path) -> None:
    texts = some(200)
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
    assert build(tmp_path / "few", some(9)).split(5, seed=0)[1] is None
    with pytest.raises(IndexError):
        held_out.text(15)


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


def test_a_teacher_that_does_not_normalise_is_known(tmp_path: Path) -> None:
    texts = some(10)
    targets = build(tmp_path, texts, Teacher({texts[9].text: np.full(WIDTH, 2.0)}))
    assert not targets.normalised


@pytest.mark.parametrize("part", ["vectors.npy", "texts.bin", "index.npy"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_shard_is_found_and_only_it_is_redone(tmp_path: Path, part: str, damage: str) -> None:
    texts = some(14)
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
    teacher, told = Teacher(), Told()
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
        {"texts": some(10)[::-1]},
        {"texts": some(9)},
        {"texts": some(8)},
        {"texts": some(11)},
        {"texts": [Text(text=text.text, kind="query") for text in some(10)]},
    ],
    ids=str,
)
def test_another_teacher_prompt_dtype_or_text_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    build(tmp_path, some(10))
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    teacher = Teacher()
    with pytest.raises(BadInput, match="choose another folder or delete it"):
        build(tmp_path, other.pop("texts", some(10)), teacher, **other)
    assert teacher.calls == []
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_texts_after_a_full_last_shard_are_refused(tmp_path: Path) -> None:
    build(tmp_path, some(8))
    teacher = Teacher()
    with pytest.raises(BadInput, match="other texts"):
        build(tmp_path, some(9), teacher)
    assert teacher.calls == []


class Killed(BaseException):
    """Ends the run on the spot, as no code of ours catches it."""


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_at_any_write_loses_at_most_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    texts = some(14)
    replace = Path.replace
    stops = 0
    while True:
        folder, first, second, writes = tmp_path / str(stops), Teacher(), Teacher(), 0

        def stopping(source: Path, target: Path, last: int = stops) -> Path:
            nonlocal writes
            writes += 1
            if writes > last and before:
                raise Killed
            replaced = replace(source, target)
            if writes > last:
                raise Killed
            return replaced

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", stopping)
            try:
                build(folder, texts, first)
            except Killed:
                pass
            else:
                break
        left = read_manifest(folder)
        if left is not None and left.complete:
            assert_holds(open_targets(folder), texts)
        else:
            with pytest.raises(BadInput, match=r"not finished|no teacher vectors"):
                open_targets(folder)
        assert_holds(build(folder, texts, second), texts)
        assert first.asked + second.asked <= len(texts) + 4
        assert not [file for file in folder.iterdir() if file.name.startswith(".")]
        stops += 1
    assert stops == 1 + 4 * 4 + 1


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_targets import Teacher, build, some
from pathlib import Path

class Slow(Teacher):
    def role(self, role):
        quick = super().role(role)
        def encode(texts):
            time.sleep(0.02)
            return quick(texts)
        return encode

build(Path(sys.argv[1]), some(400), Slow())
"""


@pytest.mark.parametrize("shards", [1, 6])
def test_kill_nine_and_resume(tmp_path: Path, shards: int) -> None:
    folder = tmp_path / "targets"
    command = [sys.executable, "-c", CHILD, str(folder), str(Path(__file__).parent)]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    try:
        while not (folder / f"{shards:05d}.vectors.npy").exists():
            assert child.poll() is None, "the run ended before it could be killed"
            time.sleep(0.001)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.count >= 4 * shards
    teacher = Teacher()
    assert_holds(build(folder, some(400), teacher), some(400))
    assert teacher.asked == 400 - manifest.count


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[3]), (int(sys.argv[4]),) * 2)
from test_targets import assert_holds, build, some
from pathlib import Path
assert_holds(build(Path(sys.argv[1]), some(100), shard_size=2), some(100))
"""


def run_limited(folder: Path, what: str, limit: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(folder), str(Path(__file__).parent), what, str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    assert run_limited(tmp_path / "targets", "RLIMIT_NOFILE", 64).returncode == 0


def test_a_full_disk_is_said_and_what_is_done_is_kept(tmp_path: Path) -> None:
    ended = run_limited(tmp_path / "targets", "RLIMIT_FSIZE", 4000)
    assert f"{WriteFailed.__name__}: " in ended.stderr
    assert "free some space and run again" in ended.stderr
    manifest = read_manifest(tmp_path / "targets")
    assert manifest is not None
    assert manifest.count > 0
    teacher = Teacher()
    assert_holds(build(tmp_path / "targets", some(100), teacher, shard_size=2), some(100))
    assert teacher.asked == 100 - manifest.count


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
def test_a_bad_vector_names_its_text_and_keeps_what_is_done(
    tmp_path: Path, answer: Any, message: str
) -> None:
    texts = some(14)
    told = Told()
    with pytest.raises(UserError, match=message) as raised:
        build(tmp_path, texts, Teacher({texts[9].text: answer}), progress=told)
    assert repr(texts[9].text) in str(raised.value)
    assert told.lines == [f"8 texts have their vectors in {tmp_path}; running again goes on from there"]
    teacher = Teacher()
    assert_holds(build(tmp_path, texts, teacher), texts)
    assert teacher.asked == 6


@pytest.mark.parametrize(
    "answer", [np.zeros((3, WIDTH)), np.ones(WIDTH), np.ones((4, 0)), np.ones((4, 2, 2))]
)
def test_an_answer_of_the_wrong_shape_is_refused(tmp_path: Path, answer: Any) -> None:
    teacher = Embedder(name="odd", text=lambda _: answer, query=lambda _: answer, document=lambda _: answer)
    texts = [Text(text=f"{i}", kind="query") for i in range(4)]
    with pytest.raises(BadModel, match="one row a text"):
        build_targets(texts, teacher, teacher_id="odd", folder=tmp_path)


@pytest.mark.parametrize("kinds", [("query", "query"), ("query", "document")])
def test_a_teacher_that_changes_its_width_is_refused(tmp_path: Path, kinds: Any) -> None:
    widths = iter((8, 9))

    def encode(texts: Sequence[str]) -> Vectors:
        return np.ones((len(texts), next(widths)), dtype=np.float32)

    teacher = Embedder(name="odd", text=encode, query=encode, document=encode)
    texts = [Text(text=f"{i}", kind=kinds[i // 2]) for i in range(4)]
    with pytest.raises(BadModel, match="8 numbers before and of 9 now"):
        build_targets(
            texts, teacher, teacher_id="odd", folder=tmp_path, shard_size=2 if kinds[0] == kinds[1] else 4
        )


@pytest.mark.parametrize("text", ["", " \n", "half \ud800", 3, None])
def test_a_text_that_is_none_is_refused_by_number(tmp_path: Path, text: Any) -> None:
    teacher = Teacher()
    with pytest.raises(BadInput, match="text 2 "):
        build(tmp_path, [Text(text="good"), Text(text=text)], teacher)
    assert teacher.calls == []


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no texts"):
        build(tmp_path / "none", [])
    with pytest.raises(BadInput, match="shard of 0"):
        build(tmp_path / "zero", some(2), shard_size=0)
    with pytest.raises(BadInput, match="no teacher vectors"):
        open_targets(tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match=r"other files \((none|thesis.tex)\)"):
        build(tmp_path, some(2))
    with pytest.raises(BadInput, match="choose another folder"):
        build(tmp_path / "thesis.tex", some(2))
    build(tmp_path / "good", some(2))
    for damage in ("", "{}", "[]", '{"format": 1'):
        (tmp_path / "good" / MANIFEST).write_text(damage)
        with pytest.raises(BadInput, match="is damaged"):
            build(tmp_path / "good", some(2))


def table(path: Path, vectors: Any, *, column: str = "vector", **columns: Any) -> Path:
    pq.write_table(pa.table({**columns, column: vectors}), path, row_group_size=7)
    return path


def listed(texts: Sequence[Text], kind: Any = None) -> Any:
    rows = [vector(ROLE_OF[text.kind], text.text).tolist() for text in texts]
    return pa.array(rows, type=kind or pa.list_(pa.float32()))


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float64()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float32(), WIDTH),
    ],
    ids=str,
)
def test_a_table_becomes_targets(tmp_path: Path, kind: Any) -> None:
    texts = some(30)
    columns: dict[str, Any] = {"text": [text.text for text in texts], "kind": [text.kind for text in texts]}
    teacher = teacher_from_parquet(
        table(tmp_path / "t.parquet", listed(texts, kind), column="embedding", **columns)
    )
    told = Told()
    targets = teacher.targets(tmp_path / "targets", shard_size=4, progress=told)
    assert_holds(targets, texts)
    assert (targets.normalised, told.done, told.total) == (True, 30, 30)
    assert_holds(teacher.targets(tmp_path / "targets", shard_size=4), texts)
    other = teacher_from_parquet(table(tmp_path / "u.parquet", listed(texts[::-1]), **columns))
    with pytest.raises(BadInput, match="choose another folder"):
        other.targets(tmp_path / "targets", shard_size=4)


def test_a_table_without_kinds_keeps_the_first_of_a_repeat(tmp_path: Path) -> None:
    rows = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]
    teacher = teacher_from_parquet(table(tmp_path / "t.parquet", rows, text=["a", "b", "a"]))
    targets = teacher.targets(tmp_path / "targets")
    assert (targets.texts([0, 1]), targets.kinds([0, 1])) == (["a", "b"], [None, None])
    np.testing.assert_array_equal(targets.vectors([0, 1]), rows[:2])
    assert not targets.normalised


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"vector": [1.0, 2.0, 3.0]}, "row 9 has a vector of another width"),
        ({"vector": [1.0, float("nan")]}, "row 9 has a vector with NaN"),
        ({"vector": [1.0, None]}, "row 9 has a vector with NaN"),
        ({"vector": [1.0, 1e300]}, "row 9 has a vector with NaN"),
        ({"vector": [0.0, 0.0]}, "row 9 has a vector of zeros"),
        ({"vector": None}, "row 9 has no vector"),
        ({"vector": []}, "row 9 has no vector"),
        ({"text": " "}, "row 9 has no text"),
        ({"text": None}, "row 9 has no text"),
        ({"kind": "passage"}, "row 9 has the kind 'passage'"),
    ],
    ids=str,
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"text": f"{i}", "vector": [1.0, i], "kind": None} for i in range(12)]
    rows[8].update(row)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("text", "kind")}
    vectors = pa.array([row["vector"] for row in rows], type=pa.list_(pa.float64()))
    teacher = teacher_from_parquet(table(tmp_path / "t.parquet", vectors, **columns))
    with pytest.raises(BadInput, match=message):
        teacher.targets(tmp_path / "targets", shard_size=4)


def test_a_file_that_is_no_table_of_vectors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 not really")
    for name in ("junk.parquet", "absent.parquet"):
        with pytest.raises(BadInput, match="not a parquet file"):
            teacher_from_parquet(tmp_path / name)
    with pytest.raises(BadInput, match="needs 'text' and 'vector'"):
        teacher_from_parquet(table(tmp_path / "a.parquet", [[1.0]], column="v", text=["a"]))
    with pytest.raises(BadInput, match="must hold lists of numbers"):
        teacher_from_parquet(table(tmp_path / "b.parquet", ["1.0"], text=["a"]))
    empty = table(
        tmp_path / "c.parquet", pa.array([], pa.list_(pa.float32())), text=pa.array([], pa.string())
    )
    with pytest.raises(BadInput, match="no texts"):
        teacher_from_parquet(empty).targets(tmp_path / "targets")


@pytest.mark.parametrize("processes", [1, 2, 3, 7, 23])
def test_shares_are_disjoint_and_together_everything(tmp_path: Path, processes: int) -> None:
    whole = build(tmp_path, some(23))
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
    build(tmp_path, some(23))
    for file in tmp_path.glob("0000[3-5].*"):
        file.unlink()
    assert len(open_share(tmp_path, rank=0, processes=2)) == 11
    with pytest.raises(BadInput, match="is missing or cut short"):
        open_share(tmp_path, rank=1, processes=2)
    with pytest.raises(BadInput, match="fewer texts than there are processes"):
        open_share(tmp_path, rank=0, processes=24)

"""Tasks in files: found by name, read lazily, and rejected in one sentence if they can't be used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trundle.embedder import _plain
from trundle.errors import BadInput
from trundle.evaluate.scoring import find_tasks
from trundle.evaluate.tasks import (
    _TASK_KINDS,
    KnownItemTask,
    _ClassificationTask,
    _ClusteringTask,
    _RetrievalTask,
)


def names(tasks):
    return [f"{task.kind}/{task.name}" for task in tasks]


def test_every_way_to_name_a_task(root: Path):
    assert names(find_tasks(["Likeness"], root)) == ["sts/Likeness"]
    assert names(find_tasks(["sts/Likeness", "Small"], root)) == ["sts/Likeness", "retrieval/Small"]
    assert names(find_tasks(["retrieval"], root)) == ["retrieval/Small"]
    assert names(find_tasks([str(root / "pairs" / "Same.parquet")])) == ["pairs/Same"]
    assert names(find_tasks([str(root / "retrieval" / "Small")])) == ["retrieval/Small"]
    assert names(find_tasks([str(root / "clustering")])) == ["clustering/Groups"]
    assert names(find_tasks(["all"], root)) == [
        "sts/Likeness",
        "retrieval/Small",
        "classification/Animals",
        "clustering/Groups",
        "pairs/Same",
    ]


def test_a_task_named_twice_is_run_once(root: Path):
    assert names(find_tasks(["Small", "all", str(root / "sts" / "Likeness.parquet")], root))[:2] == [
        "retrieval/Small",
        "sts/Likeness",
    ]
    assert len(find_tasks(["Small", "all", "all"], root)) == 5


def test_nothing_is_read_before_a_task_runs(root: Path, words):
    tasks = find_tasks(["sts"], root)
    (root / "sts" / "Likeness.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadInput, match="not a complete parquet file"):
        tasks[0].run(words, seed=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Likenes", "did you mean Likeness"),
        ("st", "did you mean sts"),
        ("qqqq", "there are Likeness, Small, Animals, Groups, Same"),
    ],
)
def test_an_unknown_name_gets_the_nearest_or_all(root: Path, name, message):
    with pytest.raises(BadInput, match=f"{name} is not a task in .*{message}"):
        find_tasks([name], root)


def test_a_name_of_two_tasks_must_say_which(root: Path, write):
    write("sts/Same", {"sentence1": ["a"], "sentence2": ["a"], "score": [1.0]})
    with pytest.raises(BadInput, match="use sts/Same or pairs/Same"):
        find_tasks(["Same"], root)
    assert names(find_tasks(["pairs/Same"], root)) == ["pairs/Same"]


def test_a_file_outside_the_folders_of_kinds_is_rejected(write):
    path = write("elsewhere/File", {"text": ["a"]})
    with pytest.raises(
        BadInput, match="put it in a folder named sts or classification or clustering or pairs"
    ):
        find_tasks([str(path)])


def test_a_root_that_is_not_there_is_rejected(tmp_path: Path):
    with pytest.raises(BadInput, match="nowhere is not a folder"):
        find_tasks(["all"], tmp_path / "nowhere")


def test_names_need_a_root():
    with pytest.raises(BadInput, match="the folder of the tasks with --root"):
        find_tasks(["STS12"])


@pytest.mark.parametrize("nothing", [[], "STS12"])
def test_names_come_in_a_list(root: Path, nothing):
    with pytest.raises(BadInput, match="pass a list of names"):
        find_tasks(nothing, root)


def test_splits(root: Path, words):
    [likeness] = find_tasks(["sts"], root)
    assert (likeness.run(words, seed=1).split, likeness.run(words, seed=1).texts) == ("test", 6)
    [development] = find_tasks(["sts"], root, split="dev")
    assert (development.run(words, seed=1).split, development.run(words, seed=1).texts) == ("dev", 2)
    [groups] = find_tasks(["clustering"], root)
    assert groups.run(words, seed=1).split == "all"
    [pairs] = find_tasks(["pairs"], root)
    scores = pairs.run(words, seed=1)
    assert (scores.split, scores.note) == ("dev", "no test split, dev is used")


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("Likeness", "train", "no rows of the split 'train'; it has dev, test"),
        ("Small", "dev", "no rows of the split 'dev'; it has test"),
        ("Animals", "dev", "no rows of the split 'dev'; it has test, train"),
    ],
)
def test_a_split_without_rows_is_rejected_with_those_there_are(root: Path, words, name, split, message):
    [task] = find_tasks([name], root, split=split)
    with pytest.raises(BadInput, match=message):
        task.run(words, seed=1)


def test_titles_are_put_before_texts(root: Path, words):
    seen: list[str] = []

    def encode(texts):
        seen.extend(texts)
        return words.text(texts)

    [task] = find_tasks(["Small"], root)
    scores = task.run(_plain("listening", encode), seed=1)
    assert set(seen) == {"Cats they purr", "dogs bark", "Rain", "cats purr", "dogs"}
    assert scores.measures == {"ndcg@10": 1.0, "recall@10": 1.0, "recall@100": 1.0, "mrr@10": 1.0}
    assert scores.texts == 5


def test_a_corpus_without_titles_and_judgements_without_splits_work(root: Path, write, words):
    write("retrieval/Bare/corpus", {"_id": [1, 2], "text": ["red", "blue"]})
    write("retrieval/Bare/queries", {"_id": [7], "text": ["blue"]})
    write("retrieval/Bare/qrels", {"query-id": [7, 7, 8], "corpus-id": [2, 1, 1], "score": [1, 0, 1]})
    [task] = find_tasks(["Bare"], root)
    scores = task.run(words, seed=1)
    assert (scores.split, scores.measures["ndcg@10"]) == ("all", 1.0)


def test_queries_of_other_splits_are_no_part_of_a_collection(root: Path, write, words):
    [task] = find_tasks(["Small"], root)
    before = task.run(words, seed=1)
    write(
        "retrieval/Small/queries",
        {
            "_id": ["q1", "q2", "q3"],
            "text": ["cats purr", "dogs", "rain"],
            "split": ["test", "test", "train"],
        },
    )
    after = task.run(words, seed=1)
    assert (after.note, after.fingerprint) == ("", before.fingerprint)


def test_the_fingerprint_is_of_the_rows_used(root: Path, write, words):
    [task] = find_tasks(["Likeness"], root)
    before = task.run(words, seed=1).fingerprint
    rows = {
        "sentence1": ["a cat sat", "a dog ran", "rain fell"],
        "sentence2": ["the cat sat", "stock prices rose", "rain was falling"],
        "score": [5.0, 0.0, 3.0],
        "split": ["test"] * 3,
    }
    write("sts/Likeness", rows)
    assert task.run(words, seed=1).fingerprint == before
    write("sts/Likeness", {**rows, "score": [5.0, 0.0, 3.5]})
    assert task.run(words, seed=1).fingerprint != before


BAD_FILES = [
    (_TASK_KINDS["sts"], {"sentence1": ["a"], "score": [1.0]}, "no column sentence2"),
    (_TASK_KINDS["sts"], {"sentence1": ["a"], "sentence2": [None], "score": [1.0]}, "no sentence2 in row 0"),
    (
        _TASK_KINDS["sts"],
        {"sentence1": ["a"], "sentence2": ["b"], "score": [float("nan")]},
        "score .* not finite",
    ),
    (
        _TASK_KINDS["sts"],
        {"sentence1": ["a"], "sentence2": ["b"], "score": ["high"]},
        "score that is not a number",
    ),
    (_TASK_KINDS["pairs"], {"sentence1": ["a"], "sentence2": ["b"], "label": [1]}, "must be 0 and 1"),
    (_ClassificationTask, {"text": ["a"], "label": ["x"]}, "no column split"),
    (
        _ClassificationTask,
        {"text": ["a", "b"], "label": ["x", "x"], "split": ["train", "test"]},
        "only one label",
    ),
    (_ClassificationTask, {"text": ["a"], "label": ["x"], "split": ["test"]}, "no rows of the split 'train'"),
    (_ClusteringTask, {"text": ["a", "b"], "label": ["x", "x"]}, "fewer than two labels"),
]


@pytest.mark.parametrize(("kind", "columns", "message"), BAD_FILES)
def test_a_file_that_cannot_be_scored_is_rejected(write, words, kind, columns, message):
    task = kind(name="Bad", path=write("bad/Bad", columns))
    with pytest.raises(BadInput, match=message):
        task.run(words, seed=1)


def test_an_id_used_twice_is_rejected(root: Path, write, words):
    write("retrieval/Small/corpus", {"_id": ["d1", "d1"], "title": ["", ""], "text": ["a", "b"]})
    with pytest.raises(BadInput, match="has the id 'd1' twice"):
        _RetrievalTask(name="Small", path=root / "retrieval" / "Small").run(words, seed=1)


def test_a_retrieval_folder_without_its_queries_is_rejected(root: Path, words):
    (root / "retrieval" / "Small" / "queries.parquet").unlink()
    [task] = find_tasks(["Small"], root)
    with pytest.raises(BadInput, match=re.escape("queries.parquet does not exist")):
        task.run(words, seed=1)


def test_known_items_share_equal_queries_and_documents():
    vectors = {"q": (1, 0), "r": (0, 1), "a": (1, 0), "b": (1, 0.1), "c": (0, 1)}
    embedder = _plain("table", lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32))
    task = KnownItemTask(name="known", pairs=[("q", "a"), ("q", "b"), ("r", "c"), ("r", "c")])
    scores = task.run(embedder, seed=1)
    assert scores.measures["ndcg@10"] == pytest.approx(1)
    assert scores.texts == 5
    missed = KnownItemTask(name="known", pairs=[("q", "c"), ("r", "b")]).run(embedder, seed=1)
    assert missed.measures["mrr@10"] == 0.5


def test_known_items_are_not_left_out_for_holding_their_query():
    scores = KnownItemTask(name="known", pairs=[("a", "a a"), ("b", "b b")]).run(
        _plain("letters", lambda texts: np.array([[t.count("a"), t.count("b")] for t in texts], np.float32)),
        seed=1,
    )
    assert (scores.measures["ndcg@10"], scores.note) == (1.0, "")


def test_no_known_items_is_rejected(words):
    with pytest.raises(BadInput, match="nothing has no query"):
        KnownItemTask(name="nothing", pairs=[]).run(words, seed=1)


def test_evaluation_and_workers_do_not_need_torch():
    code = (
        "import sys; import trundle.evaluate.comparison, trundle.scale.shard_writer; "
        "print({'torch', 'sentence_transformers', 'transformers', 'mteb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

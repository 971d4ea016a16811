"""What a search keeps with vectors cut short and coarsened: a student's queries beside its teacher's, in the teacher's index.

    python benchmarks/shortened.py TEACHER STUDENT --tasks DIR [--sets CACM,SciFact] [--vectors FOLDER] -o shortened.json

LEAF's figure 6. The documents are the teacher's for both, queries and documents are shortened alike, and each score is also
a share of the same model's with whole vectors. Nothing is trained for it: bytes have the ranges that `align` kept with the
student. `trundle evaluate STUDENT --teacher TEACHER --inherit` measures the student's own index as well, and has to encode
all documents twice; here they are encoded once, and kept in FOLDER in float16, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Embedder, Encode, Vectors, asymmetric
from trundle.evaluate.scoring import Memory, find_tasks
from trundle.evaluate.shortening import (
    _PRECISIONS,
    _by_tasks,
    _bytes_of,
    _Ranges,
    _Score,
    _with_shortened,
    read_ranges,
)
from trundle.export.open import open_embedder
from trundle.records import versions

DIMENSIONS = "512,256,128,64"
AT_ONCE = 512
KEYS, VECTORS = "keys.npy", "vectors.npy"
WHO = ("teacher", "student")
Table = dict[bytes, NDArray[np.float16]]
"""Vectors by the hash of their text."""


def key_of(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def read_table(folder: Path) -> Table:
    if not (folder / KEYS).is_file():
        return {}
    keys: NDArray[np.uint64] = np.load(folder / KEYS)
    return {key.tobytes(): vector for key, vector in zip(keys, np.load(folder / VECTORS), strict=True)}


def write_table(folder: Path, table: Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / KEYS, np.frombuffer(b"".join(table), dtype=np.uint64))
    np.save(folder / VECTORS, np.stack(list(table.values())))


def kept(encode: Encode, folder: Path) -> Encode:
    """The same function, asked only for what the folder does not hold yet."""
    table = read_table(folder)

    def remembered(texts: Sequence[str]) -> Vectors:
        new = sorted({text for text in texts if key_of(text) not in table}, key=len)
        for start in range(0, len(new), AT_ONCE):
            part = new[start : start + AT_ONCE]
            table.update(zip(map(key_of, part), encode(part).astype(np.float16), strict=True))
            write_table(folder, table)
            print(f"{folder.name}: {start + len(part)} of {len(new)}", flush=True)
        return np.stack([table[key_of(text)] for text in texts]).astype(np.float32)

    return remembered


def with_store(model: Embedder, folder: str | None, who: str) -> Embedder:
    """A model whose queries and documents are kept, each in a folder of their own as prompts may differ."""
    if folder is None:
        return Memory().remember(model, who)
    place = Path(folder)
    return replace(
        model,
        query=kept(model.query, place / f"{who}-queries"),
        document=kept(model.document, place / f"{who}-documents"),
    )


def measure(
    teacher: Embedder, student: Embedder, score: _Score, sizes: Sequence[int], ranges: _Ranges
) -> list[dict[str, Any]]:
    """Scores of both in the teacher's index for each length and precision, whole float32 vectors first."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for precision in _PRECISIONS:
            index, pupil = (_with_shortened(one, size, precision, ranges) for one in (teacher, student))
            tasks = dict(zip(WHO, (score(index), score(asymmetric(pupil, index))), strict=True))
            scores = {who: statistics.fmean(tasks[who].values()) for who in WHO}
            whole = rows[0]["scores"] if rows else scores
            row = {"dimensions": size, "precision": precision, "bytes": _bytes_of(size, precision)}
            rows.append(
                row
                | {"scores": scores, "kept": {who: scores[who] / whole[who] for who in WHO}, "tasks": tasks}
            )
            shares = ", ".join(f"{who} {100 * rows[-1]['kept'][who]:5.1f}%" for who in WHO)
            print(f"{size:4} × {precision:7} {row['bytes']:5} bytes: {shares}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("student", help="a folder that `align` wrote")
    parser.add_argument("--tasks", required=True, help="folder with a folder `retrieval`")
    parser.add_argument("--sets", help="comma-separated; all searches by default")
    parser.add_argument("--dimensions", default=DIMENSIONS)
    parser.add_argument("--vectors", metavar="FOLDER", help="keeps every vector for the next run")
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    names = [f"retrieval/{name}" for name in options.sets.split(",")] if options.sets else ["retrieval"]
    tasks = find_tasks(names, options.tasks)
    ranges = read_ranges(options.student)
    if ranges is None:
        raise SystemExit(f"{options.student} keeps no ranges of its teacher's vectors; align it")
    teacher, student = (
        with_store(open_embedder(getattr(options, who))[0], options.vectors, who) for who in WHO
    )
    sizes = [len(ranges.lowest), *map(int, options.dimensions.split(","))]
    content = {
        "teacher": options.teacher,
        "student": options.student,
        "calibration": ranges.vectors,
        "sets": [task.name for task in tasks],
        "rows": measure(teacher, student, _by_tasks(tasks), sizes, ranges),
        "versions": dict(versions()),
    }
    Path(options.output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Retrieval with fewer bits: the precisions of an index, and shortened vectors of a student and its teacher.

    python benchmarks/retrieval.py codes MODEL --data DIR [--sets SciFact,ArguAna] [--graph]
    python benchmarks/retrieval.py shortened TEACHER STUDENT --data DIR -o shortened.json

codes      recall@10 against exact search, memory read per search, and the median time of one query, for each
           precision. --graph searches through a usearch graph however small the set is
shortened  LEAF's figure 6: documents are encoded by the teacher, queries by the teacher or by the student,
           and both are truncated and quantised alike. Scores are also shares of the same model's score with
           full vectors. Byte ranges are those that `align` kept with the student
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import harness
from trundle.embedder import asymmetric
from trundle.evaluate.retrieval import nearest
from trundle.evaluate.scoring import find_tasks
from trundle.evaluate.shortening import _PRECISIONS, _by_tasks, _bytes_of, _with_shortened, read_ranges
from trundle.export.open import open_embedder, open_encoder
from trundle.index.base import Wanted, _Precision
from trundle.index.embedded import _code_width, _create_embedded, _EmbeddedStore
from trundle.records import versions
from trundle.teacher.targets import HeldOutVectors

CODES: tuple[_Precision, ...] = ("float", "int8", "binary")
SETS = "SciFact,ArguAna,squadshifts,CACM,Cranfield,msmarco-mini"
QUERIES = 300


def codes(options: argparse.Namespace) -> None:
    encoder = open_encoder(options.models[0])
    for name in harness.names(options.sets):
        folder = options.data / "retrieval" / name
        rows = pq.read_table(folder / "corpus.parquet").to_pylist()[: options.documents]
        texts = list(dict.fromkeys(f"{row['title']} {row['text']}".strip() for row in rows))
        asked = [row["text"] for row in pq.read_table(folder / "queries.parquet").to_pylist()][:QUERIES]
        documents, queries = encoder.encode_document(texts), encoder.encode_query(asked)
        truth = [{texts[place] for place in best} for best in nearest(queries, documents, 10)]
        with tempfile.TemporaryDirectory() as scratch:
            stores = {}
            for precision in CODES:
                place = Path(scratch) / precision
                _create_embedded(
                    place, Wanted(model=name, dimensions=encoder.dimensions, precision=precision)
                )
                stores[precision] = _EmbeddedStore(place, exact_up_to=0 if options.graph else 10**9)
                stores[precision].add(texts, documents)
                stores[precision].finish()
            times: dict[str, list[float]] = {precision: [] for precision in CODES}
            hits: dict[str, list[float]] = {precision: [] for precision in CODES}
            for query, best in zip(queries, truth, strict=True):
                for precision, store in stores.items():
                    began = time.perf_counter()
                    row = store.search(query[None], 10)[0]
                    times[precision].append(time.perf_counter() - began)
                    hits[precision].append(len(best & {one.text for one in row}) / 10)
            for precision, store in stores.items():
                size = len(texts) * _code_width(encoder.dimensions, precision) / 1e6
                print(
                    f"{name:16}{precision:8}{len(texts):8} texts  recall@10 {np.mean(hits[precision]):.4f}  "
                    f"{size:8.2f} MB searched  {1000 * statistics.median(times[precision]):8.2f} ms a query"
                )
                store.close()


def shortened(options: argparse.Namespace) -> None:
    tasks = find_tasks([f"retrieval/{name}" for name in harness.names(options.sets)], options.data)
    ranges = read_ranges(options.models[1])
    if ranges is None:
        raise SystemExit(f"{options.models[1]} has no ranges of its teacher's vectors; align it first")
    # Every text is encoded once, for all sizes and precisions.
    opened = {
        who: HeldOutVectors().remember(open_embedder(model)[0], who)
        for who, model in zip(("teacher", "student"), options.models, strict=True)
    }
    score = _by_tasks(tasks)
    rows: list[harness.Json] = []
    for size in (len(ranges.lowest), *harness.numbers(options.dimensions)):
        for precision in _PRECISIONS:
            index, pupil = (_with_shortened(one, size, precision, ranges) for one in opened.values())
            found = {"teacher": score(index), "student": score(asymmetric(pupil, index))}
            means = {who: statistics.fmean(own.values()) for who, own in found.items()}
            full = rows[0]["scores"] if rows else means
            row: harness.Json = {
                "dimensions": size,
                "precision": precision,
                "bytes": _bytes_of(size, precision),
            }
            row |= {"scores": means, "kept": {who: means[who] / full[who] for who in means}, "tasks": found}
            rows.append(row)
            print(f"{size:4} × {precision:7} {row['bytes']:5} bytes: {row['kept']}", flush=True)
    content = {"models": options.models, "calibration": ranges.vectors, "sets": [task.name for task in tasks]}
    harness.write_json(options.output, content | {"rows": rows, "versions": dict(versions())})


def main() -> None:
    parser = harness.make_parser(__doc__, "codes", "shortened")
    parser.add_argument("models", nargs="+", help="a model, or a teacher and its student")
    parser.add_argument("--data", type=Path, required=True, help="folder with retrieval/ in it")
    parser.add_argument("--sets", default=SETS)
    parser.add_argument("--documents", type=int, default=10_000, help="codes: at most this many per set")
    parser.add_argument("--graph", action="store_true", help="codes")
    parser.add_argument("--dimensions", default="512,256,128,64", help="shortened")
    parser.add_argument("-o", "--output", help="shortened")
    options = parser.parse_args()
    (codes if options.what == "codes" else shortened)(options)


if __name__ == "__main__":
    main()

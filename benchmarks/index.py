"""Searching fewer bits first: recall@10 against exact search, memory and speed, on retrieval sets.

    python benchmarks/index.py MODEL --data FOLDER [--sets SciFact,ArguAna] [--graph]

Each set's documents are embedded once and stored three ways. recall@10 is the share of the ten nearest by full vectors
that each way finds; memory is what is read on every search (full vectors are on disk, only candidates are looked up);
milliseconds are medians of one query at a time, in turns. `--graph` searches through a usearch graph however small the set.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow.parquet as pq

from trundle.evaluate.retrieval import nearest
from trundle.export.open import open_encoder
from trundle.index.base import Wanted, _Precision
from trundle.index.codes import _code_width
from trundle.index.embedded import _create_embedded, _EmbeddedStore

PRECISIONS: tuple[_Precision, ...] = ("float", "int8", "binary")
MOST_QUERIES = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="The folder with retrieval/ in it.")
    parser.add_argument("--sets", default="SciFact,ArguAna,squadshifts,CACM,Cranfield,msmarco-mini")
    parser.add_argument("--documents", type=int, default=10_000, help="At most so many of each set.")
    parser.add_argument("--graph", action="store_true")
    given = parser.parse_args()
    encoder = open_encoder(given.model)
    print(f"{'':16}{'':8}{'texts':>8}{'recall@10':>11}{'MB searched':>13}{'ms a query':>12}")
    for name in given.sets.split(","):
        folder = given.data / "retrieval" / name
        rows = pq.read_table(folder / "corpus.parquet").to_pylist()[: given.documents]
        texts = list(dict.fromkeys(f"{row['title']} {row['text']}".strip() for row in rows))
        asked = [row["text"] for row in pq.read_table(folder / "queries.parquet").to_pylist()][:MOST_QUERIES]
        documents, queries = encoder.encode_document(texts), encoder.encode_query(asked)
        truth = nearest(queries, documents, 10)
        with tempfile.TemporaryDirectory() as scratch:
            stores = {}
            for precision in PRECISIONS:
                place = Path(scratch) / precision
                _create_embedded(
                    place, Wanted(model=name, dimensions=encoder.dimensions, precision=precision)
                )
                stores[precision] = _EmbeddedStore(place, exact_up_to=0 if given.graph else 10**9)
                stores[precision].add(texts, documents)
                stores[precision].finish()
            times: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
            found: dict[str, list[set[str]]] = {precision: [] for precision in PRECISIONS}
            for query in queries:
                for precision, store in stores.items():
                    started = time.perf_counter()
                    row = store.search(query[None], 10)[0]
                    times[precision].append(time.perf_counter() - started)
                    found[precision].append({one.text for one in row})
            for precision in PRECISIONS:
                hits = [
                    len(row & {texts[place] for place in best}) / 10
                    for row, best in zip(found[precision], truth, strict=True)
                ]
                size = len(texts) * _code_width(encoder.dimensions, precision) / 1e6
                print(
                    f"{name:16}{precision:8}{len(texts):8}{np.mean(hits):11.4f}{size:13.2f}"
                    f"{1000 * median(times[precision]):12.2f}"
                )
                stores[precision].close()


if __name__ == "__main__":
    main()

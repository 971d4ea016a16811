"""What an index alone teaches, what its maker adds, and how well the index alone predicts the result.

    python benchmarks/index_teacher.py TEACHER STUDENT --documents FILE --queries FILE -o results/
        [--rows 20000] [--labelled 5000] [--pieces N] [--steps 0,1000,4000] [--batch-size 32] [--device cpu]

FILE is a parquet file with a column `text`, cut at --longest characters. The teacher encodes --rows
documents: that is the index. If FILE has a column `vector`, those are the teacher's vectors, nothing of it is
encoded, and longer texts are left out. For each number of steps, the student is aligned to

    rows      the vectors of the index alone
    queries   these, and --labelled queries that the teacher labels
    all       these, and sentences and spans of the documents that the teacher labels

Rows and queries of a tenth each are held out. The label-free measures ask held-out rows (agreement@10) and
their first sentences (known item). The true one asks held-out queries: how many of the teacher's ten results
in the index the student finds. The last lines correlate them over all students.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

Json = dict[str, Any]
HELD_OUT = 0.1
MOST_ASKED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--labelled", type=int, default=5000)
    parser.add_argument("--pieces", type=int, default=None, help="at most so many; default: all")
    parser.add_argument("--longest", type=int, default=2000, help="characters of a text")
    parser.add_argument("--steps", default="0,1000,4000")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.output.mkdir(parents=True, exist_ok=True)
    show(run(options))


def read(path: Path, count: int, longest: int, encode: Any) -> Json:
    """Draw distinct texts of a file, and return them with their vectors."""
    import pyarrow.parquet as pq

    from trundle.data.sampling import sample

    table = pq.read_table(path)
    known = "vector" in table.column_names
    found: dict[str, int] = {}
    for place, text in enumerate(table.column("text").to_pylist()):
        words = text if len(text) <= longest else text[:longest].rsplit(" ", 1)[0]
        if len(words) > 20 and (words == text or not known):
            found[words] = place
    chosen: list[str] = sample(found, count, seed=0)
    if not known:
        return dict(zip(chosen, encode(chosen), strict=True))
    rows = table.column("vector").take([found[text] for text in chosen]).combine_chunks()
    return dict(zip(chosen, rows.flatten().to_numpy().reshape(len(chosen), -1), strict=True))


def run(options: argparse.Namespace) -> list[Json]:
    import numpy as np

    from trundle.data.sampling import augmented
    from trundle.data.texts import Text
    from trundle.model.encode import labelling_embedder
    from trundle.model.load import load

    teacher = labelling_embedder(load(options.teacher), name="teacher")
    documents_of = read(options.documents, options.rows, options.longest, teacher.document)
    asked_for = round(options.labelled / (1 - HELD_OUT))
    queries_of = read(options.queries, asked_for, options.longest, teacher.query)
    rows, queries = list(documents_of), list(queries_of)
    asked = range(0, len(rows), round(1 / HELD_OUT))
    own, trained = set(asked), queries[: options.labelled]
    documents = [Text(text=row, kind="document") for place, row in enumerate(rows) if place not in own]
    made = augmented(documents, ("sentences", "spans"), seed=0)
    new = (text for text in made if text.text not in documents_of)
    pieces = {text.text: text for text in islice(new, options.pieces)}
    index = np.stack(list(documents_of.values()))
    vectors = documents_of | queries_of
    vectors |= dict(zip(pieces, teacher.document(list(pieces)), strict=True))
    labelled = [Text(text=text, kind="query") for text in trained]
    taught = {
        "rows": documents,
        "queries": [*documents, *labelled],
        "all": [*documents, *labelled, *pieces.values()],
    }
    held_out = queries[options.labelled :][:MOST_ASKED]
    truth = [vectors[query] for query in held_out]
    tables = {
        name: write(texts, vectors, options.output / f"{name}.parquet") for name, texts in taught.items()
    }
    results = []
    for steps in map(int, options.steps.split(",")):  # all three after each, so that a part can be compared
        for name, table in tables.items():
            began = time.perf_counter()
            student = align(options, table, steps)
            aligned = time.perf_counter() - began
            found = measure(student, rows, index, list(asked)[:MOST_ASKED], held_out, truth)
            facts = {"taught by": name, "texts": len(taught[name]), "steps": steps, "s": round(aligned, 1)}
            results.append(facts | found)
            print(json.dumps(results[-1]), flush=True)
            (options.output / "index_teacher.json").write_text(json.dumps(results, indent=1))
    return results


def write(texts: Sequence[Any], vectors: Json, path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "text": [text.text for text in texts],
        "vector": [vectors[text.text] for text in texts],
        "kind": [text.kind for text in texts],
    }
    pq.write_table(pa.table(columns), path)
    return str(path)


def align(options: argparse.Namespace, table: str, steps: int) -> Any:
    from trundle.model.encode import embedder
    from trundle.pipeline.compress import run_recipe
    from trundle.pipeline.run import Request
    from trundle.recipe import make_recipe

    wanted = {"teacher": table, "steps": steps, "batch_size": options.batch_size, "schedule": "cosine"}
    made = run_recipe(Request(source=options.student), make_recipe([("align", wanted)], name="align"))
    return embedder(made.model, name="student")


def measure(
    student: Any, rows: Sequence[str], index: Any, asked: Sequence[int], queries: Sequence[str], truth: Any
) -> Json:
    import numpy as np

    from trundle.embedder import top_agreement
    from trundle.evaluate.index_check import _score_rows
    from trundle.evaluate.retrieval import nearest
    from trundle.index.rows import SearchedRows

    searched = SearchedRows(index="rows", texts=rows, vectors=index, total=len(rows))
    free = _score_rows(student, searched, asked)
    best, found = (nearest(each, index, 10) for each in (np.stack(truth), student.query(queries)))
    return {
        "rows agree": round(free.agreement, 4),
        "known item": None if free.known_item is None else round(free.known_item, 4),
        "queries agree": round(top_agreement(best, found), 4),
        "best found": round(float((found == best[:, :1]).any(axis=1).mean()), 4),
    }


def show(results: Sequence[Json]) -> None:
    from scipy.stats import pearsonr, spearmanr

    names = list(results[0])
    print("| " + " | ".join(names) + " |\n|---|" + "--:|" * (len(names) - 1))
    for row in results:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    for name in ("rows agree", "known item"):
        pairs = [(row[name], row["queries agree"]) for row in results if row[name] is not None]
        if len(pairs) > 2:
            ours, theirs = zip(*pairs, strict=True)
            linear, ranks = pearsonr(ours, theirs).statistic, spearmanr(ours, theirs).statistic
            print(f"{name} and queries agree: Pearson {linear:.3f}, Spearman {ranks:.3f}, n = {len(pairs)}")


if __name__ == "__main__":
    main()

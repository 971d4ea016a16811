"""What is left of a model's scores when tokens go: every score and every fate of the lost tokens, cut by cut.

    python benchmarks/vocabulary.py MODEL --data DIR -o vocabulary.json
    python benchmarks/vocabulary.py MODEL --data DIR --removed 20 35 --scores tfidf frequency --align 300 -o few.json

DIR holds the tasks and texts (classification/, retrieval/, sts/, triplets/, texts/). Tokens are chosen, and `align` learns, by
training texts of the same domain only: the train split, for retrieval also the documents judged for training queries; for
STSBenchmark general texts; for finance, nine of ten rows of triplets/finance, the tenth being the search that is measured.
A text that is read exactly as before has exactly the vector it had, so only the others are encoded again. With
`--precision bf16` all of it, the whole model too, is computed in bf16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus
from trundle.data.sampling import fingerprint, sample
from trundle.data.texts import Text, read_texts
from trundle.embedder import Vectors, _plain
from trundle.errors import ImpossibleCut
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.evaluate.tasks import Task
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.model.cost import cost
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.model.token_map import has_token_map
from trundle.recipe import _make_options

SCORES = ("tfidf", "frequency", "attention", "cluster", "random")
FATES = ("decompose", "cluster", "unk")
REMOVED = (5, 10, 15, 20, 25, 35)
DOMAINS = ("Banking77", "SciFact", "STSBenchmark", "finance")
GENERAL_TEXTS = 30_000
TENTH = 10
BATCH = 32
"""What align takes at a time by default: each of its texts is seen once."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A task, and training texts like its own."""

    name: str
    task: Task
    texts: list[str]


def corpus_of(texts: Sequence[str]) -> Corpus:
    """All of it to learn from, but a twentieth to choose the best checkpoint by."""
    facts = ({"fingerprint": fingerprint(texts), "texts": len(texts)},)

    def part(validates: bool) -> Iterator[Text]:
        return (Text(text=text) for row, text in enumerate(texts) if (row % 20 == 0) is validates)

    return Corpus(
        train=lambda: part(False),
        validation=lambda: part(True),
        held_out=lambda: iter(()),
        facts=lambda: facts,
    )


def read_domain(name: str, data: Path, scratch: Path) -> Domain:
    if name == "finance":
        return finance(data, scratch)
    task = find_tasks([name], data)[0]
    if name == "SciFact":
        folder = data / "retrieval" / name
        judged = pq.read_table(folder / "qrels.parquet", filters=[("split", "=", "train")])[
            "corpus-id"
        ].to_pylist()
        documents = pq.read_table(folder / "corpus.parquet", filters=[("_id", "in", judged)]).to_pylist()
        texts = [text.text for text in read_texts(str(folder / "queries.parquet"))]
        return Domain(
            name=name, task=task, texts=texts + [f"{row['title']} {row['text']}" for row in documents]
        )
    if name == "STSBenchmark":
        sources = [str(path) for path in sorted((data / "texts").glob("*.parquet"))]
        general = sample((text.text for text in read_texts(sources)), GENERAL_TEXTS, seed=0)
        return Domain(name=name, task=task, texts=general)
    texts = [text.text for text in read_texts(str(data / "classification" / f"{name}.parquet"))]
    return Domain(name=name, task=task, texts=texts)


def finance(data: Path, scratch: Path) -> Domain:
    """Every tenth question or headline searches all passages of those rows; nothing in them is learned from."""
    rows = pq.read_table(data / "triplets" / "finance.parquet").to_pylist()
    measured, others = rows[::TENTH], [row for number, row in enumerate(rows) if number % TENTH]
    passages = list(dict.fromkeys(row[column] for row in measured for column in ("positive", "negative")))
    place = {passage: str(number) for number, passage in enumerate(passages)}
    folder = scratch / "retrieval" / "finance"
    folder.mkdir(parents=True)
    numbers = [str(number) for number in range(len(measured))]
    tables: dict[str, dict[str, list[Any]]] = {
        "corpus": {"_id": list(place.values()), "title": [""] * len(place), "text": passages},
        "queries": {
            "_id": numbers,
            "text": [row["query"] for row in measured],
            "split": ["test"] * len(measured),
        },
        "qrels": {
            "query-id": numbers,
            "corpus-id": [place[row["positive"]] for row in measured],
            "score": [1] * len(measured),
            "split": ["test"] * len(measured),
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    kept_back = {*passages, *(row["query"] for row in measured)}
    texts = [row[column] for row in others for column in ("query", "positive", "negative")]
    free = [text for text in dict.fromkeys(texts) if text not in kept_back]
    return Domain(name="finance", task=find_tasks([str(folder)])[0], texts=free)


class Reuse:
    """The whole model's vectors, each computed once, and a cut model that is asked only for texts it reads otherwise."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        self._encode = embedder(model).text
        self._known: dict[str, Vectors] = {}

    def whole(self, texts: Sequence[str]) -> Vectors:
        """By the whole model."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._encode(new), strict=True))
        return np.stack([self._known[text] for text in texts])

    def changed(self, small: SentenceTransformer, kept: Sequence[int], texts: Sequence[str]) -> list[int]:
        """Which texts the cut model reads as other tokens."""
        before = self.model.tokenizer(list(texts), truncation=True, max_length=self.model.max_seq_length)[
            "input_ids"
        ]
        if has_token_map(small):
            there = set(kept)
            return [row for row, ids in enumerate(before) if not there.issuperset(ids)]
        after = small.tokenizer(list(texts), truncation=True, max_length=small.max_seq_length)["input_ids"]
        return [
            row
            for row, (old, new) in enumerate(zip(before, after, strict=True))
            if old != [kept[number] for number in new]
        ]

    def through(self, small: SentenceTransformer, kept: Sequence[int], texts: Sequence[str]) -> Vectors:
        """By the cut model, where it makes a difference."""
        vectors = self.whole(texts)
        rows = self.changed(small, kept, texts)
        if rows:
            vectors[rows] = embedder(small).text([texts[row] for row in rows])
        return vectors


def score_of(domain: Domain, encoder: Any, precision: str) -> float:
    with torch.autocast(
        "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, enabled=precision == "bf16"
    ):
        return evaluate(encoder, [domain.task])[0].score


def measure_row(
    domain: Domain, reuse: Reuse, options: dict[str, Any], arguments: argparse.Namespace, whole: float
) -> Iterator[dict[str, Any]]:
    """The cut, and the cut after a short `align`."""
    model, tool = reuse.model, METHODS["vocabulary"]
    context = Context(original=model, corpus=corpus_of(domain.texts))
    began = time.monotonic()
    plan = tool.plan(model, _make_options(tool, options), context)
    small = tool.apply(model, plan, context).model
    row = {
        "domain": domain.name,
        "score": options["score"],
        "oov": options["oov"],
        "characters": options["characters"],
        "removed": round(1 - cost(small).parameters / cost(model).parameters, 4),
        "kept": len(plan.kept),
        "coverage": plan.coverage,
        "seconds": round(time.monotonic() - began, 1),
        "whole": whole,
    }
    cut_encoder = _plain("cut", lambda texts: reuse.through(small, plan.kept, texts))
    encoders, steps = {0: cut_encoder}, arguments.align
    if steps:
        align = METHODS["align"]
        wish = _make_options(align, {"steps": steps, "start": "keep", "texts": BATCH * steps})
        healed = align.apply(small, align.plan(small, wish, context), context).model
        encoders[steps] = embedder(healed, name="healed")
    for after, encoder in encoders.items():
        found = score_of(domain, encoder, arguments.precision)
        yield row | {"value": round(found, 5), "retention": round(found / whole, 5), "align": after}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True, type=Path, help="folder of the tasks and texts")
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--removed", nargs="+", type=int, default=REMOVED, help="percent of all parameters")
    parser.add_argument("--scores", nargs="+", default=SCORES)
    parser.add_argument("--characters", default="auto", choices=("auto", "all", "seen"))
    parser.add_argument("--oov", nargs="+", default=FATES, choices=FATES)
    parser.add_argument(
        "--align", type=int, default=0, help="steps of align after each cut, measured beside it"
    )
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--output", "-o", required=True, type=Path)
    arguments = parser.parse_args()
    model, rows = load(arguments.model), []
    reuse = Reuse(model)
    line = "{domain:13} {score:10} {oov:10} {removed:>8} {kept:>7} {align:>6} {value:>8} {retention:>10} {seconds:>8}"
    print(
        line.format(
            **{
                name: name
                for name in (
                    "domain",
                    "score",
                    "oov",
                    "removed",
                    "kept",
                    "align",
                    "value",
                    "retention",
                    "seconds",
                )
            }
        )
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.domains:
            domain = read_domain(name, arguments.data, Path(scratch))
            whole = score_of(domain, _plain("whole", reuse.whole), arguments.precision)
            for removed, score, oov in (
                (removed, score, oov)
                for removed in arguments.removed
                for score in arguments.scores
                for oov in arguments.oov
            ):
                share = str(1 - Fraction(removed, 100))
                options = {"parameters": share, "score": score, "oov": oov}
                options["characters"] = arguments.characters
                try:
                    for row in measure_row(domain, reuse, options, arguments, whole):
                        rows.append(row)
                        shown = {"removed": f"{row['removed']:.1%}", "retention": f"{row['retention']:.2%}"}
                        print(line.format(**row | shown), flush=True)
                except ImpossibleCut as error:
                    print(f"{name} {score} {oov} {removed}%: {error}", flush=True)
                arguments.output.write_text(json.dumps({"model": arguments.model, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

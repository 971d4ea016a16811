"""The vocabulary paper's second table: how few of a tokenizer's tokens a task's texts use, and how unevenly.

    python benchmarks/vocabulary_tokens.py MODEL --data DIR -o tokens.json

DIR holds the tasks (classification/, pairs/, sts/). Per task, for the rows of `train` and for those it is measured on
(`test`, or `dev` where there is no test), without special tokens:

tokens    how many different tokens occur
share     of the tokenizer's vocabulary these are
top fifth what share of all occurrences the most frequent fifth makes: a fifth of the tokens that occur *in these rows*
unseen    what share of the different tokens of the measured rows never occurs in `train`

The paper says "most frequent 20% of vocabulary", but a fifth of the whole vocabulary (6,104 of 30,522 tokens) is more
than all tokens that occur in its CoLA, and would make 100% there, where it has 85.12. Likewise for unseen tokens: as a
share of occurrences RTE would have 3.6% here, as a share of different tokens it has 11.5%, beside the paper's 12.12.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from trundle.methods.vocabulary.scores import count_tokens, tokenised
from trundle.model.tokenizer import _backend_of

FILES = {
    "SST2": "classification/SST2.parquet",
    "CoLA": "classification/CoLA.parquet",
    "MRPC": "pairs/MRPC.parquet",
    "RTE": "pairs/RTE.parquet",
    "QNLI": "pairs/QNLI.parquet",
    "Quora": "pairs/Quora.parquet",
    "STSBenchmark": "sts/STSBenchmark.parquet",
}
COLUMNS = ("text", "sentence1", "sentence2")
FIFTH = 5
Counts = NDArray[np.int64]


def top_fifth(counts: Counts) -> float:
    """The share of all occurrences that the most frequent fifth of the tokens that occur makes."""
    falling = np.sort(counts[counts > 0])[::-1]
    return float(falling[: round(len(falling) / FIFTH)].sum() / falling.sum())


def unseen(measured: Counts, train: Counts) -> float:
    """The share of the different tokens of the measured rows that do not occur in the training rows."""
    return float(((measured > 0) & (train == 0)).sum() / (measured > 0).sum())


def texts_by_split(file: Path) -> dict[str, list[str]]:
    """All texts of each split; a pair has two."""
    found: dict[str, list[str]] = {}
    for row in pq.read_table(file).to_pylist():
        found.setdefault(row["split"], []).extend(row[column] for column in COLUMNS if column in row)
    return found


def statistics_of(counts: Counts, texts: int) -> dict[str, Any]:
    different = int((counts > 0).sum())
    return {
        "texts": texts,
        "tokens": different,
        "share": round(100 * different / len(counts), 2),
        "top_fifth": round(100 * top_fifth(counts), 2),
    }


def task_row(task: str, texts: dict[str, list[str]], tokenizer: Tokenizer) -> dict[str, Any]:
    """One line of the table; a task without training rows has only half of it."""
    split = "test" if "test" in texts else "dev"
    size = tokenizer.get_vocab_size()
    counts = {
        name: count_tokens(tokenised(tokenizer, texts[name]), size).occurrences
        for name in ("train", split)
        if name in texts
    }
    row: dict[str, Any] = {"task": task, "split": split, "vocabulary": size, "train": None, "unseen": None}
    row["measured"] = statistics_of(counts[split], len(texts[split]))
    if "train" in counts:
        row["train"] = statistics_of(counts["train"], len(texts["train"]))
        row["unseen"] = round(100 * unseen(counts[split], counts["train"]), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="whose tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="folder of the tasks")
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()
    tokenizer, rows = _backend_of(AutoTokenizer.from_pretrained(arguments.model)), []
    for task in FILES:
        row = task_row(task, texts_by_split(arguments.data / FILES[task]), tokenizer)
        rows.append(row)
        for name, part in (("train", row["train"]), (row["split"], row["measured"])):
            if part:
                print(
                    f"{task:13} {name:6} {part['texts']:>7,} texts {part['tokens']:>7,} tokens, {part['share']:5.2f}% "
                    f"of the vocabulary; top fifth {part['top_fifth']:.2f}%"
                )
        if row["unseen"] is not None:
            print(f"{task:13} {row['unseen']:.2f}% of these are not in train")
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

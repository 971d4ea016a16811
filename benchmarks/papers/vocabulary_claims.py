"""The vocabulary paper's table 1 in small: what a fifth of all parameters costs when they are taken from the vocabulary.

    python benchmarks/papers/vocabulary_claims.py --glue GLUE --more GLUE45 --without-training FILE… --hardware "two cores" --versions torch=2.13.0

Reads what `benchmarks/glue.py` wrote at a fifth and at more, and what `benchmarks/vocabulary.py` wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from claims import Claim, Evidence, Table, Verdict, add_origin, markdown

TASK = "SST2"
LABELS = {"tfidf": "tf-idf", "tfidf+cluster": "tf-idf + clusters", "decompose": "tf-idf, decompose (ours)"}
METHODS = (
    "full",
    "random",
    "tfidf",
    "tfidf+cluster",
    "decompose",
    "magnitude",
    "low-rank",
    "low-rank+sparse",
)


def read_glue(folder: str) -> dict[str, dict[str, Any]]:
    """The rows of one task by method."""
    files = sorted(Path(folder).glob(f"{TASK}-*.json"))
    return {content["method"]: content for content in (json.loads(file.read_text()) for file in files)}


def told(better: dict[str, Any], worse: dict[str, Any]) -> Verdict:
    """By two standard errors of the difference of two shares of the same test rows."""
    errors = [one["score"] * (1 - one["score"]) / one["measured_rows"] for one in (better, worse)]
    difference: float = better["score"] - worse["score"]
    if abs(difference) <= 2 * sum(errors) ** 0.5:
        return "can't tell"
    return "holds here" if difference > 0 else "does not hold here"


def retained(files: list[str]) -> dict[tuple[str, str, str], float]:
    """Of the score at a fifth, by task, score and what becomes of lost tokens; nothing trained."""
    rows = [row for file in files for row in json.loads(Path(file).read_text())["rows"]]
    return {
        (row["domain"], row["score"], row["oov"]): 100 * row["retention"]
        for row in rows
        if row["removed"] == 0.2 and not row["align"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glue", required=True)
    parser.add_argument("--more", required=True)
    parser.add_argument("--without-training", nargs="+", required=True)
    add_origin(parser)
    options = parser.parse_args()
    fifth, more, kept = read_glue(options.glue), read_glue(options.more), retained(options.without_training)
    full = fifth["full"]["score"]
    share = {method: 100 * row["score"] / full for method, row in fifth.items()}
    table = Table(
        title=f"{TASK} after fine-tuning, accuracy, by share of all parameters removed",
        columns=("", "20%", "45%"),
        rows=tuple(
            (
                LABELS.get(method, method),
                f"{100 * fifth[method]['score']:.1f}" if method in fifth else "–",
                f"{100 * more[method]['score']:.1f}" if method in more else "–",
            )
            for method in METHODS
        ),
    )
    tasks = sorted({task for task, *_ in kept})
    claims = (
        Claim(
            says="a fifth of all parameters less leaves 97.6% of the score",
            theirs="97.6% (tf-idf + clusters, mean of GLUE)",
            ours=f"{share['tfidf+cluster']:.1f}% ({TASK}); without any training "
            + ", ".join(f"{kept[task, 'tfidf', 'decompose']:.1f}% ({task}, decompose)" for task in tasks),
            verdict="holds here" if share["tfidf+cluster"] >= 97.6 else "does not hold here",
            remark="a fifth is mild for MiniLM, half of which is vocabulary",
        ),
        Claim(
            says="clusters for lost tokens help",
            theirs="+1.9 points",
            ours=f"{100 * (more['tfidf+cluster']['score'] - more['tfidf']['score']):+.1f} points at 45% ({TASK}); "
            f"without training {kept['STSBenchmark', 'tfidf', 'cluster']:.1f}% against {kept['STSBenchmark', 'tfidf', 'unk']:.1f}% "
            f"of STSBenchmark, {kept['STSBenchmark', 'tfidf', 'decompose']:.1f}% with decompose",
            verdict=told(more["tfidf+cluster"], more["tfidf"]),
        ),
        Claim(
            says="it does better than low-rank + sparse matrices at the same size",
            theirs="0.824 against 0.810",
            ours=f"{fifth['tfidf+cluster']['score']:.3f} against {fifth['low-rank+sparse']['score']:.3f}",
            verdict=told(fifth["tfidf+cluster"], fifth["low-rank+sparse"]),
            remark="theirs is pruned step by step, ours at once",
        ),
        Claim(
            says="tf-idf chooses better than chance",
            theirs="",
            ours=f"{100 * more['tfidf']['score']:.1f} against {100 * more['random']['score']:.1f} at 45%",
            verdict=told(more["tfidf"], more["random"]),
        ),
    )
    evidence = Evidence(
        paper="Words That Matter: Vocabulary Pruning in ModernBERT",
        method="Vocabulary pruning: vocabulary, finetune",
        commands=(
            "python benchmarks/glue.py all-MiniLM-L6-v2 --data . --tasks SST2 --rows 3000 --epochs 1 --precision bf16 -o glue",
            "python benchmarks/glue.py all-MiniLM-L6-v2 --data . --tasks SST2 --rows 3000 --epochs 1 --precision bf16 --removed 45 -o glue45",
            "python benchmarks/vocabulary.py all-MiniLM-L6-v2 --data . --domains STSBenchmark --scores tfidf random --removed 20 -o sts.json",
            "python benchmarks/papers/vocabulary_claims.py --glue glue --more glue45 --without-training sts.json …",
        ),
        hardware=options.hardware,
        versions=dict(options.versions),
        seeds=1,
        claims=claims,
        tables=(table,),
    )
    evidence.keep("vocabulary")
    print(markdown(evidence))


if __name__ == "__main__":
    main()

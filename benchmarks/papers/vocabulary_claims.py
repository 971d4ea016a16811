"""The vocabulary paper's tables in small: what a fifth of all parameters costs when they are taken from the vocabulary.

    python benchmarks/papers/vocabulary_claims.py
    python benchmarks/papers/vocabulary_claims.py --glue 20=GLUE 45=GLUE45 --cuts FILE… --model all-MiniLM-L6-v2
    python benchmarks/papers/vocabulary_claims.py --tokens FILE --cost FILE

Prints the section about this paper. `--glue` takes over folders that `benchmarks/glue.py` wrote, each after the share of all
parameters that went, `--cuts` what `benchmarks/vocabulary.py` wrote, `--tokens` and `--cost` what `vocabulary_tokens.py` and
`vocabulary_cost.py` beside it wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import vocabulary_paper as paper
from claims import (
    SURE,
    Claim,
    Evidence,
    Table,
    Verdict,
    add_origin,
    figure,
    judged,
    markdown,
    merged,
    read_measured,
    write_measured,
)
from vocabulary_tables import (
    LABELS,
    METHODS,
    TASKS,
    Scores,
    by_seed,
    cost_table,
    glue_table,
    ratios,
    shown,
    token_table,
)

NAME = "vocabulary"
MODEL = "all-MiniLM-L6-v2"
ONE = "SST2"
FIFTH, MORE = 20, 45
KEPT_SHARE = 97.6
TOP_SHARE = 80
SLOWER = 1.05
"""As many times as long is no slower; the paper calls 1.013 times negligible."""
GLUE_KEY = ("removed", "task", "method", "characters")
CUT_KEY = ("model", "domain", "score", "oov", "characters", "removed", "align")
CHARACTERS, LATER = "all", "auto"
"""What stood when most figures of this page were taken, and the default since."""


def read_glue(folder: str, removed: int) -> list[dict[str, Any]]:
    found = (json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json")))
    return [
        {"removed": removed}
        | {key: cell[key] for key in ("task", "method", "characters", "measured_rows")}
        | {"scores": [round(100 * scores[cell["measure"]], 2) for scores in cell["scores"]]}
        for cell in found
    ]


def read_cuts(file: str, model: str) -> list[dict[str, Any]]:
    keys = (*CUT_KEY[1:], "retention")
    return [
        {"model": model} | {key: row[key] for key in keys}
        for row in json.loads(Path(file).read_text())["rows"]
    ]


def at(cells: list[dict[str, Any]], removed: int, characters: str = CHARACTERS) -> Scores:
    return {
        (cell["method"], cell["task"]): cell["scores"]
        for cell in cells
        if (cell["removed"], cell["characters"]) == (removed, characters)
    }


def differences(scores: Scores, better: str, worse: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Of the means over tasks, one for each seed: a seed's two runs see the same rows in the same order."""
    runs = (by_seed(scores, method, tasks) for method in (better, worse))
    return [one - other for one, other in zip(*runs, strict=True)]


def told(gains: list[float]) -> Verdict:
    """Better, if it is so beyond the spread over seeds; a gain within its spread can be chance."""
    low, high = figure(gains).interval
    return "can't tell" if low <= 0 <= high else judged(low > 0)


def no_slower(times: list[list[float]]) -> Verdict:
    """By ratios of time, for each kind of text one a round: surely below the limit, surely above it, or neither."""
    ends = [figure(one).interval for one in times]
    if all(high <= SLOWER for _, high in ends):
        return "holds here"
    return "does not hold here" if any(low > SLOWER for low, _ in ends) else "can't tell"


def smaller_no_slower(cost: dict[str, Any], method: str) -> Claim:
    """The paper's table 3 in a sentence."""
    models = {model["method"]: model for model in cost["models"]}
    sizes = {"parameters": "parameters", "storage_bytes": "on disk", "memory_bytes": "memory"}
    left = {key: models[method][key] / models["whole"][key] for key in sizes}
    theirs = {key: pruned / whole for key, (whole, pruned) in paper.COST.items()}
    times = {kind: ratios(cost, method, kind) for kind in ("short", "long")}
    verdict = no_slower(list(times.values()))
    if max(left.values()) >= 1:
        verdict = "does not hold here"
    return Claim(
        says="smaller, and no slower",
        theirs=", ".join(f"{name} {theirs[key]:.3f}×" for key, name in sizes.items())
        + f" (GPU), time {theirs['milliseconds']:.3f}×",
        ours=", ".join(f"{name} {left[key]:.3f}×" for key, name in sizes.items())
        + " (process), time "
        + ", ".join(
            f"{statistics.fmean(found):.3f}× ± {statistics.stdev(found):.3f} ({kind} texts)"
            for kind, found in times.items()
        ),
        verdict=verdict,
        remark=f"no slower is at most {SLOWER}× by the {SURE:.0%} interval over rounds",
    )


def gain(scores: Scores, tasks: tuple[str, ...]) -> str:
    """What clusters bring, with its spread over seeds."""
    found = differences(scores, "tfidf+cluster", "tfidf", tasks)
    return f"{statistics.fmean(found):+.1f} ± {statistics.stdev(found):.1f}".replace("-", "−")


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    fifth, more = (at(measured["glue"], removed) for removed in (FIFTH, MORE))
    later = at(measured["glue"], MORE, LATER)
    measured_methods = [method for method in METHODS if (method, ONE) in fifth]
    means = {method: statistics.fmean(by_seed(fifth, method, TASKS)) for method in measured_methods}
    shares = {method: 100 * mean / means["full"] for method, mean in means.items()}
    theirs = {method: row.mean for method, row in paper.GLUE.items()}
    tops = [row["train"]["top_fifth"] for row in measured["tokens"] if row["train"]]
    their_tops = [row.top_fifth[0] for row in paper.TOKENS.values()]
    kept = {
        (row["domain"], row["oov"]): 100 * row["retention"]
        for row in measured["cuts"]
        if (row["model"], row["score"], row["characters"], row["align"]) == (MODEL, "tfidf", CHARACTERS, 0)
        and round(100 * row["removed"]) == FIFTH
    }
    domains = sorted({domain for domain, _ in kept})
    most = Table(
        title=f"{ONE} with {MORE}% removed, trained alike",
        columns=("", "accuracy"),
        rows=tuple(
            (LABELS.get(method, method) + ending, shown(scores[method, ONE]))
            for scores, ending in ((more, ""), (later, f", `--characters {LATER}`"))
            for method in METHODS
            if (method, ONE) in scores
        ),
    )
    claims = (
        Claim(
            says="a fifth of all parameters less leaves 97.6% of the score",
            theirs="97.6% (tf-idf + clusters, mean of GLUE)",
            ours=f"{shares['tfidf+cluster']:.1f}%, {shares['decompose']:.1f}% with decompose; without any training "
            + ", ".join(f"{kept[domain, 'decompose']:.1f}% ({domain})" for domain in domains)
            + " with decompose",
            verdict=judged(shares["tfidf+cluster"] >= KEPT_SHARE),
            remark="a fifth is mild for MiniLM, half of which is vocabulary",
        ),
        Claim(
            says="clusters for lost tokens help",
            theirs=f"{theirs['tfidf+cluster'] - theirs['tfidf']:+.1f} points",
            ours=f"{gain(fifth, TASKS)} points at a fifth, {gain(more, (ONE,))} at {MORE}% ({ONE}); "
            f"without training {kept['STSBenchmark', 'cluster']:.1f}% of STSBenchmark "
            f"against {kept['STSBenchmark', 'unk']:.1f}% as unknown and {kept['STSBenchmark', 'decompose']:.1f}% with decompose",
            verdict=told(differences(fifth, "tfidf+cluster", "tfidf")),
            remark=f"by the {SURE:.0%} interval of the difference over seeds, at a fifth",
        ),
        Claim(
            says="it does better than low-rank + sparse matrices at the same size",
            theirs=f"{theirs['tfidf+cluster']} against {theirs['low-rank+sparse']}",
            ours=f"{means['tfidf+cluster']:.1f} against {means['low-rank+sparse']:.1f}",
            verdict=told(differences(fifth, "tfidf+cluster", "low-rank+sparse")),
            remark="theirs is pruned step by step, ours at once",
        ),
        Claim(
            says="tf-idf chooses better than chance",
            theirs=f"{theirs['tfidf']} against {theirs['random']}",
            ours=f"{shown(more['tfidf', ONE])} against {shown(more['random', ONE])} at {MORE}% ({ONE}); "
            f"{means['tfidf']:.1f} against {means['random']:.1f} at a fifth",
            verdict=told(differences(more, "tfidf", "random", (ONE,))),
            remark=f"at {MORE}%; at a fifth nothing of a task's own texts is lost, whoever chooses",
        ),
        Claim(
            says=f"a fifth of the tokens makes {TOP_SHARE}–94% of all occurrences",
            theirs=f"{min(their_tops):.1f} to {max(their_tops):.1f}% (training texts)",
            ours=f"{min(tops):.1f} to {max(tops):.1f}% ({len(tops)} tasks)",
            verdict=judged(min(tops) >= TOP_SHARE),
            remark=f"with {TOP_SHARE}% or more in every task; of the tokens that occur in the task",
        ),
        smaller_no_slower(measured["cost"], "tfidf+cluster"),
    )
    glue = f"python benchmarks/glue.py {MODEL} --data . --characters {CHARACTERS} --seeds 0 1 2 --rows 8000"
    return Evidence(
        paper="Words That Matter: Vocabulary Pruning in ModernBERT",
        method="Vocabulary pruning: vocabulary, finetune",
        commands=(
            f"{glue} --tasks {' '.join(TASKS)} --at-once 4 -o glue",
            f"{glue} --tasks SST2 --methods random tfidf tfidf+cluster decompose --removed 45 --at-once 4 -o glue45",
            f"python benchmarks/glue.py {MODEL} --data . --characters {LATER} --seeds 0 1 2 --rows 8000 "
            "--tasks SST2 --methods tfidf decompose --removed 45 -o glue45-auto",
            f"python benchmarks/vocabulary.py {MODEL} --data . --characters {CHARACTERS} --scores tfidf --removed 20 35 --align 300 -o cuts.json",
            f"python benchmarks/vocabulary_tokens.py {MODEL} --data . -o tokens.json",
            f"python benchmarks/vocabulary_cost.py {MODEL} --data . -o cost.json",
            "python benchmarks/papers/vocabulary_claims.py --glue 20=glue 45=glue45 45=glue45-auto --cuts cuts.json --hardware … --versions …",
            "python benchmarks/papers/vocabulary_claims.py --tokens tokens.json --cost cost.json",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=max(len(scores) for scores in fifth.values()),
        claims=claims,
        tables=(glue_table(fifth), most, token_table(measured["tokens"]), cost_table(measured["cost"])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glue", nargs="+", default=[], metavar="PERCENT=FOLDER")
    parser.add_argument("--cuts", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--model", default=MODEL, help="whose cuts these are")
    parser.add_argument("--tokens", metavar="FILE")
    parser.add_argument("--cost", metavar="FILE")
    add_origin(parser)
    options = parser.parse_args()
    if options.glue or options.cuts or options.tokens or options.cost:
        measured = read_measured(NAME)
        folders = [one.partition("=") for one in options.glue]
        cells = [cell for percent, _, folder in folders for cell in read_glue(folder, int(percent))]
        cuts = [row for file in options.cuts for row in read_cuts(file, options.model)]
        measured["glue"] = merged(measured["glue"], cells, GLUE_KEY)
        measured["cuts"] = merged(measured["cuts"], cuts, CUT_KEY)
        for name, file in (("tokens", options.tokens), ("cost", options.cost)):
            if file:
                measured[name] = json.loads(Path(file).read_text())
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()

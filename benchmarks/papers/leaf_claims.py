"""LEAF's tables in small: what students keep of their teacher, batch sizes, losses, short vectors, errors and speed.

    python benchmarks/papers/leaf_claims.py
    python benchmarks/papers/leaf_claims.py --scores RESULTS --ablations RESULTS --shortened FILE --speed FILE

Prints the section about this paper. `--scores` takes over a folder that `benchmarks/leaf.py` wrote: the row `teacher` and all
others that have scores; `--ablations` one with the rows `batch-…`, `loss-…` and `pooling-cls`; `--shortened` and `--speed` what
`benchmarks/shortened.py` and `benchmarks/batches.py` wrote.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from claims import (
    Claim,
    Evidence,
    add_origin,
    judged,
    markdown,
    read_measured,
    write_measured,
)
from leaf_tables import (
    BATCHES,
    LOSSES,
    RETRIEVAL,
    TEACHER,
    ablation_tables,
    kinds_table,
    margin_table,
    means_by_kind,
    set_table,
    shortened_table,
    speed_table,
)
from leaf_taken import TAKEN

NAME = "leaf"
LARGEST, PLAIN = "backbone-all", "plain"
"""The student that learned longest, of which shares are kept, and the one whose every score is."""
OWN, ACROSS = 96.1, 97.7
"""Table 1: shares of the teacher's search on the student's own index and on the teacher's."""
ALL_OWN, ALL_ACROSS = 95.8, 96.9
"""Table 2: the same over all kinds of task."""
BITS = "binary"
ALIKE = 5.0
"""Points of share by which two curves may differ and still be called alike."""
TRAINED = 0.7
"""Errors above are those of students that were hardly trained: the trend is taken below."""
FASTER = {"documents": 6.5, "queries": 7.3}
COMMANDS = (
    "trundle vocabulary all-MiniLM-L6-v2 --keep 23000 --data texts -o cut",
    "python benchmarks/leaf.py all-mpnet-base-v2 --texts texts --tasks . --batch-size 256 -o main plain=cut:minutes=7.5:learning_rate=4e-4:warmup=200",
    "python benchmarks/leaf.py all-mpnet-base-v2 --texts texts --tasks . --batch-size 256 -o main "
    "plain-int4=main/plain/model:start=keep:rounding=int4:minutes=9:learning_rate=3e-4:warmup=100",
    "python benchmarks/leaf.py all-mpnet-base-v2 --texts texts --tasks . --batch-size 512 -o longer backbone-all=…:steps=12000:learning_rate=5e-4:warmup=200",
    "python benchmarks/leaf.py all-mpnet-base-v2 --texts texts --tasks . --sample 60000 --no-scores -o ablations batch-16=…:batch_size=16:steps=7500 …",
    "trundle export main/plain-int4/model --to onnx --int4 --int8 --calibrate texts -o shipped",
    "python benchmarks/shortened.py all-mpnet-base-v2 main/plain/model --tasks . --sets CACM,Cranfield,SciFact,msmarco-mini --vectors vectors -o shortened.json",
    "python benchmarks/batches.py all-mpnet-base-v2 main/plain/model shipped --texts retrieval/msmarco-mini --rounds 3 --threads 1 --own-time -o batches.json",
    "python benchmarks/papers/leaf_claims.py --scores main --ablations ablations --shortened shortened.json --speed batches.json --hardware … --versions …",
)
"""The other students of figure 7 are those of LOG.md."""


def kept_claims(measured: dict[str, Any]) -> tuple[Claim, ...]:
    """Tables 1 and 2."""
    students, sets = measured["students"], measured["sets"]
    best, plain = students[LARGEST], students[PLAIN]
    whole, small = means_by_kind(sets[TEACHER], "own"), means_by_kind(sets[PLAIN], "own")
    across = means_by_kind(sets[PLAIN], "across")
    shares = [100 * sum(one.values()) / sum(whole.values()) for one in (small, small | across)]
    searches = {name: one for name, one in sets[PLAIN].items() if one["kind"] == RETRIEVAL}
    better = [name for name, one in searches.items() if one["across"] > one["own"]]
    ahead = [name for name, one in searches.items() if one["own"] > sets[TEACHER][name]["own"]]
    behind = [name for name in searches if name not in ahead]
    fewer = (
        100
        * sum(searches[name]["own"] for name in behind)
        / sum(sets[TEACHER][name]["own"] for name in behind)
    )
    return (
        Claim(
            says=f"a student of 23M keeps {OWN}% of its teacher's search on its own index",
            theirs=f"{OWN}%",
            ours=f"{best['own']:.1f}%; {plain['own']:.1f}% after 7.5 minutes (20M)",
            verdict=judged(best["own"] >= OWN),
            remark="a sixth of the texts, and minutes instead of 100 GPU hours; but the smaller has only "
            f"{fewer:.1f}% without {', '.join(ahead)}, where it is ahead of its teacher",
        ),
        Claim(
            says=f"its queries keep {ACROSS}% on the teacher's index",
            theirs=f"{ACROSS}%",
            ours=f"{best['across']:.1f}%; {plain['across']:.1f}% after 7.5 minutes (20M)",
            verdict=judged(best["across"] >= ACROSS),
            remark="it rises with the texts seen in training, 17.5 and 4.2 million here",
        ),
        Claim(
            says="so the teacher's index serves the student better than its own",
            theirs="on 11 of 14 sets",
            ours=f"on {len(better)} of {len(searches)} sets: {', '.join(better)}",
            verdict=judged(2 * len(better) > len(searches)),
        ),
        Claim(
            says=f"over all kinds of task it keeps {ALL_OWN}%, with the teacher's index {ALL_ACROSS}%",
            theirs=f"{ALL_OWN}%, {ALL_ACROSS}% (335M → 23M)",
            ours=f"{shares[0]:.1f}%, {shares[1]:.1f}% (109M → 20M)",
            verdict=judged(shares[0] >= ALL_OWN and shares[1] >= ALL_ACROSS),
            remark="of a milder cut; clustering, two sets, ends above the teacher's, and its index takes away where the paper's adds",
        ),
    )


def trained_claims(measured: dict[str, Any]) -> tuple[Claim, ...]:
    """Tables 3 and 4, figure 8."""
    batches = {size: measured["batches"][str(size)] for size in BATCHES}
    losses, pooling = measured["losses"], measured["pooling"]
    others = [name for name in LOSSES if name != "leaf"]
    return (
        Claim(
            says="small batches end nearer to the teacher than large ones, for the same texts",
            theirs=f"{BATCHES[16]:.3f} at 16, {BATCHES[256]:.3f} at 256",
            ours=f"{batches[16]:.3f} at 16, {batches[256]:.3f} at 256",
            verdict=judged(list(batches.values()) == sorted(batches.values())),
            remark="per minute on a GPU large batches win",
        ),
        Claim(
            says="losses that look inside both models do not help",
            theirs=f"{LOSSES['leaf']:.1f} alone, {max(LOSSES[name] for name in others):.1f} with the best of them",
            ours=f"{losses['leaf']:.3f} alone, {min(losses[name] for name in others):.3f} with the best of them",
            verdict=judged(losses["leaf"] < min(losses[name] for name in others)),
        ),
        Claim(
            says="mean pooling is better than the first token",
            theirs="figure 8",
            ours=f"{pooling['mean']:.3f} against {pooling['cls']:.3f}",
            verdict=judged(pooling["mean"] < pooling["cls"]),
        ),
    )


def shortened_claim(shortened: dict[str, Any]) -> Claim:
    """Figure 6: whether the student loses what its teacher loses."""
    rows = {(row["dimensions"], row["precision"]): row for row in shortened["rows"]}
    apart = {way: row["student"] - row["teacher"] for way, row in rows.items()}
    most = max(apart, key=lambda way: abs(apart[way]))
    far = [size for (size, precision), points in apart.items() if precision != BITS and abs(points) > ALIKE]
    near = min(size for size, _ in apart if not far or size > max(far))
    whole = max(rows)[0]
    shown = [(whole, "int8"), (256, "float32"), (64, "float32"), (whole, BITS), (128, BITS)]
    return Claim(
        says="truncated and quantised vectors of the student fall off like the teacher's",
        theirs="nearly identical (figure 6)",
        ours="; ".join(
            f"{size} × {precision} {rows[size, precision]['student']:.1f}% against {rows[size, precision]['teacher']:.1f}%"
            for size, precision in shown
        ),
        verdict=judged(all(abs(points) <= ALIKE for points in apart.values())),
        remark=f"as float32 and int8 within {ALIKE:.0f} points down to {near} dimensions, then and as bits not: "
        f"{apart[most]:+.1f} at {most[0]} × {most[1]}. This teacher was not trained for short vectors".replace(
            "-", "−"
        ),
    )


def margin_claims(students: dict[str, Any]) -> tuple[Claim, Claim]:
    """Figure 7: how search depends on the error, and where the line would meet the teacher."""
    trained = [one for one in students.values() if one["error"] < TRAINED]
    errors = [one["error"] for one in trained]
    along, meets = {}, {}
    for where in ("mean", "across"):
        shares = [one[where] for one in trained]
        along[where] = statistics.correlation(errors, shares)
        slope, start = statistics.linear_regression(errors, shares)
        meets[where] = (100 - start) / slope
    return Claim(
        says="the smaller the error, the better the search",
        theirs="a falling line (figure 7)",
        ours=f"correlation {along['mean']:.2f} on their own index, {along['across']:.2f} on the teacher's, {len(trained)} students".replace(
            "-", "−"
        ),
        verdict=judged(all(one < -0.8 for one in along.values())),
        remark="an error costs far more on the teacher's index than on the student's own",
    ), Claim(
        says="an error above 0 is already as good as none",
        theirs="supposed from the line",
        ours=f"the line meets the teacher at {meets['mean']:.2f} on their own index, {meets['across']:.2f} on the teacher's",
        verdict="can't tell",
        remark=f"no student here is nearer than {min(errors):.2f}",
    )


def speed_claim(speed: dict[str, Any]) -> Claim:
    """Table 9: how much faster the student is where the same engine runs both, and as shipped."""
    whole, student, shipped, *_ = speed["models"].values()
    return Claim(
        says="a student of 23M encodes documents 6.5 and queries 7.3 times as fast",
        theirs="6.5×, 7.3×",
        ours=", ".join(f"{student[kind]['ratio']:.1f}×" for kind in FASTER)
        + f" in {student['runs']}; as shipped ({shipped['runs']}) "
        + ", ".join(f"{shipped[kind]['ratio']:.1f}×" for kind in FASTER),
        verdict=judged(all(student[kind]["ratio"] >= times for kind, times in FASTER.items())),
        remark=f"by little, and as shipped it is far ahead; both ratios are to the teacher in {whole['runs']}; the paper has ONNX Runtime on both sides",
    )


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    sets, students = measured["sets"], measured["students"]
    return Evidence(
        paper="LEAF: Knowledge Distillation of Text Embedding Models with Teacher-Aligned Representations",
        method="LEAF: align",
        commands=COMMANDS,
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=1,
        claims=(
            *kept_claims(measured),
            *trained_claims(measured),
            shortened_claim(measured["shortened"]),
            *margin_claims(students),
            speed_claim(measured["speed"]),
        ),
        tables=(
            set_table(sets, {PLAIN: "student", "plain-int4": "in four bits"}),
            kinds_table(sets, PLAIN),
            *ablation_tables(measured),
            shortened_table(measured["shortened"]),
            margin_table(students),
            speed_table(measured["speed"]),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in TAKEN:
        parser.add_argument(f"--{name}", metavar="FILE" if name in ("shortened", "speed") else "FOLDER")
    add_origin(parser)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in TAKEN if getattr(options, name)}
    if given or options.hardware or options.versions:
        measured = read_measured(NAME)
        for name, place in given.items():
            TAKEN[name](measured, place)
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()

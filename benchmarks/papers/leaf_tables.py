"""LEAF's tables and figures as tables, the paper's figures beside ours; `leaf_claims.py` says what they mean."""

from __future__ import annotations

import statistics
from typing import Any

from claims import Table

TEACHER, RETRIEVAL = "teacher", "retrieval"
KINDS = {
    "classification": (79.1, 76.9, 76.9),
    "clustering": (47.5, 46.5, 46.5),
    "pairs": (87.2, 84.5, 84.5),
    "retrieval": (55.4, 47.3, 51.8),
    "sts": (84.4, 82.8, 82.8),
}
KINDS_MEAN = (62.0, 59.4, 60.1)
"""Table 2: the teacher, leaf-mt on its own index and on the teacher's."""
BEIR = {"ArguAna": (59.5, 58.4, 59.0), "SciFact": (71.6, 70.0, 70.2)}
BEIR_MEAN = (56.1, 53.9, 54.8)
"""Table 1: the teacher, leaf-ir on its own index and on the teacher's."""
BATCHES = {16: 0.4194, 32: 0.4214, 64: 0.4301, 128: 0.4390, 256: 0.4593}
LOSSES = {"leaf": 60.7, "minilm": 54.9, "tinybert": 53.7, "distilbert": 55.3}
STUDENTS = {
    "ridge": "first 3 layers, the linear start alone",
    "backbone-5": "MiniLM cut to 5 layers, 5,000 tokens",
    "backbone-4": "MiniLM cut to 4 layers, 9,600 tokens",
    "first-2": "first 2 layers, 8,000 tokens",
    "backbone-6170": "MiniLM, 6,170 steps of 512",
    "plain-int4": "MiniLM, 23,000 tokens, four bits a weight, in one go",
    "plain": "MiniLM, 23,000 tokens, in one go",
    "backbone-int4": "MiniLM, 23,000 tokens, four bits a weight, 37,170 steps",
    "backbone-22170": "MiniLM, 22,170 steps of 512",
    "first-3": "first 3 layers",
    "backbone-all": "MiniLM, 34,170 steps of 512",
}
SPEED = {
    "documents": {
        "arctic-embed-m-v1.5": ("3.2", "1×", "191 ms", "–"),
        "leaf-ir": ("21.9", "6.5×", "28.2 ms", "2"),
    },
    "queries": {
        "arctic-embed-m-v1.5": ("16.7", "1×", "73.2 ms", "1"),
        "leaf-ir": ("121.3", "7.3×", "11.4 ms", "8"),
    },
}
"""Table 9."""
Sets = dict[str, dict[str, Any]]


def means_by_kind(sets: Sets, where: str) -> dict[str, float]:
    """The mean score of each kind that has scores there."""
    found: dict[str, list[float]] = {}
    for one in sets.values():
        if where in one:
            found.setdefault(one["kind"], []).append(one[where])
    return {kind: statistics.fmean(scores) for kind, scores in found.items()}


def shown(score: float, whole: float) -> str:
    return f"{score:.1f} ({100 * score / whole:.1f}%)"


def beside(figures: tuple[float, float, float] | None) -> tuple[str, str]:
    """The paper's student on its own index and on the teacher's, as shares."""
    if figures is None:
        return "", ""
    whole, own, across = figures
    return shown(own, whole), shown(across, whole)


def set_table(sets: dict[str, Sets], students: dict[str, str]) -> Table:
    """Every search, and their mean; the paper has two of the sets, in other sizes."""
    searches = [name for name, one in sets[TEACHER].items() if one["kind"] == RETRIEVAL]

    def row(name: str, chosen: list[str], paper: tuple[float, float, float] | None) -> tuple[str, ...]:
        def score(model: str, where: str) -> float:
            return statistics.fmean(sets[model][one][where] for one in chosen)

        whole = score(TEACHER, "own")
        cells = [shown(score(model, where), whole) for model in students for where in ("own", "across")]
        return name, *beside(paper), f"{whole:.1f}", *cells

    return Table(
        title="Table 1, nDCG@10 of each search and its share of the teacher's (paper: leaf-ir on BEIR's sets, "
        "which are larger; its mean is over 14). The student is MiniLM's backbone cut to 23,000 tokens, 20.1M parameters, trained for 7.5 minutes on 953,264 texts",
        columns=(
            "",
            "paper, own index",
            "paper, teacher's index",
            "teacher",
            *(f"{name}, {where} index" for name in students.values() for where in ("own", "teacher's")),
        ),
        rows=(
            *(row(name, [name], BEIR.get(name)) for name in searches),
            row("mean", searches, BEIR_MEAN),
        ),
    )


def kinds_table(sets: dict[str, Sets], student: str) -> Table:
    """Means by kind, and the mean of kinds as the paper takes it."""
    whole, own, across = (
        means_by_kind(sets[model], where)
        for model, where in ((TEACHER, "own"), (student, "own"), (student, "across"))
    )
    counts = {kind: sum(one["kind"] == kind for one in sets[TEACHER].values()) for kind in KINDS}
    rows = [
        (
            f"{kind} ({counts[kind]})",
            *beside(theirs),
            f"{whole[kind]:.1f}",
            shown(own[kind], whole[kind]),
            shown(across[kind], whole[kind]) if kind in across else "the same",
        )
        for kind, theirs in KINDS.items()
    ]
    mean = [statistics.fmean(one[kind] for kind in KINDS) for one in (whole, own, own | across)]
    last = (
        "mean of kinds",
        *beside(KINDS_MEAN),
        f"{mean[0]:.1f}",
        *(shown(one, mean[0]) for one in mean[1:]),
    )
    return Table(
        title="Table 2, means by kind of task (paper: leaf-mt, MTEB v2; its mean includes reranking and summaries)",
        columns=(
            "sets here",
            "paper, own index",
            "paper, teacher's index",
            "teacher",
            "own index",
            "teacher's index",
        ),
        rows=(*rows, last),
    )


def ablation_tables(measured: dict[str, Any]) -> tuple[Table, Table]:
    """Batch sizes and losses."""
    return Table(
        title="Table 3, validation ℓ2 after equally many texts",
        columns=("batch", "paper", "here"),
        rows=tuple(
            (str(size), f"{theirs:.3f}", f"{measured['batches'][str(size)]:.3f}")
            for size, theirs in BATCHES.items()
        ),
    ), Table(
        title="Table 4, LEAF's loss alone and with another (paper: nDCG@10, higher is better; here: ℓ2, lower is better)",
        columns=("with", "paper", "here"),
        rows=tuple(
            (name, f"{theirs:.1f}", f"{measured['losses'][name]:.3f}") for name, theirs in LOSSES.items()
        ),
    )


def shortened_table(shortened: dict[str, Any]) -> Table:
    """Figure 6 as a table: a row for each length, teacher and student by precision."""
    rows = shortened["rows"]
    found = {(row["dimensions"], row["precision"]): row for row in rows}
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    whole = shortened["whole"]
    return Table(
        title=f"Figure 6, nDCG@10 left of that with whole vectors, mean of {', '.join(shortened['sets'])}: queries of the teacher "
        f"({whole['teacher']:.1f} with whole vectors) / of the student ({whole['student']:.1f}) in the teacher's index, both shortened alike "
        "(paper: leaf-ir, shares of the best of each precision)",
        columns=("dimensions", *precisions),
        rows=tuple(
            (
                str(size),
                *(
                    f"{found[size, precision]['teacher']:.1f} / {found[size, precision]['student']:.1f}%"
                    for precision in precisions
                ),
            )
            for size in dict.fromkeys(row["dimensions"] for row in rows)
        ),
    )


def margin_table(students: dict[str, Any]) -> Table:
    """Figure 7 as a table, the largest error first."""
    ordered = sorted(students.items(), key=lambda item: -item[1]["error"])
    return Table(
        title="Figure 7, students of all-mpnet-base-v2 by their error: validation ℓ2 on held-out texts of each run, share of the teacher's mean over "
        "27 sets on their own index, share of its search on its index (paper: checkpoints of one training)",
        columns=("student", "parameters", "error", "own index", "teacher's index"),
        rows=tuple(
            (
                STUDENTS.get(name, name),
                f"{one['parameters'] / 1e6:.1f}M",
                f"{one['error']:.3f}",
                f"{one['mean']:.1f}%",
                f"{one['across']:.1f}%",
            )
            for name, one in ordered
        ),
    )


def speed_table(speed: dict[str, Any]) -> Table:
    """Documents and queries below one another, the paper's models first."""

    def here(name: str, one: dict[str, Any], kind: str) -> tuple[str, ...]:
        found = one[kind]
        return (
            f"{name} ({one['runs']})",
            kind,
            f"{found['per_second']:.1f}",
            f"{found['ratio']:.1f}×",
            f"{1000 * found['latency']:.3g} ms",
            f"{found['largest']:.0f}" if found["largest"] else "–",
        )

    busy = f"while other work kept {speed['other_cores']:.1f} of the two cores busy"
    taken = (
        f"processor time of one thread on ARM Neoverse-N1 cores, as they were shared ({busy})"
        if speed["time"] == "own"
        else f"{speed['threads']} threads on two ARM Neoverse-N1 cores, {busy}"
    )
    return Table(
        title="Table 9, batches of 1, 2, 4, 8, 16 and 24 texts of MS MARCO: texts a second (mean over sizes), shortest wait, largest batch within "
        f"100 ms. Here {taken}, medians of {speed['rounds']} rounds in turns; the paper's on two virtual cores, both by ONNX Runtime",
        columns=("model", "texts", "a second", "faster", "shortest wait", "largest batch"),
        rows=tuple(
            row
            for kind, paper in SPEED.items()
            for row in (
                *((f"paper: {name}", kind, *cells) for name, cells in paper.items()),
                *(here(name, one, kind) for name, one in speed["models"].items()),
            )
        ),
    )

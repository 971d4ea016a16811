"""What could be had, before anything is made: every candidate sized and timed, and those that are worth a trial.

All that a dry run says comes from here, and whatever is wrong with a budget is said here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice

import numpy as np
from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus
from trundle.errors import BadInput, MissingExtra
from trundle.model.cost import Cost
from trundle.model.encode import embedder
from trundle.precision import Precision, graph_format
from trundle.progress import Progress
from trundle.search.budget import _Budget
from trundle.search.candidates import _Candidate, _Coverage, _edge, _list_candidates, _smallest
from trundle.search.speed import _measure_speed, _Speed

_TIMED_TEXTS, _MOST_TIMED_TEXTS, _TIMED_SECONDS = 32, 8192, 1.0
_LENGTHS = 4
_COUNTED_TEXTS = 5000


@dataclass(frozen=True, kw_only=True)
class _Prospects:
    """The models of one search, and what can be told of them by arithmetic and a few seconds of timing."""

    source: str
    bases: Mapping[str, SentenceTransformer]
    """The source and the students by name, each opened once."""
    corpus: Corpus
    progress: Progress

    def speeds(self) -> dict[tuple[str, Precision], _Speed]:
        """Of int8 and of float graphs; empty where graphs can't be made here, and speed can't be told."""
        if find_spec("onnxruntime") is None or find_spec("onnx") is None:
            self.progress.say(
                "without the extra export there is no int8 and no speed: pip install 'trundle[export]'"
            )
            return {}
        wanted: tuple[Precision, ...] = ("float32", "int8")
        found = {
            (base, precision): _measure_speed(model, precision, progress=self.progress)
            for base, model in self.bases.items()
            for precision in wanted
        }
        if not all(speed.undisturbed for speed in found.values()):
            self.progress.say(
                "the machine was busy while queries were timed, so what is said of speed is rough"
            )
        return found

    def promising(
        self, limits: _Budget, speeds: Mapping[tuple[str, Precision], _Speed], *, before: Cost
    ) -> list[_Candidate]:
        """What is worth a trial, most promising first; a budget that makes no sense for this model is refused in one sentence."""
        if limits.milliseconds is not None and not speeds:
            raise MissingExtra("a budget in milliseconds", "export")
        found = self.candidates(speeds, timed=limits.milliseconds is not None)
        slow = self.slowest(speeds, before)
        if limits.allows(file_bytes=before.file_bytes, parameters=before.parameters, milliseconds=slow):
            raise BadInput(
                f"{self.source} is within {limits} as it is ({before.file_bytes / 1e6:.4g} MB, {before.parameters / 1e6:.4g}M "
                "parameters), so nothing was done; ask for less"
            )
        promising = _edge(found, limits, self.coverages())
        if not promising:
            least = _smallest(found)
            told = "" if least.milliseconds is None else f", {_raised(least.milliseconds)} ms a query"
            raise BadInput(
                f"nothing trundle can make of {self.source} is within {limits}: the smallest is {least.name} with "
                f"{_raised(least.bytes / 1e6)} MB, {_raised(least.cost.parameters / 1e6)}M parameters{told}; allow that much"
                + ("" if len(self.bases) > 1 else ", or give a smaller backbone with --student")
            )
        # Where the model itself fits once it is int8, nothing it could be cut to is nearer to it.
        return [each for each in promising if each.untouched] or promising

    def slowest(self, speeds: Mapping[tuple[str, Precision], _Speed], before: Cost) -> float | None:
        """What a query takes with the model as it is, told like the candidates'."""
        speed = speeds.get((self.source, "float32"))
        return None if speed is None else speed.milliseconds(before)

    def candidates(
        self, speeds: Mapping[tuple[str, Precision], _Speed], *, timed: bool = False
    ) -> list[_Candidate]:
        """All cuts of the model and of the students' backbones, sized and timed by arithmetic.

        Where time counts, four bits a weight are multiplied in int8: twice as fast, for a little less agreement.
        """
        grid: Precision = "int4+int8" if timed else "int4"
        dimensions = self.bases[self.source].get_embedding_dimension() or 0
        precisions: tuple[Precision, ...] = ("int8", grid) if speeds else ("float32",)
        found = [
            candidate
            for base, model in self.bases.items()
            for precision in precisions
            for candidate in _list_candidates(
                model, base, dimensions=dimensions, precision=precision, is_teacher=base == self.source
            )
        ]
        return [
            replace(
                each,
                milliseconds=speeds[each.base, graph_format("onnx", each.precision).matmuls].milliseconds(
                    each.cost
                ),
            )
            if speeds
            else each
            for each in found
        ]

    def coverages(self) -> dict[str, _Coverage]:
        """By base, told from the first texts."""
        texts = [text.text for text in islice(self.corpus.train(), _COUNTED_TEXTS)]
        return {base: _coverage(model, texts) for base, model in self.bases.items()}

    def text_count(self) -> float:
        """How many texts there are; without end where the corpus does not say."""
        return sum(int(fact["texts"]) for fact in self.corpus.facts()) or math.inf

    def reading_rate(self) -> float:
        """How many texts the teacher answers in a second, told from a second's worth of them."""
        texts = [text.text for text in islice(self.corpus.train(), _MOST_TIMED_TEXTS)]
        if not texts:
            raise BadInput("there are no texts to learn from; say where they are with --data")
        encode = embedder(self.bases[self.source], name="teacher", half_on_gpu=True).text
        encode(texts[:4])
        count, taken, read = _TIMED_TEXTS, 0.0, 0
        while taken < _TIMED_SECONDS and read < len(texts):
            groups = _of_all_lengths(texts, count)
            began = time.monotonic()
            for group in groups:
                encode(group)
            taken, count = time.monotonic() - began, 4 * count
            read = sum(map(len, groups))
        return read / taken


def _of_all_lengths(texts: Sequence[str], count: int) -> list[list[str]]:
    """So many texts, or all, in groups of about one length: short ones, middling ones, long ones.

    That is how texts are read when there are many. A few taken at random would all be padded to the longest of them, and look
    several times as slow.
    """
    ordered = sorted(texts, key=len)
    each = max(1, count // _LENGTHS)
    if len(ordered) <= each * _LENGTHS:
        return [ordered]
    middles = [len(ordered) * (2 * number + 1) // (2 * _LENGTHS) for number in range(_LENGTHS)]
    return [ordered[middle - each // 2 : middle - each // 2 + each] for middle in middles]


def _coverage(model: SentenceTransformer, texts: Sequence[str]) -> _Coverage:
    ids = [one for row in model.tokenizer(list(texts), truncation=True)["input_ids"] for one in row]
    counts = np.sort(np.bincount(ids))[::-1]
    shares = np.cumsum(counts) / max(1, counts.sum())
    return lambda tokens: float(shares[min(tokens, len(shares)) - 1])


def _raised(value: float) -> str:
    """Three digits, never below the value: who allows that much has it."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return f"{math.ceil(value / step - 1e-9) * step:.3g}"

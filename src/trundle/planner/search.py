"""From a budget to a model: size and time every candidate, try the promising ones, train the best, export it, prove it.

Each trial is a folder in the cache, named by all that leads to it, so a search that was killed goes on where it was, be it in the
last training or behind it. Trials are
compared by the distance to the teacher on validation texts; nothing that is measured at the end is looked at before.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from trundle.artifact import cache_folder, check_free, versions, write_whole
from trundle.claims import own_folder
from trundle.data.corpus import Corpus
from trundle.errors import BadInput, MissingExtra
from trundle.measure import Cost, cost
from trundle.model import embedder, load, model_digest
from trundle.pairing import pair_folder
from trundle.planner.budget import parse_budget
from trundle.planner.candidates import Candidate, Coverage, Precision, edge, list_candidates, smallest
from trundle.planner.halving import (
    ENOUGH_TEXTS,
    LABELLING,
    TRYING,
    plan_time,
    proof_texts,
    texts_within,
    time_left,
)
from trundle.planner.outcome import Outcome, Tried
from trundle.planner.shipping import ship
from trundle.planner.speed import Speed, measure_speed
from trundle.planner.trials import Trials
from trundle.planner.unfinished import (
    CONTEST_OVER,
    TEXTS_FILE,
    TRIALS,
    any_wrote,
    mark_written,
    once,
    wrote,
)
from trundle.progress import SILENT, Progress

PLANNING_FILE = "planning.json"
MINUTES = 30.0
TIMED_TEXTS, MOST_TIMED_TEXTS, TIMED_SECONDS = 32, 8192, 1.0
LENGTHS = 4
COUNTED_TEXTS = 5000


def compress_to_budget(
    source: str,
    budget: Sequence[str],
    *,
    output: str | Path | None,
    corpus: Corpus,
    minutes: float = MINUTES,
    students: Sequence[str] = (),
    seed: int = 0,
    dry_run: bool = False,
    replace_output: bool = False,
    fresh: bool = False,
    pair: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Outcome:
    """The best model within the budget that `minutes` can find; a dry run stops before the first trial."""
    began = time.monotonic()
    outputs = [] if output is None or dry_run else [output, *([pair_folder(output)] if pair else [])]

    def check_outputs(*, own: bool) -> None:
        for folder in outputs:
            check_free(folder, replace=replace_output or own, read=[source, *students])

    check_outputs(own=output is not None and any_wrote(output))
    if not 0 < minutes < math.inf:
        raise BadInput(f"{minutes} minutes can't be planned with; give a number above 0")
    bases = {each: load(each, trust_remote_code=trust_remote_code) for each in (source, *students)}
    original = bases[source]
    before = cost(original)
    limits = parse_budget(budget, whole_bytes=before.file_bytes)
    search = Search(source=source, bases=bases, corpus=corpus, progress=progress)
    speeds = search.speeds()
    if limits.milliseconds is not None and not speeds:
        raise MissingExtra("a budget in milliseconds", "export")
    found = search.candidates(speeds, timed=limits.milliseconds is not None)
    slow = _slowest(speeds, source, before)
    if limits.allows(file_bytes=before.file_bytes, parameters=before.parameters, milliseconds=slow):
        raise BadInput(
            f"{source} is within {limits} as it is ({before.file_bytes / 1e6:.4g} MB, {before.parameters / 1e6:.4g}M "
            "parameters), so nothing was done; ask for less"
        )
    promising = edge(found, limits, search.coverages())
    if not promising:
        least = smallest(found)
        told = "" if least.milliseconds is None else f", {raised(least.milliseconds)} ms a query"
        raise BadInput(
            f"nothing trundle can make of {source} is within {limits}: the smallest is {least.name} with "
            f"{raised(least.bytes / 1e6)} MB, {raised(least.cost.parameters / 1e6)}M parameters{told}; allow that much"
            + ("" if students else ", or give a smaller backbone with --student")
        )
    # Where the model itself fits once it is int8, nothing it could be cut to is nearer to it.
    promising = [each for each in promising if each.untouched] or promising
    if pair and promising[0].untouched:
        raise BadInput(
            f"{source} is within {limits} once it is {promising[0].precision}, so nothing is trained and a pair would hold "
            "the same model twice; leave --pair out, or ask for less"
        )
    timetable = plan_time(minutes, len(promising), on_gpu=torch.cuda.is_available())
    tried = [Tried(candidate=each) for each in promising]
    outcome = Outcome(
        budget=limits,
        before=before,
        before_milliseconds=slow,
        tried=tuple(tried),
        chosen=tried[0],
        timetable=timetable,
    )
    if dry_run:
        return outcome
    if output is None:
        raise BadInput("say where the result goes with -o FOLDER, or only look with --dry-run")
    models = [part for name, model in bases.items() for part in (name, model_digest(model))]
    known = [*models, *budget, str(minutes), str(seed), str(corpus.facts()), str(versions())]
    named = cache_folder() / TRIALS / blake2b("\0".join(known).encode(), digest_size=16).hexdigest()

    def if_taken() -> None:
        progress.say("the same search is under way in another process; this one starts by itself")

    with own_folder(named, if_taken=if_taken) as work:
        goes_on = wrote(work, output)
        check_outputs(own=goes_on)
        if fresh:
            shutil.rmtree(work, ignore_errors=True)
        affordable = partial(search.affordable_texts, timetable.labelling)
        texts = 0 if promising[0].untouched else int(once(work / TEXTS_FILE, affordable))
        trials = Trials(
            source=source,
            corpus=corpus,
            texts=texts,
            work=work,
            proof_texts=proof_texts(texts),
            seed=seed,
            trust_remote_code=trust_remote_code,
            fresh=fresh,
            progress=progress,
        )
        # A search that goes on in its last training does not reopen the contest.
        over = work / CONTEST_OVER
        until = began + (0 if over.is_file() else 60 * minutes * (LABELLING + TRYING))
        ranked = trials.contest(tried, timetable, until=until)
        work.mkdir(parents=True, exist_ok=True)
        over.touch()
        run, ranked = trials.finish_best(
            ranked,
            lambda: time_left(minutes, time.monotonic() - began),
            output,
            replace_output=replace_output or goes_on,
            pair=pair,
        )
        mark_written(work, output)
        outcome = replace(
            outcome,
            tried=tuple(ranked),
            chosen=ranked[0],
            run=run,
            proof_texts=trials.proof_texts,
            parameters=run.after.parameters,
        )
        _write(outcome, Path(output))  # exporting may fail yet, and all that was learned is here
        best = outcome.chosen.candidate
        made = ship(best, Path(output), corpus, limits=limits, speeds=speeds, progress=progress)
        outcome = replace(outcome, **made)
        _write(outcome, Path(output))
        run.settle()
        shutil.rmtree(work, ignore_errors=True)
        return outcome


def raised(value: float) -> str:
    """Three digits, never below the value: who allows that much has it."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return f"{math.ceil(value / step - 1e-9) * step:.3g}"


def _write(outcome: Outcome, output: Path) -> None:
    write_whole(output / PLANNING_FILE, json.dumps(outcome.as_json(), indent=1))


@dataclass(frozen=True, kw_only=True)
class Search:
    """What stays the same through one search."""

    source: str
    bases: Mapping[str, SentenceTransformer]
    """The source and the students by name, each opened once."""
    corpus: Corpus
    progress: Progress

    def speeds(self) -> dict[tuple[str, Precision], Speed]:
        """Of int8 and of float graphs; empty where graphs can't be made here, and speed can't be told."""
        if find_spec("onnxruntime") is None or find_spec("onnx") is None:
            self.progress.say(
                "without the extra export there is no int8 and no speed: pip install 'trundle[export]'"
            )
            return {}
        wanted: tuple[Precision, ...] = ("float32", "int8")
        found = {
            (base, precision): measure_speed(model, precision, progress=self.progress)
            for base, model in self.bases.items()
            for precision in wanted
        }
        if not all(speed.undisturbed for speed in found.values()):
            self.progress.say(
                "the machine was busy while queries were timed, so what is said of speed is rough"
            )
        return found

    def candidates(
        self, speeds: Mapping[tuple[str, Precision], Speed], *, timed: bool = False
    ) -> list[Candidate]:
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
            for candidate in list_candidates(
                model, base, dimensions=dimensions, precision=precision, is_teacher=base == self.source
            )
        ]
        return [
            replace(each, milliseconds=speeds[each.base, computed_as(each.precision)].milliseconds(each.cost))
            if speeds
            else each
            for each in found
        ]

    def coverages(self) -> dict[str, Coverage]:
        """By base, told from the first texts."""
        texts = [text.text for text in islice(self.corpus.train(), COUNTED_TEXTS)]
        return {base: _coverage(model, texts) for base, model in self.bases.items()}

    def affordable_texts(self, seconds: float) -> int:
        """How many texts the teacher can answer in this time, told from a second's worth of them."""
        texts = [text.text for text in islice(self.corpus.train(), MOST_TIMED_TEXTS)]
        if not texts:
            raise BadInput("there are no texts to learn from; say where they are with --data")
        encode = embedder(self.bases[self.source], name="teacher", half_on_gpu=True).text
        encode(texts[:4])
        count, taken, read = TIMED_TEXTS, 0.0, 0
        while taken < TIMED_SECONDS and read < len(texts):
            groups = of_all_lengths(texts, count)
            began = time.monotonic()
            for group in groups:
                encode(group)
            taken, count = time.monotonic() - began, 4 * count
            read = sum(map(len, groups))
        rate = read / taken
        found = texts_within(seconds, rate)
        if found < ENOUGH_TEXTS:
            self.progress.say(
                f"the model reads {rate:{',.0f' if rate >= 10 else '.2g'}} texts a second here, so {found:,} have to do; more --minutes or a GPU teach from more"
            )
        return found


def of_all_lengths(texts: Sequence[str], count: int) -> list[list[str]]:
    """So many texts, or all, in groups of about one length: short ones, middling ones, long ones.

    That is how texts are read when there are many. A few taken at random would all be padded to the longest of them, and look
    several times as slow.
    """
    ordered = sorted(texts, key=len)
    each = max(1, count // LENGTHS)
    if len(ordered) <= each * LENGTHS:
        return [ordered]
    middles = [len(ordered) * (2 * number + 1) // (2 * LENGTHS) for number in range(LENGTHS)]
    return [ordered[middle - each // 2 : middle - each // 2 + each] for middle in middles]


def computed_as(precision: Precision) -> Precision:
    """What a graph of this precision is multiplied in, which decides its speed: int4 is a way to store."""
    stored: dict[Precision, Precision] = {"int4": "float32", "int4+int8": "int8"}
    return stored.get(precision, precision)


def _coverage(model: SentenceTransformer, texts: Sequence[str]) -> Coverage:
    ids = [one for row in model.tokenizer(list(texts), truncation=True)["input_ids"] for one in row]
    counts = np.sort(np.bincount(ids))[::-1]
    shares = np.cumsum(counts) / max(1, counts.sum())
    return lambda tokens: float(shares[min(tokens, len(shares)) - 1])


def _slowest(speeds: Mapping[tuple[str, Precision], Speed], source: str, before: Cost) -> float | None:
    """What a query takes with the model as it is, told like the candidates'."""
    speed = speeds.get((source, "float32"))
    return None if speed is None else speed.milliseconds(before)

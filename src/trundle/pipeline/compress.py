"""The spine: load, then plan and apply each step, measure against the original, save with lineage.

The only room that knows several others. It decides nothing about any method.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus
from trundle.data.sampling import distinct, sample
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.encoding import Memory
from trundle.evaluate.fidelity import (
    FEWEST_DOCUMENTS,
    MEASURED_TEXTS,
    Fidelity,
    measure_fidelity,
    queries_and_documents,
)
from trundle.folders import check_free
from trundle.methods.contract import Applied, Beside, Context
from trundle.model.cost import Cost, cost
from trundle.model.device import free_gpu_memory
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.model.save import save
from trundle.model.surgery import with_modules
from trundle.model.token_map import has_token_map
from trundle.pipeline.card import _model_card
from trundle.pipeline.pair import _save_pair, pair_folder
from trundle.pipeline.stages import _Stage, _stages
from trundle.progress import SILENT, Progress, is_first, process_count
from trundle.recipe import Call, Recipe
from trundle.records import THE_ORIGINAL, Lineage, MethodRecord, QualityScores, read_lineage


@dataclass(frozen=True, kw_only=True)
class _StepRun:
    """One step as it went."""

    call: Call
    says: str
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]
    after: Cost
    applied: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For the lineage: what would lead to the same model again, so no times."""
        return MethodRecord(
            step=self.call.step.name,
            options=self.call.options.model_dump(mode="json"),
            plan=self.plan,
            says=self.says,
            facts=self.facts,
        ).as_json()


@dataclass(frozen=True, kw_only=True)
class _Sibling:
    """A further model that left in a folder beside the result's."""

    output: Path
    after: Cost
    fidelity: Fidelity | None

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        near = None if self.fidelity is None else self.fidelity.as_json()
        return {"output": str(self.output), "after": self.after.as_json(), "fidelity": near}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What went in, what was done, what came out."""

    source: str
    recipe: Recipe
    before: Cost
    after: Cost
    steps: tuple[_StepRun, ...]
    fidelity: Fidelity | None
    judged: Mapping[str, tuple[float, float]]
    """What a step measured of the original and of the result."""
    output: Path | None
    pair: Path | None
    besides: tuple[_Sibling, ...]
    original: Embedder
    result: Embedder
    """Both models as texts → vectors; what was encoded once is remembered."""
    needs_trundle: bool
    """Whether the result has a module of ours, which plain sentence-transformers opens only when told to."""
    settle: Callable[[], None]
    """Let go of what was kept in case of a failure, where it was held."""

    @property
    def only_cut(self) -> bool:
        """Whether vectors were moved and nothing was learned since."""
        learned = any("steps" in step.facts for step in self.steps)
        return not learned and not any(call.step.enters_space(call.options) for call in self.recipe.calls)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "source": self.source,
            "recipe": self.recipe.as_json(),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "steps": [
                step.as_json() | {"seconds": round(step.seconds, 2), "applied": step.applied}
                for step in self.steps
            ],
            "fidelity": None if self.fidelity is None else self.fidelity.as_json(),
            "judged": {name: {"before": old, "after": new} for name, (old, new) in self.judged.items()},
            "output": None if self.output is None else str(self.output),
            "pair": None if self.pair is None else str(self.pair),
            "besides": [sibling.as_json() for sibling in self.besides],
        }


def compress(
    source: str,
    recipe: Recipe,
    *,
    output: str | Path | None,
    corpus: Corpus | None = None,
    seed: int = 0,
    dry_run: bool = False,
    replace: bool = False,
    pair: bool = False,
    continues: bool = False,
    compare: bool = True,
    measured_texts: int = MEASURED_TEXTS,
    hold: bool = False,
    trust_remote_code: bool = False,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> Run:
    """Make a small model out of a large one.

    Where `source` is only a stage on the way, `continues` says so: the result's lineage then goes on with the source's.
    With `compare` the result is measured against the original on up to `measured_texts` held-out texts. A run that was
    stopped is gone on with, unless `fresh`. Who does more with the result says `hold`: the same call then finds what was
    learned, until `Run.settle`.

    With `pair`, a second folder holds the result and its teacher as one model: see `pairing`. A dry run plans every
    step and says what it would save; steps that only cut are carried out in memory, so that the next plan is made on
    what they leave, and steps that learn from texts are not. Of several processes that train together only the first
    measures and writes.
    """
    read = [source, *(name for call in recipe.calls for name in call.step.reads(call.options))]
    if output is not None and not dry_run:
        check_free(output, replace=replace, read=read)
    if pair and not any(call.step.enters_space(call.options) for call in recipe.calls):
        raise BadInput("--pair needs a model in its teacher's space; add the step align to the recipe")
    vectors = all(call.step.gives_vectors for call in recipe.calls)
    if pair and not vectors:
        raise BadInput(
            "--pair needs a model that gives vectors to search with; leave it out, or leave finetune out"
        )
    if pair and output is not None and not dry_run:
        check_free(pair_folder(output), replace=replace, read=read)
    free_gpu_memory()  # of what the last run left: a search makes many in one process
    original = load(source, trust_remote_code=trust_remote_code)
    context = Context(
        original=original,
        source=source,
        corpus=corpus,
        seed=seed,
        trust_remote_code=trust_remote_code,
        pair=pair,
        fresh=fresh,
        progress=progress,
    )
    model, steps = original, []
    files: dict[str, str | bytes] = {}
    besides: dict[str, tuple[Beside, int]] = {}
    space: Embedder | None = None
    partner: SentenceTransformer | None = None
    when_safe: list[Callable[[], None]] = []

    def settle() -> None:
        for done in when_safe:
            done()

    judges = []
    scores: dict[str, float] = {}
    use = ""
    planned: Cost | None = None
    alone = output is not None and not dry_run and process_count() == 1
    kept = len(recipe.calls) if hold else len(recipe.calls) - 1
    places = _stages(recipe.calls, context)[:kept] if alone and kept else []
    for number, call in enumerate(recipe.calls, start=1):
        stage = places[number - 1] if number <= len(places) else None
        applied, step = _take(
            call,
            model,
            context,
            output=output,
            dry_run=dry_run,
            replace=replace,
            stage=stage,
            planned=planned,
        )
        if not step.applied:
            planned = planned or (None if step.after == cost(model) else step.after)
        model, space = applied.model, applied.space or space
        partner = applied.teacher or partner
        files |= applied.files
        when_safe.append(applied.done)
        scores |= applied.scores
        use = applied.use or use
        judges += [] if applied.judge is None else [applied.judge]
        progress.say(f"{call.step.name}: {step.says}")
        steps.append(step)
        besides |= {name: (beside, len(steps)) for name, beside in applied.besides.items()}
    before, after = cost(original), steps[-1].after
    memory = Memory(progress)
    teacher = memory.remember(space or embedder(original, name=THE_ORIGINAL), "original: encoding")
    student = memory.remember(embedder(model, name="result"), "result: encoding")
    fidelity, written = None, []
    paired: Path | None = None
    if compare and vectors and not dry_run and corpus is not None and is_first():
        fidelity = _measure_against(
            teacher, student, corpus, most=measured_texts, seed=seed, progress=progress
        )
    judged: dict[str, tuple[float, float]] = {}
    if judges and not dry_run and is_first():
        started = memory.remember(embedder(original, name=THE_ORIGINAL), "original: encoding")
        for judge in judges:
            old, new = judge(started), judge(student)
            judged |= {name: (old[name], new[name]) for name in old}
    if output is not None and not dry_run and is_first():
        lineage = Lineage(
            source=source,
            space=None if space is None or not vectors else space.name,
            steps=tuple(step.as_json() for step in steps),
            data=() if corpus is None else corpus.facts(),
            seed=seed,
            before=before.as_json(),
            after=after.as_json(),
            scores=({} if fidelity is None else _headline(fidelity)) | _before_and_after(judged) | scores,
            parent=read_lineage(source),
        )
        lineage = lineage.after_parent() if continues else lineage
        _save(model, Path(output), lineage, files, replace=replace, use=use)
        for name, (beside, taken) in besides.items():
            place, size = Path(f"{output}-{name}"), cost(beside.model)
            near = None
            if corpus is not None:
                own = memory.remember(embedder(beside.model, name=place.name), f"{place.name}: encoding")
                near = _measure_against(
                    teacher, own, corpus, most=measured_texts, seed=seed, progress=progress
                )
            origin = dataclasses.replace(
                lineage,
                steps=lineage.steps[: len(lineage.steps) - len(steps) + taken],
                after=size.as_json(),
                scores={} if near is None else _headline(near),
            )
            _save(beside.model, place, origin, beside.files, replace=replace)
            written.append(_Sibling(output=place, after=size, fidelity=near))
        if pair and partner is not None:
            names = (str(output), source if partner is original or space is None else space.name)
            paired = pair_folder(output)
            _save_pair(model, partner, names=names, output=paired, files=files, replace=replace)
        if not hold:
            settle()
    return Run(
        source=source,
        recipe=recipe,
        before=before,
        after=after,
        steps=tuple(steps),
        fidelity=fidelity,
        judged=judged,
        output=None if output is None or dry_run else Path(output),
        pair=paired,
        besides=tuple(written),
        original=teacher,
        result=student,
        needs_trundle=has_token_map(model),
        settle=settle,
    )


def _save(
    model: SentenceTransformer,
    output: Path,
    lineage: Lineage,
    files: Mapping[str, str | bytes],
    *,
    replace: bool,
    use: str = "",
) -> None:
    card = _model_card(
        output.name,
        lineage,
        similarity=str(model.similarity_fn_name),
        needs_trundle=has_token_map(model),
        use=use,
    )
    save(model, output, lineage=lineage, card=card, files=files, replace=replace)


def _take(
    call: Call,
    model: SentenceTransformer,
    context: Context,
    *,
    output: str | Path | None,
    dry_run: bool,
    replace: bool,
    stage: _Stage | None,
    planned: Cost | None,
) -> tuple[Applied, _StepRun]:
    """One step, or what a stopped run has left of it at its `stage`.

    `planned` is the size after a cut that a dry run only planned: what is planned behind it has that size, too.
    """
    began = time.monotonic()
    found = None if stage is None else stage.find()
    plan = call.step.plan(model, call.options, context) if found is None else found[0]
    if output is not None and not dry_run:
        for name in call.step.besides(plan):
            check_free(f"{output}-{name}", replace=replace)
    expected = call.step.forecast(model, plan)
    only_planned = dry_run and call.step.needs_texts
    if found is not None:
        applied = found[1]
    else:
        # A model of its own, since the next step may ask whether anything was done to the original.
        applied = (
            Applied(model=with_modules(model, list(model)))
            if only_planned
            else call.step.apply(model, plan, context)
        )
        if stage is not None:
            applied = stage.keep(plan, applied, seconds=time.monotonic() - began)
    return applied, _StepRun(
        call=call,
        says=str(plan),
        plan=plan.model_dump(mode="json"),
        facts=applied.facts,
        after=(planned or expected) if only_planned else cost(applied.model),
        applied=not only_planned,
        seconds=time.monotonic() - began,
    )


def _measure_against(
    original: Embedder,
    result: Embedder,
    corpus: Corpus,
    *,
    most: int = MEASURED_TEXTS,
    seed: int,
    progress: Progress = SILENT,
) -> Fidelity | None:
    """How near the new model is to the original on held-out texts; None where that can't be told."""
    texts = sample(distinct(corpus.held_out(), key=lambda text: text.text), most, seed=seed)
    queries, documents = queries_and_documents(texts)
    if len(documents) < FEWEST_DOCUMENTS:
        progress.say(
            f"not compared with the original: {len(texts)} of the texts are held out, and {2 * FEWEST_DOCUMENTS} are "
            "needed; give more with --data"
        )
        return None
    if original.text(queries[:1]).shape != result.text(queries[:1]).shape:
        progress.say(
            "not compared with the original: the vectors have another width; add the step align to mend that"
        )
        return None
    return measure_fidelity(result, original, queries, documents, progress=progress)


def _before_and_after(judged: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """What a step measured, for the lineage and the card."""
    named = {name: {"before": round(old, 4), "after": round(new, 4)} for name, (old, new) in judged.items()}
    return {f"{name}, {when}": score for name, both in named.items() for when, score in both.items()}


def _headline(fidelity: Fidelity) -> dict[str, float]:
    """The few figures worth keeping with the model."""
    return QualityScores(
        k=fidelity.k,
        cosine=fidelity.cosine,
        distance=fidelity.distance,
        agreement_asymmetric=fidelity.agreement_asymmetric,
        agreement_standard=fidelity.agreement_standard,
    ).as_scores(fidelity.teacher)

"""Runs a recipe: loads the model, plans and applies each method, compares and saves the result."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sentence_transformers import SentenceTransformer

from trundle.data.sampling import distinct, sample
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.fidelity import FEWEST_DOCUMENTS, Fidelity, measure_within, queries_and_documents
from trundle.folders import check_free
from trundle.methods.contract import AdditionalModel, Applied, Context
from trundle.model.cost import Cost, cost
from trundle.model.encode import embedder, free_gpu_memory
from trundle.model.save import save
from trundle.model.surgery import with_modules
from trundle.model.token_map import has_token_map
from trundle.pipeline.pair import _model_card, _save_pair, pair_folder
from trundle.pipeline.run import Request, Run, _MethodRun, _options_after, _Sibling, _Stage, _stages
from trundle.progress import is_first, process_count
from trundle.recipe import Call, Recipe
from trundle.records import THE_ORIGINAL, Lineage, QualityScores, read_lineage
from trundle.teacher.targets import HeldOutVectors
from trundle.teacher.teacher import Teacher, original_teacher

_BATCH = 8  # among few texts, lengths differ so much that large batches are mostly padding


def run_recipe(request: Request, recipe: Recipe) -> Run:
    """Runs `recipe` for `request`; of several processes that train together, only the first one writes."""
    _check(request, recipe)
    free_gpu_memory()  # of the previous run: a search makes many in one process
    original = request.model()
    context = Context(
        original=original,
        source=request.name,
        corpus=request.corpus,
        seed=request.seed,
        trust_remote_code=request.trust_remote_code,
        pair=request.pair,
        fresh=request.fresh,
        progress=request.progress,
        models=request.opened,
        opened=request.kept,
        dry_run=request.dry_run,
        deadline=request.deadline,
    )
    made = _apply_all(request, recipe, context)
    vectors = all(call.method.gives_vectors for call in recipe.calls)
    held_out = HeldOutVectors(request.progress)
    before = held_out.remember(embedder(original, name=THE_ORIGINAL, batch_size=_BATCH), "original: encoding")
    teacher, theirs = original_teacher(context), before
    if made.space is not None and made.space.embedder is not None:
        teacher, theirs = made.space, held_out.remember(made.space.embedder, "original: encoding")
    large = request.name if teacher.model is original else teacher.name
    teacher = dataclasses.replace(teacher, name=large, embedder=theirs)
    student = held_out.remember(embedder(made.model, name="result", batch_size=_BATCH), "result: encoding")
    writes = is_first() and not request.dry_run
    compares = request.compare and vectors and writes
    fidelity = compare_held_out(teacher, student, request) if compares else None
    judged: dict[str, tuple[float, float]] = {}
    for score in made.evaluators if writes else ():
        old, new = score(before), score(student)
        judged |= {name: (old[name], new[name]) for name in old}
    siblings: list[_Sibling] = []
    paired = None
    if request.target is not None and is_first():
        replace = request.replace
        lineage = _lineage(request, made, fidelity, judged, before=cost(original), vectors=vectors)
        _save(made.model, request.target, lineage, made.files, replace=replace, use=made.use)
        siblings += [
            _write_sibling(name, made, lineage, request, held_out, teacher) for name in made.additional
        ]
        if request.pair and made.partner is not None:
            paired = pair_folder(request.target)
            names = (str(request.output), large)
            _save_pair(
                made.model, made.partner, names=names, output=paired, files=made.files, replace=replace
            )
        if not request.hold:
            made.settle()
    return Run(
        source=request.name,
        recipe=recipe,
        model=made.model,
        before=cost(original),
        after=made.steps[-1].after,
        steps=tuple(made.steps),
        fidelity=fidelity,
        judged=judged,
        output=request.target,
        pair=paired,
        additional=tuple(siblings),
        teacher=teacher,
        original=theirs,
        result=student,
        needs_trundle=has_token_map(made.model),
        settle=made.settle,
    )


def _check(request: Request, recipe: Recipe) -> None:
    read = _read(request, recipe)
    if request.pair:
        if not any(call.method.enters_space(call.options) for call in recipe.calls):
            raise BadInput("--pair needs a model in its teacher's space; add align to the recipe")
        if not all(call.method.gives_vectors for call in recipe.calls):
            raise BadInput("--pair needs a model that gives vectors; leave --pair or finetune out")
    if request.target is not None:
        check_free(request.target, replace=request.replace, read=read)
        if request.pair:
            check_free(pair_folder(request.target), replace=request.replace, read=read)
    recipe.check(request.corpus)


def _read(request: Request, recipe: Recipe) -> list[str]:
    """Every model and file that the run reads, none of which an output may replace."""
    read = [name for call in recipe.calls for name in call.method.reads(call.options)]
    read += [request.source] if isinstance(request.source, str) else []
    return read + ([] if request.corpus is None else [*request.corpus.files])


@dataclass(kw_only=True)
class _Results:
    """What the methods have made so far."""

    model: SentenceTransformer
    steps: list[_MethodRun] = field(default_factory=list)
    space: Teacher | None = None
    partner: SentenceTransformer | None = None
    files: dict[str, str | bytes] = field(default_factory=dict)
    additional: dict[str, tuple[AdditionalModel, int]] = field(default_factory=dict)
    """Additional models, each with the number of methods that led to it."""
    evaluators: list[Callable[[Embedder], Mapping[str, float]]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    use: str = ""
    done: list[Callable[[], None]] = field(default_factory=list)
    planned: Cost | None = None
    """In a dry run, the size after a method that was only planned; later plans start from it."""

    def add(self, applied: Applied, step: _MethodRun) -> None:
        self.steps.append(step)
        self.model, self.space = applied.model, applied.space or self.space
        self.partner = applied.teacher or self.partner
        self.files |= applied.files
        self.additional |= {name: (beside, len(self.steps)) for name, beside in applied.additional.items()}
        self.evaluators += [] if applied.evaluator is None else [applied.evaluator]
        self.scores |= applied.scores
        self.use = applied.use or self.use
        self.done.append(applied.done)

    def settle(self) -> None:
        for done in self.done:
            done()


def _apply_all(request: Request, recipe: Recipe, context: Context) -> _Results:
    """Plans and applies each method; skips those whose results an interrupted run has left in the cache."""
    made = _Results(model=context.original)
    resumable = request.target is not None and process_count() == 1
    # The last result goes straight to the output, unless somebody does more with it first.
    kept = len(recipe.calls) if request.hold else len(recipe.calls) - 1
    stages = _stages(recipe.calls, context)[:kept] if resumable and kept else []
    for number, call in enumerate(recipe.calls):
        stage = stages[number] if number < len(stages) else None
        own = dataclasses.replace(context, later=_options_after(recipe.calls, number))
        applied, step = _apply(call, made, request, own, stage, read=_read(request, recipe))
        if not step.applied and made.planned is None and step.after != cost(made.model):
            made.planned = step.after
        made.add(applied, step)
        request.progress.say(f"{call.method.name}: {step.says}")
    return made


def _apply(
    call: Call, made: _Results, request: Request, context: Context, stage: _Stage | None, *, read: list[str]
) -> tuple[Applied, _MethodRun]:
    began = time.monotonic()
    found = None if stage is None else stage.find()
    plan = call.method.plan(made.model, call.options, context) if found is None else found[0]
    if request.target is not None:
        for name in call.method.additional(plan):
            check_free(f"{request.target}-{name}", replace=request.replace, read=read)
    expected = call.method.forecast(made.model, plan)
    only_planned = request.dry_run and call.method.needs_texts
    if found is not None:
        applied = found[1]
    elif only_planned:
        # A new object, because the next method may ask whether the original was changed.
        applied = Applied(model=with_modules(made.model, list(made.model)))
    else:
        applied = call.method.apply(made.model, plan, context)
        if stage is not None:
            applied = stage.keep(plan, applied, seconds=time.monotonic() - began)
    return applied, _MethodRun(
        call=call,
        says=str(plan),
        plan=plan.model_dump(mode="json"),
        facts=applied.facts,
        after=(made.planned or expected) if only_planned else cost(applied.model),
        applied=not only_planned,
        seconds=time.monotonic() - began,
    )


def _lineage(
    request: Request,
    made: _Results,
    fidelity: Fidelity | None,
    judged: Mapping[str, tuple[float, float]],
    *,
    before: Cost,
    vectors: bool,
) -> Lineage:
    scores = {} if fidelity is None else _headline(fidelity)
    for name, (old, new) in judged.items():
        scores |= {f"{name}, before": round(old, 4), f"{name}, after": round(new, 4)}
    space = None if made.space is None else made.space.embedder
    lineage = Lineage(
        source=request.name,
        space=None if space is None or not vectors else space.name,
        steps=tuple(step.as_json() for step in made.steps),
        data=() if request.corpus is None else request.corpus.facts(),
        seed=request.seed,
        before=before.as_json(),
        after=made.steps[-1].after.as_json(),
        scores=scores | made.scores,
        compared=_compared(fidelity),
        parent=read_lineage(request.source) if isinstance(request.source, str) else None,
    )
    return lineage.after_parent() if request.continues else lineage


def _write_sibling(
    name: str, made: _Results, lineage: Lineage, request: Request, held_out: HeldOutVectors, teacher: Teacher
) -> _Sibling:
    """Compares and writes an additional model, with the lineage up to the method that made it."""
    beside, taken = made.additional[name]
    place, size = Path(f"{request.target}-{name}"), cost(beside.model)
    encoder = embedder(beside.model, name=place.name, batch_size=_BATCH)
    own = held_out.remember(encoder, f"{place.name}: encoding")
    fidelity = compare_held_out(teacher, own, request, lineage.compared)
    origin = dataclasses.replace(
        lineage,
        steps=lineage.steps[: len(lineage.steps) - len(made.steps) + taken],
        after=size.as_json(),
        scores={} if fidelity is None else _headline(fidelity),
        compared=_compared(fidelity),
    )
    _save(beside.model, place, origin, beside.files, replace=request.replace)
    return _Sibling(output=place, after=size, fidelity=fidelity)


def _save(
    model: SentenceTransformer,
    output: Path,
    lineage: Lineage,
    files: Mapping[str, str | bytes],
    *,
    replace: bool,
    use: str = "",
) -> None:
    similarity, own_module = str(model.similarity_fn_name), has_token_map(model)
    card = _model_card(output.name, lineage, similarity=similarity, needs_trundle=own_module, use=use)
    save(model, output, lineage=lineage, card=card, files=files, replace=replace)


def compare_held_out(
    teacher: Teacher, result: Embedder, request: Request, like: Mapping[str, int] | None = None
) -> Fidelity | None:
    """Measures how close a model is to its teacher on held-out texts; None if it can't be measured.

    `like` holds the numbers of queries and documents of an earlier comparison, whose texts are used again.
    """
    assert teacher.embedder is not None
    if request.corpus is None:
        return None
    held_out = distinct(request.corpus.held_out(), key=lambda text: text.text)
    texts = sample(held_out, request.measured_texts, seed=request.seed)
    queries, documents = queries_and_documents(texts)
    if len(documents) < FEWEST_DOCUMENTS:
        needed = 2 * FEWEST_DOCUMENTS
        problem = f"{needed} held-out texts are needed, there are {len(texts)}; pass more with --data"
    elif teacher.width != result.text(documents[:1]).shape[1]:
        problem = "the vectors have another width; add align to the recipe"
    else:
        seconds, seed = request.measured_seconds, request.seed
        if like:  # the same texts as in a comparison before
            queries, seconds = sample(queries, like["queries"], seed), math.inf
            documents = sample(documents, like["documents"], seed)
        found = measure_within(seconds, result, teacher.embedder, queries, documents, seed=seed)
        if (used := found.queries + found.documents) < (there := len(queries) + len(documents)):
            request.progress.say(f"compared on {used:,} of {there:,} held-out texts to save time")
        return found
    request.progress.say(f"not compared with the original: {problem}")
    return None


def _compared(fidelity: Fidelity | None) -> dict[str, int]:
    return {} if fidelity is None else {"queries": fidelity.queries, "documents": fidelity.documents}


def _headline(fidelity: Fidelity) -> dict[str, float]:
    names = ("k", "cosine", "distance", "agreement_asymmetric", "agreement_standard")
    return QualityScores(**{name: getattr(fidelity, name) for name in names}).as_scores(fidelity.teacher)

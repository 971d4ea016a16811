"""The results of the commands as rows of a table, the heading first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from trundle.cli.console import _bar

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.demo import DemoResult
    from trundle.evaluate.comparison import Comparison
    from trundle.evaluate.fidelity import Fidelity, TextError
    from trundle.evaluate.scoring import Result
    from trundle.evaluate.shortening import Inheritance
    from trundle.export.exporting import Exported
    from trundle.methods.depth.curve import Saving
    from trundle.methods.vocabulary.vocabulary import VocabularySizes
    from trundle.model.cost import Cost
    from trundle.pipeline.run import Run
    from trundle.search.trials import Outcome

_Rows = list[tuple[str, ...]]

_SHOWN_FACTS = ("opset", "tracer", "agreement@10", "matmuls in float")
_SHOWN_CHARACTERS = 90
_SHOWN_PARTS = 5
_PART_NAMES = {"align": "training", "align, seconds": "training"}
_NOTHING = "–"


def _count(number: float) -> str:
    """22.7M, 109M, 1.2B, 950."""
    for size, mark in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            scaled = number / size
            return f"{scaled:.1f}{mark}" if scaled < 100 else f"{scaled:.0f}{mark}"
    return f"{number:.0f}"


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB"


def _milliseconds(number: float | None) -> str:
    return "" if number is None else f"{number:.2f} ms"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _points(score: float) -> str:
    return f"{100 * score:.2f}"


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.2f}×"


def _share_percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _described(model: SentenceTransformer) -> tuple[str, str]:
    from trundle.model.layout import layout_of
    from trundle.model.static import static_table
    from trundle.model.surgery import transformer_of

    table = static_table(model)
    if table is not None:
        return "static", f"static (no layers), {table.num_embeddings:,} tokens"
    layout = layout_of(transformer_of(model).model)
    sizes, name = layout.sizes, layout.family.name
    counts = f"{layout.layers} layers, {sizes['hidden']} wide, {sizes['heads']} heads"
    return name, f"{name}, {counts}, {sizes['vocab']:,} tokens"


def _parts(cost: Cost) -> _Rows:
    rows: _Rows = [("part", "parameters", "", "", "bytes", "FLOPs/token", "")]
    for part, own in cost.parts.items():
        if own.parameters or own.flops_per_token:
            share, faster = own.parameters / cost.parameters, own.flops_per_token / cost.flops_per_token
            sizes = _count(own.parameters), _bar(share), f"{share:.1%}", _megabytes(own.bytes)
            rows.append((part, *sizes, _count(own.flops_per_token), f"{faster:.1%}"))
    size, flops = _megabytes(cost.file_bytes), _count(cost.flops_per_token)
    return [*rows, ("all", _count(cost.parameters), "", "", size, flops, "")]


def _savings(before: Cost, savings: Sequence[Saving]) -> _Rows:
    rows: _Rows = [("method", "keeps", "parameters", "weights", "smaller", "FLOPs/token", "fewer FLOPs")]
    for saving in savings:
        fewer = _ratio(before.flops_per_token, saving.after.flops_per_token)
        rows.append((saving.name, saving.keeps, *_sizes(saving.after, before), fewer))
    return rows


def _sizes(cost: Cost, before: Cost) -> tuple[str, ...]:
    """Parameters, weights, how much smaller than before, FLOPs."""
    smaller = _ratio(before.file_bytes, cost.file_bytes)
    return _count(cost.parameters), _megabytes(cost.file_bytes), smaller, _count(cost.flops_per_token)


def _vocabulary(sizes: VocabularySizes) -> _Rows:
    longer = any(row.lengths is not None for row in sizes.rows)
    lengths = ("tokens/text", "") if longer else ()
    rows: _Rows = [("tokens", "", "of your texts", "", "weights", "smaller", *lengths, "removed first")]
    for row in sizes.rows:
        length = () if row.lengths is None else (f"{row.lengths.after:.1f}", f"{row.lengths.ratio:.2f}×")
        _, weights, smaller, _ = _sizes(row.after, sizes.rows[0].after)
        covered = (f"{row.coverage:.2%}", _bar(row.coverage))
        removed = ", ".join(repr(text)[1:-1] for text in row.lost) or _NOTHING
        rows.append((f"{row.keep:,}", row.why, *covered, weights, smaller, *length, removed))
    return rows


def _run(result: Run) -> _Rows:
    before, after = result.before, result.after
    lines = [("before", before, "")]
    for step in result.steps:
        seconds = f"{step.seconds:.1f}" if step.applied else "planned"
        lines.append((f"after {step.call.method.name}", step.after, seconds))
    rows: _Rows = [("", "layers", "parameters", "weights", "FLOPs/token", "seconds")]
    for name, cost, seconds in lines:
        parameters, weights, _, flops = _sizes(cost, before)
        rows.append((name, str(cost.layers), parameters, weights, flops, seconds))
    names = ("parameters", "file_bytes", "flops_per_token")
    ratios = (_ratio(getattr(before, name), getattr(after, name)) for name in names)
    return [*rows, ("ratio", "", *ratios, "")]


def _forecast(result: Run) -> str:
    """Predicted graph sizes of a dry run, and its longest training time."""
    after = result.after
    int8, int4 = (_megabytes(after.graph_bytes[precision]) for precision in ("int8", "int4"))
    graphs = f"As a graph: {int8} in int8, {int4} in int4."
    options = [step.call.options for step in result.steps if not step.applied]
    trained = [each for each in options if getattr(each, "steps", None) != 0]
    limits = [each.minutes for each in trained if hasattr(each, "minutes")]
    if not limits:
        return graphs
    if None in limits:
        return f"{graphs} The training time is not limited; set minutes to limit it."
    return f"{graphs} Training: {sum(limits):g} minutes at most."


def _before_after(scores: Mapping[str, tuple[float, float]]) -> _Rows:
    rows: _Rows = [("held-out queries", "before", "after", "change")]
    for name, (old, new) in scores.items():
        change = f"{(new - old) / old:+.1%}" if old else ""
        rows.append((name, f"{old:.4f}", f"{new:.4f}", change))
    return rows


def _besides(result: Run) -> _Rows:
    scored = ("cosine", "agreement@10")
    rows: _Rows = [("Also written", "parameters", "weights", "smaller", "FLOPs/token", *scored)]
    for sibling in result.additional:
        found = sibling.fidelity
        scores = (f"{found.cosine:.4f}", f"{found.agreement_asymmetric:.1%}") if found else (_NOTHING,) * 2
        rows.append((str(sibling.output), *_sizes(sibling.after, result.before), *scores))
    return rows


def _candidates(outcome: Outcome, most: int) -> _Rows:
    shown = outcome.tried[:most]
    several = len({each.candidate.base for each in outcome.tried}) > 1
    query = "query" if any(each.candidate.milliseconds is not None for each in shown) else ""
    distance = "distance" if any(each.distances for each in shown) else ""
    rows: _Rows = [("candidate", "of" if several else "", "parameters", "file", query, distance, "")]
    for each in shown:
        candidate = each.candidate
        base = Path(candidate.base).name if several else ""
        sizes = _count(candidate.cost.parameters), _megabytes(candidate.bytes)
        distances = " → ".join(f"{distance:.3f}" for distance in each.distances)
        ended = "" if outcome.run is None else each.outcome
        rows.append((candidate.name, base, *sizes, _milliseconds(candidate.milliseconds), distances, ended))
    return rows


def _time_plan(outcome: Outcome) -> str:
    times = outcome.timetable
    if outcome.chosen.candidate.untouched:
        return "Nothing was written. No training is needed: the model itself fits as a smaller graph."
    rounds = ", ".join(f"{rung.candidates} × {_minutes(rung.seconds)}" for rung in times.rungs)
    if rounds:
        trials = f"trials {rounds}"
    elif len(outcome.tried) == 1:
        trials = "no trials, because only one candidate fits"
    else:
        trials = "no time for trials, so the first candidate would be trained"
    vectors = f"teacher vectors {_minutes(times.labelling)} at most"
    if not times.trains:
        few = f"about {times.steps:.0f} steps would be too few to gain anything"
        return f"Nothing was written. The time: {vectors}; no training, because {few}."
    return (
        f"Nothing was written. The time: {vectors}; {trials}; the best candidate {_minutes(times.finishing)}."
    )


def _time_spent(outcome: Outcome) -> str:
    """The parts of a search that took longest, with their shares of the time."""
    whole = sum(outcome.spent.values())
    longest = sorted(outcome.spent.items(), key=lambda part: -part[1])[:_SHOWN_PARTS]
    named = (f"{seconds / whole:.0%} {_PART_NAMES.get(label, label)}" for label, seconds in longest)
    return f"Time: {_minutes(whole)} ({'; '.join(named)})."


def _budget_result(outcome: Outcome) -> _Rows:
    best, before = outcome.chosen.candidate, outcome.before
    size, parameters = outcome.bytes or best.bytes, outcome.parameters or best.cost.parameters
    old, new = outcome.before_milliseconds, outcome.milliseconds

    def line(name: str, parameters: int, size: int, milliseconds: float | None) -> tuple[str, ...]:
        return name, _count(parameters), _megabytes(size), _milliseconds(milliseconds)

    heading = ("", "parameters", "file", "query")
    predicted = line("predicted", best.cost.parameters, best.bytes, best.milliseconds)
    measured = line("measured", parameters, size, new)
    if before is None:
        return [heading, predicted, measured]
    ratios = f"{before.parameters / best.cost.parameters:.1f}×", f"{before.file_bytes / size:.1f}×"
    faster = "" if old is None or new is None else f"{old / new:.1f}×"
    large = line("before", before.parameters, before.file_bytes, old)
    return [heading, large, predicted, measured, ("ratio", *ratios, faster)]


def _demo_summary(result: DemoResult) -> str:
    """What the user gets, in three lines."""
    outcome, ndcg = result.outcome, result.ndcg
    assert outcome.before is not None
    large, small = result.speed.models[0], result.speed.models[-1]
    old, new = outcome.before.file_bytes, outcome.bytes or 0
    before, after = large.short_texts_per_second.value, small.short_texts_per_second.value
    kept = ndcg["asymmetric"] / ndcg["original"]
    return f"""The model is {old / new:.1f}× smaller: {_megabytes(new)} instead of {_megabytes(old)}.
It encodes {after / before:.1f}× as many short texts: {after:,.0f} a second instead of {before:,.0f}.
It keeps {kept:.1%} of the search quality on the index that the original made, which stays as it is."""


def _demo(result: DemoResult) -> _Rows:
    outcome, ndcg, fidelity = result.outcome, result.ndcg, result.fidelity
    before = outcome.before
    assert before is not None
    large, small = result.speed.models[0], result.speed.models[-1]

    def line(label: str, old: float, new: float, write: Callable[[float], str]) -> tuple[str, ...]:
        return label, write(old), write(new), _ratio(new, old)

    def speed(label: str, name: str) -> tuple[str, ...]:
        return line(label, getattr(large, name).value, getattr(small, name).value, "{:,.0f}".format)

    def ndcg_line(label: str, mode: str) -> tuple[str, ...]:
        return line(label, ndcg["original"], ndcg[mode], lambda share: f"{100 * share:.1f}")

    return [
        ("", "original", "small", "small / original"),
        line("parameters", before.parameters, outcome.chosen.candidate.cost.parameters, _count),
        line("file", before.file_bytes, outcome.bytes or 0, _megabytes),
        speed("texts/s, short", "short_texts_per_second"),
        speed("texts/s, long", "long_texts_per_second"),
        ndcg_line("nDCG@10, own index (standard)", "standard"),
        ndcg_line("nDCG@10, original's index (asymmetric)", "asymmetric"),
        (f"agreement@{fidelity.k}, original's index", "", f"{100 * fidelity.agreement_asymmetric:.1f}", ""),
        ("cosine to the original", "", f"{fidelity.cosine:.3f}", ""),
    ]


def _exported(result: Exported) -> _Rows:
    parity = result.closeness
    facts = [(name, value) for name, value in result.graph.facts.items() if name in _SHOWN_FACTS]
    return [
        (str(result.folder / result.graph.path), ""),
        ("precision", result.graph.precision),
        ("graph", _megabytes(result.file_bytes)),
        ("share of the torch weights in float32", f"{result.file_bytes / result.float_bytes:.1%}"),
        (f"cosine to torch, lowest of {parity.texts:,} texts", f"{parity.lowest_cosine:.6f}"),
        ("cosine to torch, mean", f"{parity.mean_cosine:.6f}"),
        *((name, str(len(value) if isinstance(value, list) else value)) for name, value in facts),
    ]


def _scores(results: Sequence[Sequence[Result]], names: Sequence[str]) -> _Rows:
    """One row per task, one column per model; the others are compared with the first model."""
    rows: _Rows = [("task", "metric", *names)]
    keys = list(dict.fromkeys((r.task, r.mode, r.main) for column in results for r in column))
    by_key = [{(r.task, r.mode, r.main): r.score for r in column} for column in results]
    for key in keys:
        task, mode, main = key
        label = task if mode == "standard" else f"{task}, {mode}"
        rows.append((label, main, *(_points(found[key]) if key in found else _NOTHING for found in by_key)))
    means = [fmean(score for key, score in found.items() if key[1] == "standard") for found in by_key]
    if len(keys) > 1:
        rows.append(("mean, standard", "", *map(_points, means)))
    if len(names) > 1:
        rows.append(("share of the first", "", *(f"{mean / means[0]:.1%}" for mean in means)))
    return rows


def _compare_scores(found: Comparison, names: Sequence[str]) -> _Rows:
    """One row per task: the teacher, then each student on its own index and on the teacher's, with shares."""
    teacher, *students = found.results
    modes = [list(dict.fromkeys(result.mode for result in row)) for row in students]
    heading = ["task", "metric", names[0]]
    for name, own in zip(names[1:], modes, strict=True):
        for mode in own:
            heading += [name if mode == "standard" else f"{name} → {names[0]}", "share"]
    rows: _Rows = [tuple(heading)]
    for theirs in teacher:
        line = [theirs.task, theirs.main, _points(theirs.score)]
        for row, own in zip(students, modes, strict=True):
            by_mode = {r.mode: r.score for r in row if (r.kind, r.task) == (theirs.kind, theirs.task)}
            for mode in own:  # a task without documents has the same score in both modes
                share = by_mode[mode] / theirs.score if mode in by_mode and theirs.score else None
                line += [_points(by_mode[mode]), _share_percent(share)] if mode in by_mode else ["same", ""]
        rows.append(tuple(line))
    for over in dict.fromkeys(share.over for share in found.shares) if len(teacher) > 1 else ():
        means = {(share.model, share.mode): share for share in found.shares if share.over == over}
        first, tasks = next(iter(means.values())), "tasks" if over == "all" else "with documents"
        line = [f"mean of {first.tasks} {tasks}", "", _points(first.teacher_mean)]
        for key in ((model, mode) for model, own in zip(found.models, modes, strict=True) for mode in own):
            mean = means.get(key)
            line += [_points(mean.mean), _share_percent(mean.share)] if mean else [_NOTHING, ""]
        rows.append(tuple(line))
    return rows


def _fidelities(found: Sequence[Fidelity], names: Sequence[str], teacher: str) -> _Rows:
    first = found[0]
    title = f"against {teacher}, {first.queries:,} queries × {first.documents:,} documents"
    asymmetric = (_share_percent(one.agreement_asymmetric) for one in found)
    return [
        (title, *names),
        ("cosine", *(f"{one.cosine:.4f}" for one in found)),
        ("ℓ2 distance", *(f"{one.distance:.4f}" for one in found)),
        (f"agreement@{first.k}, searching its index", *asymmetric),
        (f"agreement@{first.k}, own index", *(_share_percent(one.agreement_standard) for one in found)),
    ]


def _text_errors(found: Fidelity, name: str) -> _Rows:
    def row(error: TextError) -> tuple[str, ...]:
        line = " ".join(error.text.split())
        text = line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
        return f"{error.distance:.3f}", f"{error.cosine:.3f}", text

    heading = ("ℓ2", "cosine", f"farthest from the teacher, {name}")
    closest = ("", "", "closest to the teacher")
    return [heading, *map(row, found.farthest), closest, *map(row, found.closest)]


def _inheritance(found: Inheritance, teacher: str, student: str) -> _Rows:
    """Scores with truncated and quantised vectors, each with its share of the score with full vectors."""
    heading = ["dimensions", "kept as", "bytes"]
    for name in (teacher, f"{student} → {teacher}", student):
        heading += [name, "share"]
    rows: _Rows = [tuple(heading)]
    for row in found.rows:
        line = [str(row.dimensions), row.precision, f"{row.bytes:,}"]
        for who, score in row.scores.items():
            line += [_points(score), _share_percent(row.kept[who])]
        rows.append(tuple(line))
    return rows

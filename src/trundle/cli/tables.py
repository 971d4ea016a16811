"""Results as rows of a table: how each verb's numbers are written for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trundle.cli.console import _bar

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.bench.results import Measurement
    from trundle.demo import DemoResult
    from trundle.evaluate.comparison import Comparison, Share
    from trundle.evaluate.fidelity import Fidelity
    from trundle.evaluate.scoring import Result
    from trundle.evaluate.shortening import Inheritance
    from trundle.export.exporting import Exported
    from trundle.methods.savings import Saving
    from trundle.methods.vocabulary.vocabulary import VocabularySizes
    from trundle.model.cost import Cost
    from trundle.pipeline.run import Run

_Rows = list[tuple[str, ...]]

_SHOWN_FACTS = ("opset", "tracer", "agreement@10", "products in float")


def _count(number: float) -> str:
    """22.7M, 109M, 1.2B, 950."""
    for size, mark in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            scaled = number / size
            return f"{scaled:.1f}{mark}" if scaled < 100 else f"{scaled:.0f}{mark}"
    return f"{number:.0f}"


def _megabytes(number: float) -> str:
    """Millions of bytes."""
    return f"{number / 1e6:,.1f} MB"


def _described(model: SentenceTransformer) -> tuple[str, str]:
    """A model's family, and its sizes in words."""
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
    """Where the parameters, bytes and work are."""
    rows: _Rows = [("part", "parameters", "", "", "bytes", "FLOPs/token", "")]
    total = cost.total
    for part, figures in cost.parts.items():
        if not figures.parameters and not figures.flops_per_token:
            continue
        share, work = figures.parameters / total.parameters, figures.flops_per_token / total.flops_per_token
        shown = (
            _bar(share),
            f"{share:.1%}",
            _megabytes(figures.bytes),
            _count(figures.flops_per_token),
            f"{work:.1%}",
        )
        rows.append((part, _count(figures.parameters), *shown))
    rows.append(
        (
            "all",
            _count(total.parameters),
            "",
            "",
            _megabytes(cost.file_bytes),
            _count(total.flops_per_token),
            "",
        )
    )
    return rows


def _menu(before: Cost, savings: Sequence[Saving]) -> _Rows:
    """What each step could save."""
    rows: _Rows = [("step", "keeps", "parameters", "weights", "smaller", "FLOPs/token", "less work")]
    for saving in savings:
        after = saving.after
        rows.append(
            (
                saving.name,
                saving.keeps,
                _count(after.parameters),
                _megabytes(after.file_bytes),
                f"{before.file_bytes / after.file_bytes:.2f}×",
                _count(after.flops_per_token),
                f"{before.flops_per_token / after.flops_per_token:.2f}×",
            )
        )
    return rows


def _vocabulary(sizes: VocabularySizes) -> _Rows:
    """What a vocabulary of each size covers, weighs and costs in tokens."""
    longer = any(row.lengths is not None for row in sizes.rows)
    heading = (
        "tokens",
        "",
        "of your texts",
        "",
        "weights",
        "smaller",
        *(["tokens/text", ""] if longer else []),
    )
    rows: _Rows = [(*heading, "lost first")]
    for row in sizes.rows:
        length = () if row.lengths is None else (f"{row.lengths.after:.1f}", f"{row.lengths.ratio:.2f}×")
        smaller = sizes.rows[0].after.file_bytes / row.after.file_bytes
        weights = (_megabytes(row.after.file_bytes), f"{smaller:.2f}×")
        covered = (f"{row.coverage:.2%}", _bar(row.coverage))
        lost = ", ".join(repr(text)[1:-1] for text in row.lost) or "–"
        rows.append((f"{row.keep:,}", row.why, *covered, *weights, *length, lost))
    return rows


def _run(result: Run) -> _Rows:
    """A compression, step by step."""
    rows: _Rows = [("", "layers", "parameters", "weights", "FLOPs/token", "seconds")]

    def line(name: str, cost: Cost, seconds: str) -> tuple[str, ...]:
        figures = (_count(cost.parameters), _megabytes(cost.file_bytes), _count(cost.flops_per_token))
        return (name, str(cost.layers), *figures, seconds)

    rows.append(line("before", result.before, ""))
    for step in result.steps:
        seconds = f"{step.seconds:.1f}" if step.applied else "planned"
        rows.append(line(f"after {step.call.method.name}", step.after, seconds))
    before, after = result.before, result.after
    ratios = [
        before.parameters / after.parameters,
        before.file_bytes / after.file_bytes,
        before.flops_per_token / after.flops_per_token,
    ]
    rows.append(("ratio", "", *(f"{ratio:.2f}×" for ratio in ratios), ""))
    return rows


def _outlook(result: Run) -> str:
    """What a dry run can tell besides: files a graph would take, and how long trainings that have a limit may go."""
    after = result.after
    sizes = after.graph_bytes
    graphs = f"As a graph: {_megabytes(sizes['int8'])} in int8, {_megabytes(sizes['int4'])} in int4."
    options = [step.call.options for step in result.steps if not step.applied]
    trained = [each for each in options if hasattr(each, "minutes") and getattr(each, "steps", None) != 0]
    limits = [each.minutes for each in trained]
    if not limits:
        return graphs
    if None in limits:
        return f"{graphs} Training goes on until it is done; minutes would limit it."
    return f"{graphs} Training: {sum(limits):g} minutes at most."


def _judged(scores: Mapping[str, tuple[float, float]]) -> _Rows:
    """What a step measured of the original and of the result."""
    rows: _Rows = [("held-back queries", "before", "after", "change")]
    for name, (old, new) in scores.items():
        change = f"{(new - old) / old:+.1%}" if old else ""
        rows.append((name, f"{old:.4f}", f"{new:.4f}", change))
    return rows


def _additional(result: Run) -> _Rows:
    """The further models of a run, and how near each is to the original."""
    rows: _Rows = [
        ("Also written", "parameters", "weights", "smaller", "FLOPs/token", "cosine", "agreement@10")
    ]
    for sibling in result.additional:
        size, near = sibling.after, sibling.fidelity
        rows.append(
            (
                str(sibling.output),
                _count(size.parameters),
                _megabytes(size.file_bytes),
                f"{result.before.file_bytes / size.file_bytes:.2f}×",
                _count(size.flops_per_token),
                "–" if near is None else f"{near.cosine:.4f}",
                "–" if near is None else f"{near.agreement_asymmetric:.1%}",
            )
        )
    return rows


def _fidelity(result: Fidelity) -> _Rows:
    """A model beside its teacher."""
    return [
        (f"against {result.teacher}, {result.queries:,} queries × {result.documents:,} documents", ""),
        ("cosine", f"{result.cosine:.4f}"),
        ("ℓ2 distance", f"{result.distance:.4f}"),
        (f"agreement@{result.k}, searching its index", f"{result.agreement_asymmetric:.1%}"),
        (f"agreement@{result.k}, own index", f"{result.agreement_standard:.1%}"),
    ]


def _scores(results: Sequence[Sequence[Result]], names: Sequence[str]) -> _Rows:
    """Tasks down, models across; the first model is what the others are a share of."""
    rows: _Rows = [("task", "measure", *names)]
    keys = list(dict.fromkeys((r.task, r.mode, r.main) for column in results for r in column))
    by_key = [{(r.task, r.mode, r.main): r.score for r in column} for column in results]
    for key in keys:
        task, mode, main = key
        label = task if mode == "standard" else f"{task}, {mode}"
        rows.append((label, main, *(f"{100 * found[key]:.2f}" if key in found else "–" for found in by_key)))
    standard = [[key for key in keys if key[1] == "standard" and key in found] for found in by_key]
    means = [
        sum(found[key] for key in chosen) / len(chosen)
        for found, chosen in zip(by_key, standard, strict=True)
    ]
    if len(keys) > 1:
        rows.append(("mean, standard", "", *(f"{100 * mean:.2f}" for mean in means)))
    if len(names) > 1:
        rows.append(("share of the first", "", *(f"{mean / means[0]:.1%}" for mean in means)))
    return rows


def _demo(result: DemoResult) -> _Rows:
    """The original and the small model as they are shipped, side by side."""
    outcome, ndcg, near = result.outcome, result.ndcg, result.fidelity
    big, small = result.speed.models[0], result.speed.models[-1]
    rows: _Rows = [("", "original", "small", "small / original")]

    def line(label: str, old: float, new: float, write: Callable[[float], str]) -> None:
        rows.append((label, write(old), write(new), f"{new / old:.2f}×"))

    def speed(label: str, old: Measurement, new: Measurement) -> None:
        line(label, old.value, new.value, lambda rate: f"{rate:,.0f}")

    line("parameters", outcome.before.parameters, outcome.chosen.candidate.cost.parameters, _count)
    line("file", outcome.before.file_bytes, outcome.bytes or 0, _megabytes)
    speed("texts/s, short", big.short_texts_per_second, small.short_texts_per_second)
    speed("texts/s, long", big.long_texts_per_second, small.long_texts_per_second)
    line("nDCG@10, own index (standard)", ndcg["original"], ndcg["standard"], _percent)
    line("nDCG@10, original's index (asymmetric)", ndcg["original"], ndcg["asymmetric"], _percent)
    rows.append((f"agreement@{near.k}, original's index", "", _percent(near.agreement_asymmetric), ""))
    rows.append(("cosine to the original", "", f"{near.cosine:.3f}", ""))
    return rows


def _exported(result: Exported) -> _Rows:
    """A graph beside the torch model it was made from."""
    near = result.closeness
    return [
        (str(result.folder / result.graph.path), ""),
        ("precision", result.graph.precision),
        ("graph", _megabytes(result.file_bytes)),
        ("share of the torch weights in float32", f"{result.file_bytes / result.float_bytes:.1%}"),
        (f"cosine to torch, lowest of {near.texts:,} texts", f"{near.lowest_cosine:.6f}"),
        ("cosine to torch, mean", f"{near.mean_cosine:.6f}"),
        *(
            (name, f"{len(value)}" if isinstance(value, list) else str(value))
            for name, value in result.graph.facts.items()
            if name in _SHOWN_FACTS
        ),
    ]


def _percent(share: float) -> str:
    """A share of 1, times a hundred."""
    return f"{100 * share:.1f}"


_SHOWN_CHARACTERS = 90
_NOTHING = "–"


def _compare_scores(found: Comparison, names: Sequence[str]) -> _Rows:
    """Tasks down; across: the teacher, then each student on its own index and on the teacher's, each with its share.

    `names` are the headings of the teacher and of the students.
    """
    teacher, *students = found.results
    searches = [any(result.mode == "asymmetric" for result in row) for row in students]
    heading = ["task", "measure", names[0]]
    for name, both in zip(names[1:], searches, strict=True):
        heading += [name, "share", *([f"{name} → {names[0]}", "share"] if both else [])]
    rows: _Rows = [tuple(heading)]
    for theirs in teacher:
        line = [theirs.task, theirs.main, _points(theirs.score)]
        for row, both in zip(students, searches, strict=True):
            line += _both_modes(theirs, row, both=both)
        rows.append(tuple(line))
    if len(teacher) > 1:
        rows += [
            _means(found, over, searches) for over in dict.fromkeys(share.over for share in found.shares)
        ]
    return rows


def _both_modes(theirs: Result, row: Sequence[Result], *, both: bool) -> list[str]:
    """A student's figures on one task; where there are no documents apart, both modes are one."""
    cells = []
    for mode in ("standard", "asymmetric") if both else ("standard",):
        same = [r for r in row if (r.kind, r.task, r.mode) == (theirs.kind, theirs.task, mode)]
        if same:
            cells += [
                _points(same[0].score),
                _share_percent(same[0].score / theirs.score if theirs.score else None),
            ]
        else:
            cells += ["same", ""]
    return cells


def _means(found: Comparison, over: str, searches: Sequence[bool]) -> tuple[str, ...]:
    chosen = [share for share in found.shares if share.over == over]
    what = "tasks" if over == "all" else "with documents"
    line = [f"mean of {chosen[0].tasks} {what}", "", _points(chosen[0].teacher_mean)]
    by_model: dict[tuple[str, str], Share] = {(share.model, share.mode): share for share in chosen}
    for model, both in zip(found.models, searches, strict=True):
        for mode in ("standard", "asymmetric") if both else ("standard",):
            share = by_model.get((model, mode))
            line += [_points(share.mean), _share_percent(share.share)] if share else [_NOTHING, ""]
    return tuple(line)


def _fidelities(found: Sequence[Fidelity], names: Sequence[str], teacher: str) -> _Rows:
    """How near each student is to the teacher on plain texts."""
    first = found[0]
    title = f"against {teacher}, {first.queries:,} queries × {first.documents:,} documents"
    return [
        (title, *names),
        ("cosine", *(f"{one.cosine:.4f}" for one in found)),
        ("ℓ2 distance", *(f"{one.distance:.4f}" for one in found)),
        (
            f"agreement@{first.k}, searching its index",
            *(_share_percent(one.agreement_asymmetric) for one in found),
        ),
        (f"agreement@{first.k}, own index", *(_share_percent(one.agreement_standard) for one in found)),
    ]


def _text_errors(found: Fidelity, name: str) -> _Rows:
    """The texts a student gets most wrong and most right."""
    rows: _Rows = [("ℓ2", "cosine", f"farthest from the teacher, {name}")]
    for heading, errors in ((None, found.farthest), ("nearest to the teacher", found.closest)):
        if heading:
            rows.append(("", "", heading))
        rows += [(f"{error.distance:.3f}", f"{error.cosine:.3f}", _shortened(error.text)) for error in errors]
    return rows


def _inheritance(found: Inheritance, teacher: str, student: str) -> _Rows:
    """What is left of shortened vectors: each score with its share of the same model's own with whole vectors."""
    heading = ["dimensions", "kept as", "bytes"]
    for name in (teacher, f"{student} → {teacher}", student):
        heading += [name, "left"]
    rows: _Rows = [tuple(heading)]
    for row in found.rows:
        line = [str(row.dimensions), row.precision, f"{row.bytes:,}"]
        for who, score in row.scores.items():
            line += [_points(score), _share_percent(row.kept[who])]
        rows.append(tuple(line))
    return rows


def _shortened(text: str) -> str:
    """One line of a text."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"


def _points(score: float) -> str:
    """A score of 1 as 100."""
    return f"{100 * score:.2f}"


def _share_percent(share: float | None) -> str:
    """A share, or a dash where there is none."""
    return _NOTHING if share is None else f"{share:.1%}"

"""Results as rows of a table: how each verb's numbers are written for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trundle.cli.console import bar

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.bench.summary import Measured
    from trundle.demo import DemoResult
    from trundle.evaluate import Fidelity, Result
    from trundle.export import Exported
    from trundle.measure import Cost, Saving
    from trundle.runs import Run
    from trundle.steps.vocabulary_sizes import VocabularySizes

Rows = list[tuple[str, ...]]

SHOWN_FACTS = ("opset", "tracer", "agreement@10", "products in float")


def count(number: float) -> str:
    """22.7M, 109M, 1.2B, 950."""
    for size, mark in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            scaled = number / size
            return f"{scaled:.1f}{mark}" if scaled < 100 else f"{scaled:.0f}{mark}"
    return f"{number:.0f}"


def megabytes(number: float) -> str:
    """Millions of bytes."""
    return f"{number / 1e6:,.1f} MB"


def described(model: SentenceTransformer) -> tuple[str, str]:
    """A model's family, and its sizes in words."""
    from trundle.model import layout_of, static_table, transformer_of

    table = static_table(model)
    if table is not None:
        return "static", f"static (no layers), {table.num_embeddings:,} tokens"
    layout = layout_of(transformer_of(model).model)
    sizes, name = layout.sizes, layout.family.name
    counts = f"{layout.layers} layers, {sizes['hidden']} wide, {sizes['heads']} heads"
    return name, f"{name}, {counts}, {sizes['vocab']:,} tokens"


def parts(cost: Cost) -> Rows:
    """Where the parameters, bytes and work are."""
    rows: Rows = [("part", "parameters", "", "", "bytes", "FLOPs/token", "")]
    total = cost.total
    for part, figures in cost.parts.items():
        if not figures.parameters and not figures.flops_per_token:
            continue
        share, work = figures.parameters / total.parameters, figures.flops_per_token / total.flops_per_token
        shown = (
            bar(share),
            f"{share:.1%}",
            megabytes(figures.bytes),
            count(figures.flops_per_token),
            f"{work:.1%}",
        )
        rows.append((part, count(figures.parameters), *shown))
    rows.append(
        ("all", count(total.parameters), "", "", megabytes(cost.file_bytes), count(total.flops_per_token), "")
    )
    return rows


def menu(before: Cost, savings: Sequence[Saving]) -> Rows:
    """What each step could save."""
    rows: Rows = [("step", "keeps", "parameters", "weights", "smaller", "FLOPs/token", "less work")]
    for saving in savings:
        after = saving.after
        rows.append(
            (
                saving.step,
                saving.says,
                count(after.parameters),
                megabytes(after.file_bytes),
                f"{before.file_bytes / after.file_bytes:.2f}×",
                count(after.flops_per_token),
                f"{before.flops_per_token / after.flops_per_token:.2f}×",
            )
        )
    return rows


def vocabulary(sizes: VocabularySizes) -> Rows:
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
    rows: Rows = [(*heading, "lost first")]
    for row in sizes.rows:
        length = () if row.lengths is None else (f"{row.lengths.after:.1f}", f"{row.lengths.ratio:.2f}×")
        smaller = sizes.rows[0].after.file_bytes / row.after.file_bytes
        weights = (megabytes(row.after.file_bytes), f"{smaller:.2f}×")
        covered = (f"{row.coverage:.2%}", bar(row.coverage))
        lost = ", ".join(repr(text)[1:-1] for text in row.lost) or "–"
        rows.append((f"{row.keep:,}", row.why, *covered, *weights, *length, lost))
    return rows


def run(result: Run) -> Rows:
    """A compression, step by step."""
    rows: Rows = [("", "layers", "parameters", "weights", "FLOPs/token", "seconds")]

    def line(name: str, cost: Cost, seconds: str) -> tuple[str, ...]:
        figures = (count(cost.parameters), megabytes(cost.file_bytes), count(cost.flops_per_token))
        return (name, str(cost.layers), *figures, seconds)

    rows.append(line("before", result.before, ""))
    for step in result.steps:
        seconds = f"{step.seconds:.1f}" if step.applied else "planned"
        rows.append(line(f"after {step.call.step.name}", step.after, seconds))
    before, after = result.before, result.after
    ratios = [
        before.parameters / after.parameters,
        before.file_bytes / after.file_bytes,
        before.flops_per_token / after.flops_per_token,
    ]
    rows.append(("ratio", "", *(f"{ratio:.2f}×" for ratio in ratios), ""))
    return rows


def outlook(result: Run) -> str:
    """What a dry run can tell besides: files a graph would take, and how long trainings that have a limit may go."""
    after = result.after
    graphs = (
        f"As a graph: {megabytes(after.int8_file_bytes)} in int8, {megabytes(after.int4_file_bytes)} in int4."
    )
    options = [step.call.options for step in result.steps if not step.applied]
    trained = [each for each in options if hasattr(each, "minutes") and getattr(each, "steps", None) != 0]
    limits = [each.minutes for each in trained]
    if not limits:
        return graphs
    if None in limits:
        return f"{graphs} Training goes on until it is done; minutes would limit it."
    return f"{graphs} Training: {sum(limits):g} minutes at most."


def judged(scores: Mapping[str, tuple[float, float]]) -> Rows:
    """What a step measured of the original and of the result."""
    rows: Rows = [("held-back queries", "before", "after", "change")]
    for name, (old, new) in scores.items():
        change = f"{(new - old) / old:+.1%}" if old else ""
        rows.append((name, f"{old:.4f}", f"{new:.4f}", change))
    return rows


def besides(result: Run) -> Rows:
    """The further models of a run, and how near each is to the original."""
    rows: Rows = [
        ("Also written", "parameters", "weights", "smaller", "FLOPs/token", "cosine", "agreement@10")
    ]
    for sibling in result.besides:
        size, near = sibling.after, sibling.fidelity
        rows.append(
            (
                str(sibling.output),
                count(size.parameters),
                megabytes(size.file_bytes),
                f"{result.before.file_bytes / size.file_bytes:.2f}×",
                count(size.flops_per_token),
                "–" if near is None else f"{near.cosine:.4f}",
                "–" if near is None else f"{near.agreement_asymmetric:.1%}",
            )
        )
    return rows


def fidelity(result: Fidelity) -> Rows:
    """A model beside its teacher."""
    return [
        (f"against {result.teacher}, {result.queries:,} queries × {result.documents:,} documents", ""),
        ("cosine", f"{result.cosine:.4f}"),
        ("ℓ2 distance", f"{result.distance:.4f}"),
        (f"agreement@{result.k}, searching its index", f"{result.agreement_asymmetric:.1%}"),
        (f"agreement@{result.k}, own index", f"{result.agreement_standard:.1%}"),
    ]


def scores(results: Sequence[Sequence[Result]], names: Sequence[str]) -> Rows:
    """Tasks down, models across; the first model is what the others are a share of."""
    rows: Rows = [("task", "measure", *names)]
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


def demo(result: DemoResult) -> Rows:
    """The original and the small model as they are shipped, side by side."""
    outcome, ndcg, near = result.outcome, result.ndcg, result.fidelity
    big, small = result.speed.models[0], result.speed.models[-1]
    rows: Rows = [("", "original", "small", "small / original")]

    def line(label: str, old: float, new: float, write: Callable[[float], str]) -> None:
        rows.append((label, write(old), write(new), f"{new / old:.2f}×"))

    def speed(label: str, old: Measured, new: Measured) -> None:
        line(label, old.value, new.value, lambda rate: f"{rate:,.0f}")

    line("parameters", outcome.before.parameters, outcome.chosen.candidate.cost.parameters, count)
    line("file", outcome.before.file_bytes, outcome.bytes or 0, megabytes)
    speed("texts/s, short", big.short_texts_per_second, small.short_texts_per_second)
    speed("texts/s, long", big.long_texts_per_second, small.long_texts_per_second)
    line("nDCG@10, own index (standard)", ndcg["original"], ndcg["standard"], percent)
    line("nDCG@10, original's index (asymmetric)", ndcg["original"], ndcg["asymmetric"], percent)
    rows.append((f"agreement@{near.k}, original's index", "", percent(near.agreement_asymmetric), ""))
    rows.append(("cosine to the original", "", f"{near.cosine:.3f}", ""))
    return rows


def exported(result: Exported) -> Rows:
    """A graph beside the torch model it was made from."""
    near = result.parity
    return [
        (str(result.folder / result.graph.path), ""),
        ("precision", result.graph.precision),
        ("graph", megabytes(result.file_bytes)),
        ("share of the torch weights in float32", f"{result.file_bytes / result.float_bytes:.1%}"),
        (f"cosine to torch, lowest of {near.texts:,} texts", f"{near.lowest_cosine:.6f}"),
        ("cosine to torch, mean", f"{near.mean_cosine:.6f}"),
        *(
            (name, f"{len(value)}" if isinstance(value, list) else str(value))
            for name, value in result.graph.facts.items()
            if name in SHOWN_FACTS
        ),
    ]


def percent(share: float) -> str:
    """A share of 1, times a hundred."""
    return f"{100 * share:.1f}"

"""The verbs that look, measure and carry out recipes. Each one parses, makes one call, prints one result."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from trundle.cli import budget as budget_module
from trundle.cli import layers as layers_module
from trundle.cli.budget import _candidates
from trundle.cli.common import (
    _carry_out,
    _Data,
    _DryRun,
    _Force,
    _Json,
    _Model,
    _Output,
    _Pair,
    _Quiet,
    _Seed,
    _TrustRemoteCode,
    _Verbose,
)
from trundle.cli.console import _calm_libraries, _show, _show_json, _show_table, _terminal
from trundle.cli.layers import _check_flags, _measured
from trundle.cli.tables import _demo, _described, _menu, _parts, _vocabulary
from trundle.errors import BadInput

_Models = Annotated[
    list[str], typer.Argument(help="Model folders or hub names; the first is what others are compared with.")
]


def inspect(
    model: _Model,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also draw how well each layer would do as the last one.")
    ] = False,
    vocabulary: Annotated[
        bool, typer.Option("--vocabulary", help="What vocabularies of several sizes cover of your --data.")
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            help="For --layers: query, positive and negatives; for --vocabulary: texts. Files or folders.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw --layers into this .html or .svg file, too.")
    ] = None,
    seed: _Seed = 0,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Show where the bytes are and what each step could save."""
    _check_flags(layers=layers, vocabulary=vocabulary, data=data, output=output)
    _calm_libraries(verbose=verbose)
    if vocabulary:
        _inspect_vocabulary(model, data, seed=seed, as_json=as_json, quiet=quiet, trust=trust)
        return
    from trundle.methods.savings import list_savings
    from trundle.model.cost import cost
    from trundle.model.load import load

    opened = load(model, trust_remote_code=trust)
    family, about = _described(opened)
    now, menu = cost(opened), list_savings(opened)
    curve = None
    if layers:
        progress = _terminal(quiet=quiet or as_json)
        curve = _measured(opened, model, data or [], output, seed=seed, progress=progress)
    if as_json:
        savings = [{"step": saving.name, "keeps": saving.keeps, **saving.after.as_json()} for saving in menu]
        shown = {"model": model, "family": family, **now.as_json(), "savings": savings}
        _show_json(shown if curve is None else shown | {"curve": curve.as_json()})
        return
    _show(f"{model}: {about}, vectors of {opened.get_embedding_dimension()}")
    _show()
    _show_table(_parts(now), texts=(0, 2))
    if menu:
        _show()
        title = f"What each step could save (work at {now.length} tokens a text)"
        _show_table(_menu(now, menu), title=title, texts=(0, 1))
    if curve is not None:
        layers_module._show(opened, curve)


def _inspect_vocabulary(
    model: str, data: list[str] | None, *, seed: int, as_json: bool, quiet: bool, trust: bool
) -> None:
    from trundle.data.corpus import read_corpus
    from trundle.methods.contract import Context
    from trundle.methods.vocabulary.vocabulary import list_sizes
    from trundle.model.load import load

    progress = _terminal(quiet=quiet or as_json)
    corpus = read_corpus(data, seed=seed, progress=progress) if data else None
    opened = load(model, trust_remote_code=trust)
    context = Context(original=opened, corpus=corpus, seed=seed, progress=progress)
    sizes = list_sizes(opened, context)
    if as_json:
        _show_json({"model": model, **sizes.as_json()})
        return
    _show(
        f"{model}: {sizes.rows[0].keep:,} tokens, judged by {sizes.texts:,} texts of {sizes.tokens:,} tokens; "
        f"tokens per text on {sizes.held_out:,} others"
    )
    _show()
    rows = _vocabulary(sizes)
    _show_table(rows, texts=(1, 3, len(rows[0]) - 1))


def compress(
    model: _Model,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="A recipe that comes with trundle, or a .yaml file.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            "-b",
            help="Instead of a recipe: 12MB, 10x, 20M-params, 5ms; repeatable. The best that fits.",
        ),
    ] = None,
    output: _Output = None,
    data: _Data = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="step.option=value, over the recipe's own.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="With --budget: time for all of it. Default: 30.")
    ] = None,
    student: Annotated[
        list[str] | None,
        typer.Option(
            "--student", help="With --budget: a small model that may be trained instead; repeatable."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not go on with a run of the same command that was stopped.")
    ] = False,
    seed: _Seed = 0,
    dry_run: _DryRun = False,
    force: _Force = False,
    pair: _Pair = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Make a small model out of a large one, by a recipe or to a budget."""
    if (recipe is None) == (not budget):
        raise BadInput("say how with --recipe NAME, or what it may cost with --budget 12MB, one of the two")
    if recipe is None:
        budget_module._carry_out(
            model,
            budget or [],
            output=output,
            data=data,
            minutes=minutes,
            students=student or [],
            seed=seed,
            dry_run=dry_run,
            force=force,
            fresh=fresh,
            pair=pair,
            as_json=as_json,
            quiet=quiet,
            verbose=verbose,
            trust=trust,
            changes=change,
        )
        return
    if minutes is not None or student:
        raise BadInput("--minutes and --student go with --budget; a recipe takes --set align.minutes=10")
    from trundle.recipe import read_recipe

    _carry_out(
        model,
        read_recipe(recipe, change or []),
        output=output,
        data=data,
        seed=seed,
        dry_run=dry_run,
        force=force,
        as_json=as_json,
        quiet=quiet,
        verbose=verbose,
        trust=trust,
        pair=pair,
        fresh=fresh,
    )


def recipes(as_json: _Json = False) -> None:
    """List the recipes that come with trundle."""
    from trundle.recipe import read_recipe, recipe_names

    found = [read_recipe(name) for name in recipe_names()]
    if as_json:
        _show_json({recipe.name: recipe.as_json() for recipe in found})
        return
    rows = [("recipe", "steps", "")]
    rows += [
        (recipe.name, " → ".join(call.method.name for call in recipe.calls), recipe.about) for recipe in found
    ]
    _show_table(rows, texts=(0, 1, 2))


def bench(
    models: _Models,
    data: _Data = None,
    rounds: Annotated[
        int, typer.Option(help="How often each measure is repeated, interleaved between models.")
    ] = 5,
    seconds: Annotated[float, typer.Option(help="How long each measure runs in each round.")] = 0.5,
    batch_size: Annotated[int, typer.Option(help="Texts per batch where throughput is measured.")] = 32,
    threads: Annotated[int | None, typer.Option(help="Threads for each model; all cores by default.")] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Measure speed, latency, memory and size side by side.

    Each model runs in a process of its own, in turns.
    """
    from trundle.bench.results import caution, rows
    from trundle.bench.rounds import BenchOptions
    from trundle.bench.rounds import bench as measure

    texts = None
    if data:
        from trundle.data.texts import read_texts

        texts = (text.text for text in read_texts(data))
    result = measure(
        models,
        texts=texts,
        options=BenchOptions(rounds=rounds, seconds=seconds, batch_size=batch_size, threads=threads),
        all_engines=True,
        progress=_terminal(quiet=quiet or as_json),
    )
    if as_json:
        _show_json(result.as_dict())
    else:
        _show_table(rows(result))
        if warning := caution(result):
            _show(warning)


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the small model goes.")] = Path(
        "demo/small"
    ),
    force: _Force = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
) -> None:
    """Do the whole job on this machine, with a real model.

    The texts are the documentation of the Python packages installed here; nothing is downloaded.
    """
    _calm_libraries(verbose=verbose)
    from trundle.demo import run_demo

    result = run_demo(output, replace=force, progress=_terminal(quiet=quiet or as_json))
    if as_json:
        _show_json(result.as_json())
        return
    _show_table(_candidates(result.outcome), title=f"Within {result.outcome.budget}", texts=(0, 1))
    _show()
    _show_table(_demo(result))
    _show()
    _show(f"The small model is in {result.output}. Use it with the index the original built:")
    _show()
    _show("    from sentence_transformers import SentenceTransformer")
    _show(f'    model = SentenceTransformer("{result.output}")')
    _show('    model.encode_query("how do I open a file?")')
    _show()
    _show(f"All of it to look at: {result.page}")
    if sys.stdout.isatty():
        webbrowser.open(result.page.absolute().as_uri())

"""The flags verbs share, and the one call behind every verb that makes a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trundle.cli.console import _calm_libraries, _show, _show_json, _show_table, _terminal
from trundle.cli.tables import _additional, _fidelity, _judged, _outlook, _run
from trundle.errors import BadInput
from trundle.progress import is_first

if TYPE_CHECKING:
    from trundle.pipeline.run import Run
    from trundle.recipe import Recipe

_Model = Annotated[str, typer.Argument(help="A model folder or hub name.")]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the result.")]
_Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", "-d", help="Texts: .txt .jsonl .csv .tsv .parquet, a folder, or 'environment'; repeatable."
    ),
]
_Seed = Annotated[int, typer.Option(help="Same seed, same bytes.", min=0, max=2**31 - 1)]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan and forecast only; write nothing.")]
_Force = Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")]
_Pair = Annotated[
    bool,
    typer.Option(
        "--pair", help="Also write OUTPUT-pair: one model, queries by the result, documents by its teacher."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show what the libraries underneath say, and tracebacks.")
]
_TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


def _carry_out(
    model: str,
    recipe: Recipe,
    *,
    output: Path | None,
    data: list[str] | None,
    seed: int,
    dry_run: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    trust: bool,
    pair: bool = False,
    fresh: bool = False,
) -> None:
    """Run a recipe and show what came of it."""
    if output is None and not dry_run:
        raise BadInput("say where the result goes with -o FOLDER, or only look with --dry-run")
    _calm_libraries(verbose=verbose)
    from trundle.data.corpus import read_corpus
    from trundle.pipeline.card import how_to_open
    from trundle.pipeline.compress import run_recipe
    from trundle.pipeline.run import Request

    progress = _terminal(quiet=quiet or as_json or not is_first())
    request = Request(
        source=model,
        output=output,
        corpus=read_corpus(data, seed=seed, progress=progress) if data else None,
        seed=seed,
        dry_run=dry_run,
        replace=force,
        pair=pair,
        trust_remote_code=trust,
        fresh=fresh,
        progress=progress,
    )
    run = run_recipe(request, recipe)
    if not is_first():
        return
    if as_json:
        _show_json(run.as_json())
        return
    _show_table(_run(run))
    if dry_run:
        _show()
        _show(_outlook(run))
    if run.fidelity is not None:
        _show()
        _show_table(_fidelity(run.fidelity))
    if run.judged:
        _show()
        _show_table(_judged(run.judged))
    if run.output is not None:
        _show()
        call = how_to_open(str(run.output), needs_trundle=run.needs_trundle)
        _show(f"Written to {run.output}: {call} opens it.")
        if run.only_cut:
            _show(
                f"It is cut and not yet healed: trundle align {run.output} --teacher {run.source} --data TEXTS -o HEALED"
            )
    if run.additional:
        _show()
        _show_table(_additional(run))
    _show_pair(run)


def _show_pair(run: Run) -> None:
    """Where the pair is, if one was made."""
    if run.pair is not None:
        _show(
            f"Written to {run.pair}: its encode_query is the small model's, its encode_document the teacher's."
        )

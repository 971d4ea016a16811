"""`trundle`: one verb = parse, one call, one print. Exit code 2 is the user's to mend, 1 is ours."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from trundle.cli import index, targets
from trundle.cli.deploy import export, report, serve
from trundle.cli.evaluate import evaluate, pair
from trundle.cli.main_commands import bench, compress, demo, inspect, recipes
from trundle.cli.methods import _step_verb
from trundle.errors import TrundleError, UserError
from trundle.methods import METHODS
from trundle.records import versions

app = typer.Typer(
    name="trundle",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_STOPPED = 130
"""What a shell calls the end of a program by Ctrl-C."""


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"trundle {versions(('trundle',)).get('trundle', '(not installed)')}\n")
        raise typer.Exit


@app.callback()
def _every_verb(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop."),
    ] = False,
) -> None:
    """Shrink any text-embedding model, keep your index."""


for verb in (demo, inspect, compress, recipes, evaluate, pair, bench, export, report, serve):
    app.command()(verb)
app.add_typer(index.app, name="index")
app.add_typer(targets.app, name="targets")
for step in METHODS.values():
    app.command(name=step.name, rich_help_panel="Steps, each alone")(_step_verb(step))


def main() -> None:
    """Run a verb; every failure is one sentence."""
    try:
        app()
    except SystemExit as end:
        if end.code == _STOPPED:
            sys.stderr.write(
                "trundle: stopped; what was finished is kept, and the same command goes on from there\n"
            )
        raise
    except UserError as error:
        _fail(error, 2)
    except TrundleError as error:
        _fail(error, 1)
    except Exception as error:
        if _wants_traceback():
            traceback.print_exc()
        name = type(error).__name__
        _fail(f"trundle itself failed ({name}: {error}); run again with -v and report what it prints", 1)


def _fail(sentence: object, code: int) -> None:
    if isinstance(sentence, Exception) and _wants_traceback():
        traceback.print_exception(sentence)
    sys.stderr.write(f"trundle: {sentence}\n")
    sys.exit(code)


def _wants_traceback() -> bool:
    return "-v" in sys.argv or "--verbose" in sys.argv

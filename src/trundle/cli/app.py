"""The command `trundle`. Invalid input exits with code 2, a failure of trundle with code 1."""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer import Option

from trundle.cli import vectors
from trundle.cli.compression import _run_recipe, compress, demo, recipes
from trundle.cli.console import _Model, _RunFlags, _with_flags
from trundle.cli.deploy import export, report, serve
from trundle.cli.evaluate import bench, evaluate, inspect, pair
from trundle.errors import TrundleError, UserError
from trundle.methods import METHODS
from trundle.methods.contract import Method, never
from trundle.records import versions

app = typer.Typer(
    name="trundle",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""
_PLAIN = (bool, int, float, str)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"trundle {versions(('trundle',)).get('trundle', '(not installed)')}\n")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Shrink any text-embedding model, keep your index."""


def _method_command(method: Method[Any, Any]) -> Callable[..., None]:
    """Returns a function for typer whose parameters are the method's options and the common flags."""
    options = method.options.model_fields

    def run(model: str, flags: _RunFlags, **values: Any) -> None:
        from trundle.recipe import single

        chosen = {name: _number(options[name], value) for name, value in values.items() if value is not None}
        _run_recipe(model, single(method, chosen), flags)

    run.__name__, run.__doc__ = method.name, method.help
    own = [Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=_Model)]
    own += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_flag(field))
        for name, field in options.items()
    ]
    without = ("fresh", "pair") if method.enters_space is never else ("fresh",)
    return _with_flags(run, own, without)


def _flag(field: FieldInfo) -> Any:
    """Returns the flag of one option. It shows the option's default but does not set it."""
    kind = _plain(field.annotation)
    default = "" if field.default in (None, "") or field.is_required() else f" [default: {field.default}]"
    values = "|".join(get_args(kind)) if get_origin(kind) is Literal else kind.__name__
    metavar = None if kind is bool else f"<{values}>"
    option = Option(help=f"{field.description}{default}", show_default=False, metavar=metavar)
    return Annotated[(bool if kind is bool else str) | None, option]


def _number(field: FieldInfo, value: Any) -> Any:
    """Converts a number. The options class rejects other values with its own message."""
    kind = _plain(field.annotation)
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:
        return value


def _plain(annotation: Any) -> Any:
    """Returns the type of a flag's value; str for every type that the options class parses itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        choices = [choice for choice in get_args(annotation) if choice is not type(None)]
        return _plain(choices[0]) if len(choices) == 1 else str
    if get_origin(annotation) is Literal or annotation in _PLAIN:
        return annotation
    return str


_WITHOUT = {demo: ("trust",), serve: ("as_json",)}
for _command in (demo, inspect, compress, recipes, evaluate, pair, bench, export, report, serve):
    app.command()(_with_flags(_command, without=_WITHOUT.get(_command, ())))
app.add_typer(vectors.index, name="index")
app.add_typer(vectors.targets, name="targets")
for _method in METHODS.values():
    app.command(name=_method.name, rich_help_panel="Single methods")(_method_command(_method))


def main() -> None:
    """Runs a command and reports every failure in one sentence."""
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            sys.stderr.write("trundle: interrupted; run the same command again to resume\n")
        raise
    except TrundleError as error:
        _fail(error, str(error), code=2 if isinstance(error, UserError) else 1)
    except Exception as error:
        problem = f"trundle itself failed ({type(error).__name__}: {error})"
        _fail(error, f"{problem}; run again with -v and report the output", code=1)


def _fail(error: Exception, message: str, *, code: int) -> NoReturn:
    if "-v" in sys.argv or "--verbose" in sys.argv:
        traceback.print_exception(error)
    sys.stderr.write(f"trundle: {message}\n")
    sys.exit(code)

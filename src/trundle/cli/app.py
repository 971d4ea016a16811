"""The command `trundle`. Invalid input exits with code 2, a failure of trundle with code 1."""

from __future__ import annotations

import re
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
from trundle.cli.compression import _INTERRUPTED, _run_recipe, compress, demo, recipes
from trundle.cli.console import _EXPERT, _Command, _CommandGroup, _Model, _RunFlags, _with_flags, _word
from trundle.cli.deploy import export, report, serve
from trundle.cli.evaluate import bench, evaluate, inspect, pair
from trundle.errors import BadInput, BadRecipe, MissingExtra, TrundleError, UserError
from trundle.methods import METHODS
from trundle.methods.contract import Method, never
from trundle.records import versions

_MAKE, _LOOK, _USE, _METHODS = "Make a model", "Look at models", "Use a model", "Single methods"
_PANELS = {
    _MAKE: (compress, recipes, demo),
    _LOOK: (inspect, evaluate, bench, report),
    _USE: (export, serve, pair),
}
_ALIASES = {"distill": "align", "distil": "align", "benchmark": "bench"}
_HINTS = {
    "prune": "the methods that prune are depth (layers), vocabulary (tokens), width and weights",
    **dict.fromkeys(
        ("quantize", "quantise"), "a model is quantised by trundle export MODEL --int8 --data TEXTS"
    ),
    "push": "upload the folder with `hf upload OWNER/NAME FOLDER`, or with result.push_to_hub in Python",
    "search": "an index is searched by trundle index search INDEX 'a query'",
    "train": "students are trained by trundle align, on labelled tuples by trundle contrast",
}
_EXAMPLES = {
    "compress": (
        "trundle compress all-mpnet-base-v2 --budget 12MB --data my-texts/ -o small",
        'trundle compress --index "postgresql://me@localhost/search?table=chunks" --budget 12MB -o small',
        "trundle compress all-mpnet-base-v2 --recipe leaf --minutes 30 --data my-texts/ -o small",
    ),
    "inspect": (
        "trundle inspect all-mpnet-base-v2",
        "trundle inspect all-mpnet-base-v2 --vocabulary --data my-texts/",
    ),
    "evaluate": ("trundle evaluate small --teacher all-mpnet-base-v2 --data my-texts/",),
    "bench": ("trundle bench all-mpnet-base-v2 small",),
    "report": ("trundle report small --data my-texts/",),
    "export": (
        "trundle export small --to onnx",
        "trundle export small --int8 --data my-texts/ -o small-int8",
    ),
    "serve": ("trundle serve small --teacher all-mpnet-base-v2",),
    "pair": ("trundle pair small --teacher all-mpnet-base-v2 -o both",),
    "depth": ("trundle depth all-mpnet-base-v2 --keep 6 -o six",),
    "vocabulary": ("trundle vocabulary all-mpnet-base-v2 --keep 8000 --data my-texts/ -o fewer",),
    "width": ("trundle width all-mpnet-base-v2 --widths 1/2,1/4 --data my-texts/ -o nested",),
    "weights": (
        "trundle weights MODEL --domain finance.jsonl --general general.jsonl --sparsity 50% -o pruned",
    ),
    "align": ("trundle align six --teacher all-mpnet-base-v2 --data my-texts/ --minutes 30 -o small",),
    "contrast": ("trundle contrast path/to/llm --data triplets.parquet --steps 1000 -o embedder",),
    "finetune": ("trundle finetune path/to/model --data reviews.csv -o classifier",),
}
_COMMON = {
    "depth": ("keep", "drop", "pick", "blocks"),
    "vocabulary": ("keep", "fraction", "parameters", "score"),
    "width": ("widths", "extract", "mlp", "result", "steps", "minutes"),
    "weights": ("domain", "general", "sparsity", "structure", "method"),
    "align": ("teacher", "teacher_model", "steps", "minutes", "texts", "augment"),
    "contrast": ("steps", "minutes", "objective", "teacher", "train", "tuples"),
    "finetune": ("kind", "epochs", "steps", "minutes", "rows"),
}
"""The options of each method that most people need; the others are in a panel of their own."""


class _Commands(_CommandGroup):
    """The commands, with the names that people try instead of them."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of a name or alias; for some other names, the error says what to use."""
        if cmd_name in _HINTS:
            raise BadInput(f"there is no command {cmd_name!r}: {_HINTS[cmd_name]}")
        return super().get_command(ctx, _ALIASES.get(cmd_name, cmd_name))


class _CompressCommand(_Command):
    """A command whose budget may have a space before its unit, as in 12 MB."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined = _SPACED.sub(r"\1\2", "\0".join(args))
        return super().parse_args(ctx, joined.split("\0") if args else [])


_SPACED = re.compile(r"(?i)((?:--budget|-b)\0\d+(?:\.\d+)?)\0([kmg]?b|x|ms|[kmg]?-?param(?:eter)?s)(?=\0|$)")

app = typer.Typer(
    name="trundle",
    cls=_Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
        try:
            recipe = single(method, chosen)
        except BadRecipe as error:
            flag = re.sub(rf"^{method.name}\.(\w+)", lambda found: _flag_name(found[1]), str(error))
            raise BadInput(flag) from error
        _run_recipe(model, recipe, flags)

    run.__name__, run.__doc__ = method.name, method.help
    own = [Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=_Model)]
    for name, field in options.items():
        flag = _flag(name, field, None if name in _COMMON[method.name] else _EXPERT)
        own.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=flag))
    without = ("fresh", "pair") if method.enters_space is never else ("fresh",)
    return _with_flags(run, own, without)


def _flag_name(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _flag(name: str, field: FieldInfo, panel: str | None) -> Any:
    """Returns the flag of one option. It shows the option's default but does not set it."""
    kind = _plain(field.annotation)
    shown = field.default not in (None, "", False) and not field.is_required()
    default = f" [default: {field.default}]" if shown else ""
    names = (_flag_name(name),) if field.default is False else ()  # without --no-NAME
    choices = f" One of {', '.join(get_args(kind))}." if get_origin(kind) is Literal else ""
    metavar, about = "CHOICE" if choices else _word(kind), f"{field.description}{choices}{default}"
    option = Option(*names, help=about, show_default=False, metavar=metavar, rich_help_panel=panel)
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


def _epilog(name: str) -> str | None:
    return "\n\n".join(("Examples:", *_EXAMPLES[name])) if name in _EXAMPLES else None


_WITHOUT: dict[Callable[..., None], tuple[str, ...]] = {demo: ("trust",), serve: ("as_json",)}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(
            epilog=_epilog(_command.__name__),
            rich_help_panel=_panel,
            cls=_CompressCommand if _command is compress else _Command,
        )(_with_flags(_command, without=_WITHOUT.get(_command, ())))
app.add_typer(vectors.index, name="index", rich_help_panel=_USE)
for _method in METHODS.values():
    _made = app.command(_method.name, cls=_Command, rich_help_panel=_METHODS, epilog=_epilog(_method.name))
    _made(_method_command(_method))
app.add_typer(vectors.targets, name="targets", rich_help_panel=_METHODS)


def main() -> None:
    """Runs a command and reports every failure in one sentence."""
    try:
        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            sys.stderr.write("trundle: interrupted; run the same command again to resume\n")
        sys.exit(code)
    except TrundleError as error:
        _fail(error, str(error), code=2 if isinstance(error, UserError) else 1)
    except ModuleNotFoundError as error:
        verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        _fail(error, str(MissingExtra.explain(error, f"trundle {verb}")), code=2)
    except Exception as error:
        if says := getattr(error, "format_message", None):  # typer's, of a wrong command line
            _fail(error, _usage(says(), error), code=2)
        problem = f"trundle itself failed ({type(error).__name__}: {error})"
        _fail(error, f"{problem}; run again with -v and report the output", code=1)


def _usage(message: str, error: Any) -> str:
    """Returns typer's message about a wrong command line as one sentence that names the command's help."""
    command = error.ctx.command_path if error.ctx else "trundle"
    words = " ".join(message.replace("Value error, ", "").split()).rstrip(".?")
    words = words.replace("a valid float", "a number").replace("a valid integer", "a whole number")
    fix = "pass texts with --data and " if "extra argument" in words else ""
    return f"{words[:1].lower()}{words[1:]}; {fix}see {command} --help"


def _fail(error: Exception, message: str, *, code: int) -> NoReturn:
    if "-v" in sys.argv or "--verbose" in sys.argv:
        traceback.print_exception(error)
    sys.stderr.write(f"trundle: {message}\n")
    sys.exit(code)

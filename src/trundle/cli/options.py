"""The flags that several commands share."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typer import Argument, Option
from typer.models import OptionInfo

from trundle.cache import check_name
from trundle.cli.console import _calm_libraries, terminal
from trundle.errors import BadInput
from trundle.folders import check_free
from trundle.progress import is_first
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from trundle.pipeline.run import Request
    from trundle.progress import Progress

_T = TypeVar("_T")
_EXPERT = "Expert options"

_FORMATS = (
    ".txt .jsonl .csv .tsv .parquet, a folder, or 'environment' (the docs of installed packages); repeatable."
)
_DATA = Option("--data", "-d", help=f"Texts: {_FORMATS}")
_TRAINING_DATA = Option(
    "--data", "-d", help=f"Texts, or labelled tuples if the method needs them: {_FORMATS}"
)

_Model = Annotated[str, Argument(help="A model folder or hub name.")]
_Data = Annotated[list[str] | None, _DATA]
_Seed = Annotated[int, Option(help="Seed; the same seed gives the same result.", min=0, max=2**31 - 1)]
_Force = Annotated[bool, Option("--force", help="Replace the output folder if it exists.")]
_TeacherModel = Annotated[str | None, Option(help="The model's name, if the teacher is an endpoint.")]
_Graph = Annotated[str | None, Option(help="The graph to run, such as onnx-int8; default: the fastest.")]
_Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
_Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress.")]
_Verbose = Annotated[bool, Option("--verbose", "-v", help="Show tracebacks and other libraries' output.")]
_TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run code that comes with the model.")]


@dataclass(frozen=True, kw_only=True)
class _CommonFlags:
    """The flags of almost every command."""

    as_json: _Json = False
    quiet: _Quiet = False
    verbose: _Verbose = False
    trust: _TrustRemoteCode = False

    def progress(self) -> Progress:
        """Returns the progress display. Call it before other libraries are imported: it also quiets them."""
        _calm_libraries(verbose=self.verbose)
        return terminal(quiet=self.quiet or self.as_json or not is_first())


@dataclass(frozen=True, kw_only=True)
class _RunFlags(_CommonFlags):
    """The flags of every command that makes a model."""

    output: Annotated[Path | None, Option("--output", "-o", help="Folder for the result.")] = None
    data: Annotated[list[str] | None, _TRAINING_DATA] = None
    fresh: Annotated[bool, Option("--fresh", help="Start over, don't resume an earlier run.")] = False
    seed: _Seed = 0
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan and sizes; write nothing.")] = False
    force: _Force = False
    pair: Annotated[
        bool,
        Option("--pair", help="Also write OUTPUT-pair: the result encodes queries, its teacher documents."),
    ] = False

    def check(self, *models: str) -> None:
        """Rejects what can be rejected without importing torch: outputs, data files and model folders."""
        if self.output is None and not self.dry_run:
            raise BadInput("pass a folder for the result with -o FOLDER, or use --dry-run")
        _check_data(self.data or [])
        for model in filter(None, models):
            _check_model(model)
        if self.output is not None and not self.dry_run:
            check_free(self.output, replace=self.force, read=[*filter(None, models)])

    def request(self, model: str) -> Request:
        """Returns the request for `model`, with its texts; call `check` first."""
        progress = self.progress()
        from trundle.data.corpus import read_corpus
        from trundle.pipeline.run import Request

        return Request(
            source=model,
            output=self.output,
            corpus=read_corpus(self.data, seed=self.seed, progress=progress) if self.data else None,
            seed=self.seed,
            dry_run=self.dry_run,
            replace=self.force,
            pair=self.pair,
            trust_remote_code=self.trust,
            fresh=self.fresh,
            progress=progress,
        )


def _check_data(sources: Iterable[str]) -> None:
    """Rejects a file that does not exist; its content is read later."""
    for source in sources:
        path = source.rpartition("::")[0] if "::" in source else source
        if source != "environment" and "://" not in path and not Path(path).expanduser().exists():
            raise BadInput(f"there is no file or folder {path!r}; check the path of --data")


def _check_model(name: str) -> None:
    """Rejects what can't be a model's name; a hub name is looked up later, and so is another teacher."""
    if teacher_kind(name) == "model":
        check_name(name)


def _several(words: Iterable[str] | None) -> list[str]:
    """Returns the values of a flag that may be repeated or separated by commas."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def _renamed(old: str, new: str, value: _T | None, current: _T | None) -> _T | None:
    """Returns the value of a flag that may be given by its old name, which prints a warning."""
    if value in (None, []):
        return current
    sys.stderr.write(f"trundle: {old} is now {new}; the old name will go\n")
    if current not in (None, []):
        raise BadInput(f"{old} is the old name of {new}; pass {new} only")
    return value


def _word(kind: Any) -> str:
    """Returns what a flag's help calls its value, instead of the Python type; a switch has none."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(choice for choice in get_args(kind) if choice is not type(None))
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {bool: "", int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _with_flags(
    function: Callable[..., None], own: Iterable[Parameter] | None = None, without: Container[str] = ()
) -> Callable[..., None]:
    """Returns a function for typer with a flag for each field of the record `flags`, if `function` takes one.

    `own` are the other parameters of `function`, if its signature does not name them. Fields in `without`
    get no flag and keep their defaults.
    """
    record = get_type_hints(function).get("flags")
    kinds = {} if record is None else get_type_hints(record, include_extras=True)
    shared = (
        []
        if record is None
        else [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=kinds[each.name])
            for each in fields(record)
            if each.name not in without
        ]
    )
    if own is None:
        named = signature(function, eval_str=True).parameters.values()
        own = [parameter for parameter in named if parameter.name != "flags"]

    def command(**given: Any) -> None:
        if record is not None:
            given["flags"] = record(**{parameter.name: given.pop(parameter.name) for parameter in shared})
        function(**given)

    parameters = [*own, *shared]
    for parameter in parameters:
        kind, *about = get_args(parameter.annotation)
        for option in about:
            if isinstance(option, OptionInfo) and option.metavar is None:
                option.metavar = _word(kind)
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command

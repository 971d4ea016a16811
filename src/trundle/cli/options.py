"""The flags that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Argument, Option

from trundle.cli.console import _calm_libraries, terminal
from trundle.errors import BadInput
from trundle.progress import is_first

if TYPE_CHECKING:
    from trundle.pipeline.run import Request
    from trundle.progress import Progress

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

    def request(self, model: str) -> Request:
        """Checks the flags, then returns the request for `model`, with its texts."""
        if self.output is None and not self.dry_run:
            raise BadInput("pass a folder for the result with -o FOLDER, or use --dry-run")
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


def _with_flags(
    function: Callable[..., None], own: Iterable[Parameter] | None = None, without: Container[str] = ()
) -> Callable[..., None]:
    """Returns a function for typer with a flag for each field of the record `flags`, if `function` takes one.

    `own` are the other parameters of `function`, if its signature does not name them. Fields in `without`
    get no flag and keep their defaults.
    """
    record = get_type_hints(function).get("flags")
    if record is None:
        return function
    kinds = get_type_hints(record, include_extras=True)
    shared = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=kinds[each.name])
        for each in fields(record)
        if each.name not in without
    ]
    if own is None:
        named = signature(function, eval_str=True).parameters.values()
        own = [parameter for parameter in named if parameter.name != "flags"]

    def command(**given: Any) -> None:
        flags = record(**{parameter.name: given.pop(parameter.name) for parameter in shared})
        function(flags=flags, **given)

    parameters = [*own, *shared]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command

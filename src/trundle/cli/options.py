"""The flags that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trundle.cli.console import _calm_libraries, _terminal
from trundle.errors import BadInput
from trundle.progress import is_first

if TYPE_CHECKING:
    from trundle.pipeline.run import Request

_DATA = typer.Option(
    "--data", "-d", help="Texts: .txt .jsonl .csv .tsv .parquet, a folder, or 'environment'; repeatable."
)

_Model = Annotated[str, typer.Argument(help="A model folder or hub name.")]
_Data = Annotated[list[str] | None, _DATA]
_Seed = Annotated[int, typer.Option(help="Same seed, same bytes.", min=0, max=2**31 - 1)]
_Force = Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")]
_TeacherModel = Annotated[str | None, typer.Option(help="The model's name if the teacher is an endpoint.")]
_Graph = Annotated[str | None, typer.Option(help="The graph to run, such as onnx-int8.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show tracebacks and other libraries' output.")
]
_TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


@dataclass(frozen=True, kw_only=True)
class _RunFlags:
    """The flags of every command that makes a model."""

    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the result.")] = None
    data: _Data = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of resuming an interrupted run.")
    ] = False
    seed: _Seed = 0
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and forecast only; write nothing.")] = False
    force: _Force = False
    pair: Annotated[
        bool,
        typer.Option(
            "--pair",
            help="Also write OUTPUT-pair, one model: the result encodes queries, its teacher documents.",
        ),
    ] = False
    as_json: _Json = False
    quiet: _Quiet = False
    verbose: _Verbose = False
    trust: _TrustRemoteCode = False

    def request(self, model: str) -> Request:
        """Checks the flags, then returns the request for `model`, with its texts."""
        if self.output is None and not self.dry_run:
            raise BadInput("pass a folder for the result with -o FOLDER, or use --dry-run")
        _calm_libraries(verbose=self.verbose)
        from trundle.data.corpus import read_corpus
        from trundle.pipeline.run import Request

        progress = _terminal(quiet=self.quiet or self.as_json or not is_first())
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


def _with_run_flags(
    function: Callable[..., None], own: Iterable[inspect.Parameter], *, without: Container[str] = ()
) -> Callable[..., None]:
    """Returns a function for typer that calls `function` with its `own` parameters and `flags: _RunFlags`.

    Each field of `_RunFlags` becomes a flag, except those in `without`, which keep their defaults.
    """
    kinds = get_type_hints(_RunFlags, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name]
        )
        for field in fields(_RunFlags)
        if field.name not in without
    ]

    def command(**given: Any) -> None:
        flags = _RunFlags(**{parameter.name: given.pop(parameter.name) for parameter in shared})
        function(flags=flags, **given)

    parameters = [*own, *shared]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command

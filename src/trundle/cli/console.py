"""The terminal: progress on stderr, results on stdout, and the flags that several commands share."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from textwrap import wrap
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from typer import Argument, Option, style
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from trundle.cache import check_name, model_folder
from trundle.errors import BadInput
from trundle.folders import check_free
from trundle.precision import FORMATS
from trundle.progress import SILENT, Advance, Progress, is_first
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus
    from trundle.pipeline.run import Request

_QUIETER_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}

_BAR_WIDTH = 24
_SECONDS_BETWEEN_LINES = 10.0
_EXPERT = "Expert options"
_expert = partial(Option, rich_help_panel=_EXPERT)

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


class _Terminal:
    """Shows progress bars with the time left, and permanent lines."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:
        if not (self._console.is_terminal or self._console.is_jupyter):
            with _Lines(label, total, self.say) as lines:
                yield lines.advance
            return
        done = TextColumn("  {task.description}"), BarColumn(bar_width=_BAR_WIDTH), MofNCompleteColumn()
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        with Bars(*done, *times, console=self._console, transient=True) as bars:
            shown = bars.add_task(label, total=total)
            yield lambda units: bars.advance(shown, units)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, style="dim")


class _Lines:
    """Reports a task as a line every few seconds, for logs: what is done, how fast, and the time left.

    Of tasks inside each other only the innermost is reported.
    """

    _active: ClassVar[list[_Lines]] = []

    def __init__(self, label: str, total: int | None, say: Callable[[str], None]) -> None:
        self._label, self._total, self._say, self._done = label, total, say, 0
        self._ended, self._began = threading.Event(), time.monotonic()

    def advance(self, units: int) -> None:
        self._done += units

    def __enter__(self) -> Self:
        self._active.append(self)
        threading.Thread(target=self._report, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._active.remove(self)

    def _report(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            if self._active[-1:] == [self]:
                self._say(self._line(time.monotonic() - self._began))

    def _line(self, seconds: float) -> str:
        done, total = self._done, self._total
        counted = f": {done:,}" + ("" if total is None else f" of {total:,}") if done or total else ""
        parts = [f"{self._label}{counted}"]
        if done and not self._label.endswith("seconds"):
            rate = done / seconds
            parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
        left = f"{(total - done) * seconds / done:,.0f} s left" if done and total and total >= done else ""
        return ", ".join([*parts, left or f"{seconds:,.0f} s so far"])


def terminal(*, quiet: bool) -> Progress:
    """Returns a display of progress on stderr, or one that shows nothing."""
    return SILENT if quiet else _Terminal()


def _show_json(content: Mapping[str, Any] | Sequence[Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _show(line: str = "") -> None:
    _stdout().print(line)


def _show_table(
    rows: Sequence[Sequence[str]], *, title: str | None = None, texts: Sequence[int] = (0,), gap: bool = False
) -> None:
    """Prints rows under a heading, after an empty line if `gap`; columns in `texts` are aligned left."""
    if gap:
        _show()
    heading, *body = rows
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for number, name in enumerate(heading):
        table.add_column(name, justify="left" if number in texts else "right", no_wrap=number not in texts)
    for row in body:
        table.add_row(*row)
    _stdout().print(table)


def _stdout() -> Console:
    # Names, tokens and texts come from the user: [unused5] is not markup.
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200
    return console


def _bar(share: float, width: int = _BAR_WIDTH) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


_ROWS, _COLUMNS, _WIDEST = 13, 96, 3
_THIRDS = len("▔─▁")
"""Each row shows three heights."""


def _curve(losses: Sequence[float], marks: Mapping[int, str]) -> list[str]:
    """Losses as short strokes over layers 1 to L; the marked ones are bold and named below the axis."""
    low, high = min(losses), max(losses)
    step = max(1, min(_WIDEST, _COLUMNS // len(losses)))
    grid = [[" "] * (step * len(losses)) for _ in range(_ROWS)]
    for layer, loss in enumerate(losses, start=1):
        share = (high - loss) / (high - low) if high > low else 0.5
        row, third = divmod(round(share * (_ROWS * _THIRDS - 1)), _THIRDS)
        stroke = ("▀■▄" if layer in marks else "▔─▁")[third]
        grid[row][step * (layer - 1) : step * layer] = stroke * max(1, step - 1) + " " * (step > 1)
    names = {0: f"{high:.3f}", _ROWS // 2: f"{(low + high) / 2:.3f}", _ROWS - 1: f"{low:.3f}"}
    wide = max(map(len, names.values()))
    lines = [f"{names.get(row, ''):>{wide}} ┤ {''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    lines.append(f"{'':>{wide}} └─{'─' * (step * len(losses))}")
    below = ["1" if len(losses) == 1 else f"1{len(losses):>{step * (len(losses) - 1)}}"]
    for layer, name in sorted(marks.items()):  # on a line of its own, with an arrow under its layer
        place, words = step * (layer - 1), f"{name}: {layer}"
        fits_before = 2 * layer > len(losses) and len(words) < place
        below.append(f"{words:>{place - 1}} ↑" if fits_before else f"{' ' * place}↑ {words}")
    return [*lines, *(" " * (wide + 3) + line for line in below)]


class _Help:
    """Help in sections. Long names get a line of their own: nothing is cut, however narrow the terminal."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda **_: None  # the Python type
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            panel = getattr(each, "rich_help_panel", None) or f"{each.param_type_name.capitalize()}s"
            if record := each.get_help_record(ctx):
                panels.setdefault(panel, []).append(record)
        for name, command in getattr(self, "commands", {}).items():
            panel = command.rich_help_panel or "Commands"
            panels.setdefault(panel, []).append((name, command.get_short_help_str()))
        for panel, rows in panels.items():
            rows = [(style(name, bold=True), about.replace("-", "\u2011")) for name, about in rows]
            with formatter.section(style(panel, bold=True)):
                formatter.write_dl(rows)
        formatter.buffer[:] = [part.replace("\u2011", "-") for part in formatter.buffer]  # not broken there

    def format_epilog(self: Any, _ctx: Any, formatter: Any) -> None:
        # A command that is longer than a line goes on after a backslash, so that it can be copied.
        formatter.write_paragraph()
        for line in (self.epilog or "").split("\n\n"):
            room = formatter.width - (2 if len(line) > formatter.width else 0)
            parts = wrap(line, room, break_long_words=False, break_on_hyphens=False, subsequent_indent="    ")
            formatter.write((" \\\n" if line.startswith("trundle ") else "\n").join(parts) + "\n")

    def get_short_help_str(self, *_: Any) -> str:  # the whole sentence
        return str(super().get_short_help_str(sys.maxsize))  # type: ignore[misc]


class _Command(_Help, TyperCommand):
    """A command with this help."""


class _CommandGroup(_Help, TyperGroup):  # without a command it prints its help
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


@dataclass(frozen=True, kw_only=True)
class _CommonFlags:
    """The flags of almost every command."""

    as_json: _Json = False
    quiet: _Quiet = False
    verbose: _Verbose = False
    trust: _TrustRemoteCode = False

    def progress(self) -> Progress:
        """Returns the progress display. Call it before other libraries are imported: it also quiets them."""
        if not self.verbose:
            os.environ.update(_QUIETER_LIBRARIES | os.environ)
            warnings.simplefilter("ignore")
        return terminal(quiet=self.quiet or self.as_json or not is_first())

    def shows_json(self, result: Mapping[str, Any] | Sequence[Any]) -> bool:
        """Prints the result if --json is set, and returns whether it is."""
        if self.as_json:
            _show_json(result)
        return self.as_json


@dataclass(frozen=True, kw_only=True)
class _IndexFlags(_CommonFlags):
    """The flags of commands that read an index of any kind."""

    table: Annotated[
        str | None, _expert(help="The index's table, if several; for FAISS and npz, the file of texts.")
    ] = None
    text_column: Annotated[
        str | None, _expert(help="The index's column of texts, if it has no usual name.")
    ] = None
    vector_column: Annotated[str | None, _expert(help="The index's column of vectors, if several.")] = None

    def named(self) -> dict[str, Any]:
        return {"table": self.table, "texts": self.text_column, "vectors": self.vector_column}


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
        """Rejects a missing or existing output, one that holds one of the `models`, and missing data."""
        if self.output is None and not self.dry_run:
            raise BadInput("pass a folder for the result with -o FOLDER, or use --dry-run")
        _check_inputs(data=self.data)
        for name in filter(None, models):
            if teacher_kind(name) == "model":
                check_name(name)
        if self.output is not None and not self.dry_run:
            check_free(self.output, replace=self.force, read=[*filter(None, models)])

    def corpus(self, progress: Progress) -> Corpus | None:
        """Returns the texts of --data; call `check` first."""
        if not self.data:
            return None
        from trundle.data.corpus import read_corpus

        return read_corpus(self.data, seed=self.seed, progress=progress)

    def request(
        self, model: str, corpus: Corpus | None, progress: Progress, others: Iterable[str] = ()
    ) -> Request:
        """Returns the request for `model`, if it and the `others` are there; imports torch."""
        for name in (model, *others):
            _check_inputs(teacher=name, trust=self.trust)
        from trundle.pipeline.run import Request

        return Request(
            source=model,
            output=self.output,
            corpus=corpus,
            seed=self.seed,
            dry_run=self.dry_run,
            replace=self.force,
            pair=self.pair,
            trust_remote_code=self.trust,
            fresh=self.fresh,
            progress=progress,
        )


def _check_inputs(
    *models: str,
    data: Iterable[str] | None = None,
    graph: str | None = None,
    teacher: str | None = None,
    trust: bool = False,
) -> None:
    """Rejects files that are not there, a graph that no export writes, and a folder or name without a model.

    Call it before torch is imported, and with models after the other checks: hub names are downloaded. Files
    of data are not read, and an endpoint is not asked.
    """
    for source in data or ():
        path = source.rpartition("::")[0] if "::" in source else source
        if source != "environment" and "://" not in path and not Path(path).expanduser().exists():
            raise BadInput(f"there is no file or folder {path!r}; check the path")
    parts = set() if graph in (None, "fastest") else set(str(graph).split("-"))
    if not any(parts <= {row.engine, row.precision} for row in FORMATS):
        known = ", ".join(row.name for row in FORMATS)
        raise BadInput(f"there are no graphs {graph!r}; use one of {known}")
    for name in models:
        model_folder(name, trust_remote_code=trust)
    kind = teacher_kind(teacher) if teacher else None
    if teacher and kind == "model":
        model_folder(teacher, trust_remote_code=trust)
    elif teacher and kind == "table" and not Path(teacher).is_file():
        raise BadInput(f"there is no file {teacher!r}; check the path")
    elif teacher and kind == "index":
        from trundle.index.readers import check_place

        check_place(teacher)


def _several(words: Iterable[str] | None) -> list[str]:
    """Returns the values of a flag that may be repeated or separated by commas."""
    return [part.strip() for word in words or () for part in word.split(",") if part.strip()]


def _word(kind: Any) -> str:
    """Returns what a flag's help calls its value, instead of the Python type; a switch has none."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(choice for choice in get_args(kind) if choice is not type(None))
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {bool: "", int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _from_home(value: Any) -> Any:
    """Returns a value whose `~/` stands for the home folder, which a shell leaves as it is after `=`."""
    if isinstance(value, list | tuple):
        return [_from_home(each) for each in value]
    return type(value)(Path(value).expanduser()) if str(value).startswith("~/") else value


def _with_flags(
    function: Callable[..., None], own: Iterable[Parameter] | None = None, without: Container[str] = ()
) -> Callable[..., None]:
    """Returns a function for typer with a flag for each field of the record `flags`, if `function` takes one.

    `own` are the other parameters of `function`, if its signature does not name them. Fields in `without`
    get no flag and keep their defaults.
    """
    record = get_type_hints(function).get("flags")
    kinds = {} if record is None else get_type_hints(record, include_extras=True)
    common = () if record is None else fields(record)
    shared = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=kinds[each.name])
        for each in sorted(common, key=lambda each: each.name in _CommonFlags.__annotations__)
        if each.name not in without
    ]
    if own is None:
        named = signature(function, eval_str=True).parameters.values()
        own = [parameter for parameter in named if parameter.name != "flags"]

    def command(**words: Any) -> None:
        given = {name: _from_home(value) for name, value in words.items()}
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

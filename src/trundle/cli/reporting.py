"""The verb that writes a report of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trundle.cli import console
from trundle.cli.common import Data, Json, Quiet, TrustRemoteCode, Verbose


def report(
    runs: Annotated[
        list[str], typer.Argument(help="Model folders that trundle wrote; several are compared.")
    ],
    teacher: Annotated[
        str | None,
        typer.Option(help="The large model's folder or hub name; by default the runs' own teacher."),
    ] = None,
    data: Data = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="A folder of tasks with labels (sts, retrieval, …), or one task; repeatable."),
    ] = None,
    texts: Annotated[
        int, typer.Option(min=100, help="At most so many texts of --data are measured on.")
    ] = 2000,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Where models are opened, also race them.")
    ] = True,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page; report.json goes beside it.")
    ] = Path("report.html"),
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Write a page about runs that opens anywhere, offline.

    Without --data and --tasks no model is opened, and the page shows what the folders keep.
    """
    console.calm_libraries(verbose=verbose)
    from trundle.reporting import check_output, make_report, write_report

    check_output(output)
    made = make_report(
        runs,
        teacher=teacher,
        data=data or [],
        tasks=tasks or [],
        texts=texts,
        speed=speed,
        trust_remote_code=trust,
        progress=console.terminal(quiet=quiet or as_json),
    )
    page, beside = write_report(made, output)
    if as_json:
        console.show_json(made.as_json())
        return
    console.show(f"Written to {page}; the same figures are in {beside}.")

"""The verb that computes teacher vectors ahead of any training, here or on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.core import TyperCommand

from trundle.cli.common import _Json, _Quiet, _TrustRemoteCode, _Verbose
from trundle.cli.console import _calm_libraries, _show, _show_json, _terminal
from trundle.errors import BadInput

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compute a teacher's vectors once, to train students from.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_RAY = "--ray"
_HERE = "here"
"""The cluster that `--ray` alone stands for."""


class _AddressMayBeLeftOut(TyperCommand):
    """A command whose `--ray` may stand alone."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Say which cluster is meant where nobody did."""
        given = list(args)
        for place, word in enumerate(given):
            following = given[place + 1 : place + 2]
            if word == _RAY and (not following or following[0].startswith("-")):
                given[place] = f"{_RAY}={_HERE}"
        return super().parse_args(ctx, given)


@app.callback()
def targets() -> None:
    """Compute a teacher's vectors once, to train students from."""


@app.command(cls=_AddressMayBeLeftOut)
def build(
    model: Annotated[str, typer.Argument(help="The teacher: a model folder or hub name.")],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            "-d",
            help="Texts: files, a folder, or 'environment'; with --ray parquet, also s3://… or gs://…; repeatable.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the store; with --ray on a disk all nodes share."),
    ],
    ray: Annotated[
        str | None,
        typer.Option(
            _RAY,
            metavar="[HOST:PORT]",
            help="Work on a Ray cluster; without an address on the one that is running here, or a new one.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: how many; by default one for each GPU, or else for each core."),
    ] = None,
    runtime: Annotated[
        bool, typer.Option("--runtime", help="Run the exported graph of the model on the CPU, without torch.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Cores for each worker, and for the graph of --runtime.")
    ] = None,
    dtype: Annotated[Literal["float16", "float32"], typer.Option(help="How vectors are stored.")] = "float16",
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Store a teacher's vectors of many texts.

    What is stored already is not computed again: a build that was stopped goes on. `trundle align STUDENT --teacher
    STORE` learns from it.
    """
    _calm_libraries(verbose=verbose)
    if ray is None and workers is not None:
        raise BadInput("--workers goes with --ray; alone, this process does it all")
    if ray is None and threads is not None and not runtime:
        raise BadInput(
            "--threads goes with --ray or --runtime; torch takes all cores, or OMP_NUM_THREADS of them"
        )
    from trundle.scale.shard_writer import TeacherSpec, absolute_name, build_local

    progress = _terminal(quiet=quiet or as_json)
    asked = TeacherSpec(model=absolute_name(model), runtime=runtime, threads=threads, trust_remote_code=trust)
    if ray is None:
        made = build_local(data, asked, output, dtype=dtype, progress=progress)
    else:
        from trundle.scale.on_ray import build_on_ray

        made = build_on_ray(data, asked, output, address=ray, workers=workers, dtype=dtype, progress=progress)
    facts = made.manifest
    stored = sum(part.size for shard in facts.shards for part in shard.files.values())
    if as_json:
        _show_json(
            {
                "store": str(output),
                "teacher": facts.teacher,
                "texts": facts.count,
                "kinds": facts.kinds,
                "repeats": facts.repeats,
                "width": facts.width,
                "shards": len(facts.shards),
                "bytes": stored,
            }
        )
        return
    _show(f"{output}: {facts.count:,} texts, vectors of {facts.width}, {stored / 1e6:,.1f} MB.")
    _show()
    _show(f"    trundle align STUDENT --teacher {output} -o SMALL")

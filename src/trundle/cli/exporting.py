"""The verb that writes a model as a graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trundle.cli import console, figures
from trundle.cli.common import Force, Json, Model, Quiet, TrustRemoteCode, Verbose
from trundle.errors import BadInput

if TYPE_CHECKING:
    from trundle.export.exporting import Size


def export(
    model: Model,
    to: Annotated[Literal["onnx", "openvino"], typer.Option(help="Which runtime the graph is for.")] = "onnx",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A new folder without torch weights; by default the graph joins the model's own.",
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="A quarter of the bytes; needs --calibrate.")] = False,
    int4: Annotated[
        bool,
        typer.Option(
            "--int4",
            help="An eighth of the bytes, for models aligned with --rounding int4; needs --calibrate. "
            "With --int8 its products are int8's: as small, and faster.",
        ),
    ] = False,
    half: Annotated[
        bool, typer.Option("--half", help="Half of the bytes: float16 for onnx, bfloat16 for openvino.")
    ] = False,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            help="Texts int8 is calibrated on, and int8 or int4 measured, in any form --data takes; repeatable."
        ),
    ] = None,
    max_cosine_loss: Annotated[
        float, typer.Option(help="Refuse int8 or int4 that loses more cosine to torch.")
    ] = 0.01,
    max_agreement_loss: Annotated[
        float, typer.Option(help="Refuse int8 or int4 that loses more of the ten nearest neighbours.")
    ] = 0.1,
    older_cpus: Annotated[
        bool, typer.Option("--older-cpus", help="Int8 that can't overflow on processors without VNNI.")
    ] = False,
    try_both: Annotated[
        bool, typer.Option("--try-both", help="Trace with both of torch's tracers and keep the faster graph.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Write the model as one graph that runs without torch.

    Pooling, dense layers and normalisation are inside. It is compared with torch before it is written.
    """
    console.calm_libraries(verbose=verbose)
    from trundle.export import Limits, calibration_texts, export_model

    exported = export_model(
        model,
        to=to,
        size=size_of(int8=int8, int4=int4, half=half),
        output=output,
        calibrate=calibration_texts(calibrate or []),
        limits=Limits(cosine=max_cosine_loss, agreement=max_agreement_loss),
        older_cpus=older_cpus,
        try_both=try_both,
        force=force,
        trust_remote_code=trust,
        progress=console.terminal(quiet=quiet or as_json),
    )
    if as_json:
        console.show_json(exported.as_json())
        return
    for each in (exported, *([exported.documents] if exported.documents else [])):
        console.show_table(figures.exported(each))
        console.show()
    console.show("    from trundle.runtime import Encoder")
    if exported.documents is None:
        console.show(f'    Encoder("{exported.folder}").encode(["a text"])')
    else:
        console.show(f'    Encoder("{exported.folder.parent}").encode(["a text"], side="query")')


def size_of(*, int8: bool, int4: bool, half: bool) -> Size:
    """What the flags ask for together."""
    if half and (int8 or int4):
        raise BadInput(
            f"--{'int8' if int8 else 'int4'} and --half exclude each other; export twice to have both"
        )
    if half:
        return "half"
    if int4:
        return "int4+int8" if int8 else "int4"
    return "int8" if int8 else "full"

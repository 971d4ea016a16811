"""The commands that put a model to use: `export`, `serve` and `report`."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from trundle.cli import console
from trundle.cli.tables import _count, _exported
from trundle.errors import BadInput
from trundle.folders import check_free
from trundle.precision import graph_format

if TYPE_CHECKING:
    from trundle.precision import EngineName, Precision

_INT4_HELP = (
    "Store weights in int4, an eighth of the size, fitted to the texts of --data. Add --int8 to run "
    "matmuls in int8: the same size, and faster."
)
_COSINE_HELP = (
    "Reject int8 or int4 if its mean cosine to torch is below 1 by more than this; default: 0.01, int4 0.02."
)


def export(
    flags: console._CommonFlags,
    model: console._Model,
    to: Annotated[Literal["onnx", "openvino"], Option(help="The runtime that the graph is for.")] = "onnx",
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="New folder, without torch weights; default: the model's own folder."),
    ] = None,
    int8: Annotated[bool, Option("--int8", help="int8, a quarter of the size; needs --data.")] = False,
    int4: Annotated[bool, Option("--int4", help=_INT4_HELP)] = False,
    int4_tokens: Annotated[
        bool, Option("--int4-tokens", help="With --int8: the token table, often half of the model, in int4.")
    ] = False,
    half: Annotated[
        bool, Option("--half", help="16 bits, half of the size: float16, for openvino bfloat16.")
    ] = False,
    data: Annotated[
        list[str] | None,
        Option(
            "--data", "-d", help="Texts to fit and measure int8 or int4 with; 2,000 are used; repeatable."
        ),
    ] = None,
    force: console._Force = False,
    max_cosine_loss: Annotated[float | None, console._expert(help=_COSINE_HELP)] = None,
    max_agreement_loss: Annotated[
        float,
        console._expert(help="Reject int8 or int4 if a larger share of the ten nearest neighbours differs."),
    ] = 0.1,
    older_cpus: Annotated[
        bool | None, console._expert(help="int8 safe on CPUs without VNNI; default: if this CPU has none.")
    ] = None,
    try_both: Annotated[
        bool, console._expert("--try-both", help="Use both tracers, keep the faster graph.")
    ] = False,
) -> None:
    """Write the model as one graph that runs without torch.

    The graph includes pooling, dense layers and normalisation. It is compared with torch before writing.
    """
    precision = _precision_of(to, int8=int8, int4=int4, int4_tokens=int4_tokens, half=half)
    if graph_format(to, precision).is_quantised and not data:
        raise BadInput(f"{precision} is measured on texts like yours; pass them with --data texts.txt")
    console._check_inputs(data=data)
    from trundle.data.texts import calibration_texts

    texts = calibration_texts(data) if data else []
    if output is not None:
        check_free(output, replace=force, read=[model])
    elif not Path(model).is_dir():
        raise BadInput(f"{model!r} is not a folder; choose one for the graph with -o FOLDER")
    console._check_inputs(model, trust=flags.trust)
    progress = flags.progress()
    from trundle.export.exporting import export_model
    from trundle.export.quantise import ExportOptions, Limits

    limits = Limits(cosine=max_cosine_loss, agreement=max_agreement_loss)
    exported = export_model(
        model,
        to=to,
        precision=precision,
        output=output,
        options=ExportOptions(calibrate=texts, limits=limits, older_cpus=older_cpus, try_both=try_both),
        force=force,
        trust_remote_code=flags.trust,
        progress=progress,
    )
    if flags.shows_json(exported.as_json()):
        return
    for each in (exported, *([exported.documents] if exported.documents else [])):
        console._show_table(_exported(each))
        console._show()
    console._show("    from trundle import Encoder")
    if exported.documents is None:
        console._show(f'    Encoder("{exported.folder}").encode(["a text"])')
    else:
        console._show(f'    Encoder("{exported.folder.parent}").encode(["a text"], side="query")')


def _precision_of(to: EngineName, *, int8: bool, int4: bool, int4_tokens: bool, half: bool) -> Precision:
    if int4_tokens and (int4 or not int8):
        raise BadInput("--int4-tokens goes with --int8; --int4 alone stores the token table in int4 as well")
    if half and (int8 or int4):
        other = "--int8" if int8 else "--int4"
        raise BadInput(f"{other} and --half exclude each other; export twice to have both")
    if half:
        return "float16" if to == "onnx" else "bfloat16"
    if int4:
        return "int4+int8" if int8 else "int4"
    if int8:
        return "int8+int4_tokens" if int4_tokens else "int8"
    return "float32"


_limit = partial(Option, rich_help_panel="Limits")
_LOCAL = ("127.0.0.1", "localhost", "::1")
_PAGE = Path("report.html")


def serve(
    flags: console._CommonFlags,
    model: console._Model,
    teacher: Annotated[str | None, Option(help="The large model, which then encodes documents.")] = None,
    host: Annotated[str, Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8080,
    name: Annotated[str | None, Option(help="The model's name for clients; default: its folder's.")] = None,
    keys: Annotated[
        Path | None, Option(help="File of API keys, one per line; also $TRUNDLE_API_KEYS, comma-separated.")
    ] = None,
    cors: Annotated[list[str] | None, Option(help="Allow pages of this web origin; repeatable.")] = None,
    allow_host: Annotated[
        list[str] | None, Option(help="Answer to this host name without API keys; repeatable.")
    ] = None,
    graph: console._Graph = None,
    threads: Annotated[int | None, Option(min=1, help="Threads for each model; default: all cores.")] = None,
    timeout: Annotated[float, _limit(help="Seconds until a request fails with status 504.")] = 30.0,
    waiting: Annotated[int, _limit(help="Texts in the queue before clients get status 429.")] = 4096,
    most_texts: Annotated[int, _limit(help="Maximum number of texts in a request.")] = 2048,
    most_tokens: Annotated[int, _limit(help="Maximum number of tokens in a request.")] = 300_000,
    most_bytes: Annotated[int, _limit(help="Maximum size of a request in bytes.")] = 8 << 20,
    most_characters: Annotated[int, _limit(help="Maximum number of characters in a text.")] = 200_000,
    waiting_bytes: Annotated[
        int, _limit(help="Bytes of large requests and answers in memory before clients get status 429.")
    ] = 64 << 20,
    most_connections: Annotated[int, _limit(help="Maximum number of open connections.")] = 800,
    page: Annotated[bool, Option("--page/--no-page", help="Serve a page at / to compare searches.")] = True,
) -> None:
    """Serve OpenAI-style embeddings, and a page to compare searches.

    A folder without a graph is exported once into the cache. Ctrl-C stops the server after the open requests.
    """
    progress = flags.progress()
    from trundle.serve.settings import KEYS_VARIABLE, ServerSettings, read_keys

    settings = ServerSettings(
        keys=read_keys(keys, os.environ.get(KEYS_VARIABLE)),
        cors=tuple(cors or ()),
        hosts=tuple(allow_host or ()),
        page=page,
        timeout=timeout,
        waiting=waiting,
        most_texts=min(most_texts, waiting),
        most_tokens=most_tokens,
        most_bytes=most_bytes,
        most_characters=most_characters,
        waiting_bytes=waiting_bytes,
        most_connections=most_connections,
    )
    console._check_inputs(*filter(None, (model, teacher)), graph=graph, trust=flags.trust)
    from trundle.serve.routes import open_socket, run_server
    from trundle.serve.settings import open_served

    with closing(open_socket(host, port)) as listening:
        served = open_served(
            model,
            teacher=teacher,
            name=name,
            graph=graph,
            threads=threads,
            trust_remote_code=flags.trust,
            progress=progress,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        for each in served.models:
            progress.say(f"{each.name}: {_count(each.encoder.parameters)} parameters, {each.card()['runs']}")
        if host not in _LOCAL and not settings.keys:
            progress.say("everyone who can reach this address can use it; set API keys with --keys FILE")
        console._show(f"{address}/v1" + (f"   page: {address}/" if page else ""))
        run_server(served, settings, listening)


def report(
    flags: console._CommonFlags,
    runs: Annotated[list[str], Argument(help="Model folders that trundle wrote, to compare.")],
    teacher: Annotated[str | None, Option(help="The large model; default: the runs' own teacher.")] = None,
    data: console._Data = None,
    tasks: Annotated[
        list[str] | None, Option(help="Folders or names of tasks; comma-separated or repeated.")
    ] = None,
    texts: Annotated[int, Option(min=100, help="Maximum number of texts of --data to measure on.")] = 2000,
    speed: Annotated[bool, Option("--speed/--no-speed", help="Time the models if they are loaded.")] = True,
    output: Annotated[Path, Option("--output", "-o", help="HTML file; report.json is next to it.")] = _PAGE,
) -> None:
    """Write an HTML report about runs; it opens offline.

    Without --data and --tasks no model is loaded, and the report shows what the folders record.
    """
    console._check_inputs(data=data)
    progress = flags.progress()
    from trundle.report.report import check_output, make_report, write_report

    check_output(output)
    made = make_report(
        runs,
        teacher=teacher,
        data=data or [],
        tasks=console._several(tasks),
        texts=texts,
        speed=speed,
        trust_remote_code=flags.trust,
        progress=progress,
    )
    page, figures = write_report(made, output)
    if flags.shows_json(made.as_json()):
        return
    console._show(f"Written to {page}; the same figures are in {figures}.")

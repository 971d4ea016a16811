"""The verb that puts a model to work behind an address."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from trundle.cli import console, figures
from trundle.cli.common import Model, Quiet, TrustRemoteCode, Verbose

LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Model,
    teacher: Annotated[
        str | None,
        typer.Option(help="The large model: then documents are its own, and queries the small one's."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8080,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; its folder's name by default.")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="A file of API keys, one a line; also $TRUNDLE_API_KEYS, comma-separated."),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Let web pages from this origin call; repeatable.")
    ] = None,
    graph: Annotated[str | None, typer.Option(help="Which graph to run, such as onnx-int8.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for each model; all cores by default.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0,
    waiting: Annotated[int, typer.Option(help="Texts that may wait before clients get 429.")] = 4096,
    most_texts: Annotated[int, typer.Option(help="Texts in one request.")] = 2048,
    most_tokens: Annotated[int, typer.Option(help="Tokens in one request.")] = 300_000,
    most_bytes: Annotated[int, typer.Option(help="Bytes of one request.")] = 8 << 20,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="The page at / that compares searches.")
    ] = True,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust: TrustRemoteCode = False,
) -> None:
    """Serve OpenAI-style embeddings, and a page to compare searches.

    A folder without a graph is exported once into the cache. Stop with Ctrl-C; what was taken is answered.
    """
    console.calm_libraries(verbose=verbose)
    from trundle.serve.running import open_socket, run_server
    from trundle.serve.settings import KEYS_VARIABLE, Settings, read_keys

    settings = Settings(
        keys=read_keys(keys, os.environ.get(KEYS_VARIABLE)),
        cors=tuple(cors or ()),
        page=page,
        timeout=timeout,
        waiting=waiting,
        most_texts=min(most_texts, waiting),
        most_tokens=most_tokens,
        most_bytes=most_bytes,
    )
    from trundle.serve.models import open_served

    progress = console.terminal(quiet=quiet)
    with closing(open_socket(host, port)) as listening:
        served = open_served(
            model,
            teacher=teacher,
            name=name,
            graph=graph,
            threads=threads,
            trust_remote_code=trust,
            progress=progress,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        for each in served.models:
            progress.say(
                f"{each.name}: {figures.count(each.encoder.parameters)} parameters, {each.card()['runs']}"
            )
        if host not in LOCAL and not settings.keys:
            progress.say("anybody who can reach this address may use it; set API keys with --keys FILE")
        console.show(f"{address}/v1" + (f"   page: {address}/" if page else ""))
        run_server(served, settings, listening)

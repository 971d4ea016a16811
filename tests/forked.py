"""Runs functions in forked processes: a new process would import for ten seconds what this one has."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

try:
    FORK = get_context("fork")
except ValueError:
    pytest.skip("needs a system that can fork", allow_module_level=True)


def start(
    function: Callable[..., Any], *arguments: Any, output: Path, environment: dict[str, str] | None = None
) -> BaseProcess:
    """Starts a function in a process of its own; `output` receives what it prints, and its traceback."""
    process = FORK.Process(target=_inside, args=(function, arguments, output, environment or {}))
    process.start()
    return process


def together(
    function: Callable[..., Any], *arguments: Any, output: Path, environment: dict[str, str] | None = None
) -> list[str]:
    """Runs a function in two processes that know of each other, as torchrun starts them.

    Returns what each of them printed. A failure of either fails the test.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    output.mkdir()
    places = [output / f"{rank}.txt" for rank in (0, 1)]
    processes = []
    for rank, place in enumerate(places):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        processes.append(start(function, *arguments, output=place, environment=own | (environment or {})))
    for process in processes:
        process.join(240)
        process.kill()
        process.join()
    printed = [place.read_text() for place in places]
    assert [process.exitcode for process in processes] == [0, 0], "\n".join(printed)
    return printed


def _inside(
    function: Callable[..., Any], arguments: tuple[Any, ...], output: Path, environment: dict[str, str]
) -> None:
    from accelerate.state import AcceleratorState

    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.stdout, sys.stderr = (os.fdopen(place, "w", buffering=1) for place in (1, 2))
    os.environ.update(environment)
    warnings.resetwarnings()  # pytest has made them errors
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent may have trained alone
    function(*arguments)
    sys.stdout.flush()

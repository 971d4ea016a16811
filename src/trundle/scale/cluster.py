"""The way to a Ray cluster: one that runs already, here or elsewhere, or one started on this machine for as long as needed."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trundle.errors import BadInput, MissingExtra

try:
    import ray as ray
    import ray.data as ray_data
except ImportError as error:
    raise MissingExtra("--ray", "scale") from error

__all__ = ["ray", "ray_data"]

_HERE = "here"
"""What `--ray` alone stands for: a cluster Ray finds by itself, or one on this machine."""
_ANSWER_SECONDS = 5.0
_STDERR = 2
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
"""Nothing is told to anybody, and what Ray's own processes log stays in their files."""


@dataclass(frozen=True, kw_only=True)
class _Workers:
    """How many workers there are, and what each may use."""

    count: int
    cores: int
    gpus: int


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Be connected to a cluster while the block runs; one that the caller is connected to is used as it is."""
    if ray.is_initialized():
        yield
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if address != _HERE:
        _check_answers(address)
    try:
        with _no_stderr():
            ray.init(
                address=None if address == _HERE else address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                include_dashboard=False,
            )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"there is no Ray cluster at {address} to work with ({reason}); start one with ray start"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _calm_data() -> Iterator[None]:
    """Ray Data without bars and reports of its own while the block runs."""
    context = ray_data.DataContext.get_current()
    logger = logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)


def _divide(workers: int | None, threads: int | None, *, may_use_gpus: bool) -> _Workers:
    """A worker for each GPU, or where there is none for each `threads` cores; refused if there are not enough."""
    there = ray.cluster_resources()
    gpus, cores = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    if may_use_gpus and gpus:
        most, each = gpus, _Workers(count=workers or gpus, cores=0, gpus=1)
        what = f"{gpus} GPUs"
    else:
        most = cores // (threads or 1)
        each = _Workers(count=workers or most, cores=threads or 1, gpus=0)
        what = f"{cores} cores, {threads or 1} for each worker"
    if not 0 < each.count <= most:
        raise BadInput(
            f"the cluster has {what}, too few for {max(1, each.count)} workers; ask for fewer or add nodes"
        )
    return each


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Ray's C++ part says that it was told to be quiet; what goes wrong comes as an exception."""
    kept = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDERR)
    try:
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)


def _check_answers(address: str) -> None:
    """Ray itself would wait long for an address where nobody is."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise BadInput(
            f"{address!r} is not the address of a Ray cluster; write HOST:PORT as ray start shows it, or auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"nobody answers at {address}; start a cluster there with ray start --head, or leave the address out"
        ) from error

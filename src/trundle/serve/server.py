"""From settings to a server that runs until it is told to stop, and then answers what it took."""

from __future__ import annotations

import logging
import socket
import sys

from trundle.errors import BadInput
from trundle.serve.app import _make_app
from trundle.serve.models import _Served
from trundle.serve.settings import Settings, uvicorn

_GIVES_WAY = 0.001
"""Seconds until a busy worker lets the event loop have a turn."""
_LAST_ANSWERS = 5.0
"""Seconds beyond a request's own timeout that answers may still be on their way."""


def open_socket(host: str, port: int) -> socket.socket:
    """The address to listen at, taken before anything slow happens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{host}:{port} can't be listened at ({reason}); choose another --port or --host"
        ) from error
    return listening


def run_server(served: _Served, settings: Settings, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    sys.setswitchinterval(_GIVES_WAY)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    config = uvicorn.Config(
        _make_app(served, settings),
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.timeout + _LAST_ANSWERS),
    )
    uvicorn.Server(config).run(sockets=[listening])

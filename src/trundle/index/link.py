"""A connection to Postgres that is made again when it breaks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trundle.errors import BadInput, MissingExtra, TrundleError, WriteFailed
from trundle.progress import Progress

try:
    import psycopg
except ImportError as error:
    raise MissingExtra("an index in Postgres", "index") from error

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

PATIENCE = 60.0
"""Seconds a server may be away once it was there."""
AT_THE_DOOR = 1.0
"""Seconds to wait for a server that was never there."""
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0


class Link:
    """A connection that is made again when it breaks."""

    def __init__(self, url: str, *, read_only: bool, patience: float, progress: Progress) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.hostname or 'local'}{parts.path}"
        self._url = url
        self._read_only = read_only
        self._patience = patience
        self._progress = progress
        self._open: Connection | None = None

    def do(self, work: Callable[[Connection], T], *, patience: float | None = None) -> T:
        """Carry out `work` in one transaction; if the server goes away, wait for it and do the whole again."""
        end, wait = time.monotonic() + (self._patience if patience is None else patience), FIRST_WAIT
        while True:
            try:
                connection = self._connected()
                with connection.transaction():
                    return work(connection)
            except psycopg.OperationalError as error:
                self.close()
                if isinstance(error, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory):
                    raise WriteFailed(
                        f"{self.name} has no room ({_first_line(error)}); free some and run the same command "
                        "again: what was stored is kept"
                    ) from error
                if time.monotonic() + wait > end:
                    raise WriteFailed(
                        f"{self.name} can't be reached ({_first_line(error)}); start the server or mend the address "
                        "and run the same command again: what was stored is kept"
                    ) from error
                self._progress.say(f"{self.name} is away; trying again in {wait:.1f} s")
                time.sleep(wait * random.uniform(0.8, 1.2))
                wait = min(2 * wait, LONGEST_WAIT)
            except TrundleError:
                self.close()
                raise
            except psycopg.Error as error:
                self.close()
                raise BadInput(
                    f"{self.name} refuses ({_first_line(error)}); mend that and run again"
                ) from error

    def close(self) -> None:
        """Hang up."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connected(self) -> Connection:
        if self._open is None or self._open.closed:
            try:
                self._open = psycopg.connect(self._url, connect_timeout=5, application_name="trundle")
            except psycopg.ProgrammingError as error:
                raise BadInput(f"the address of the database can't be read ({_first_line(error)})") from error
            self._open.read_only = self._read_only
        return self._open


def only_row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The row of a query that always has one."""
    row = cursor.fetchone()
    assert row is not None
    return row


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

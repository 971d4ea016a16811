"""Reading ahead: what comes next is made in another thread while this one works on what is there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


@contextmanager
def ahead(items: Iterable[T], *, count: int = 1) -> Iterator[Iterator[T]]:
    """The same items, up to `count` of them made in advance; an error comes where its item would have."""
    waiting: queue.Queue[_Item[T] | _End] = queue.Queue(maxsize=count)
    stopped = threading.Event()

    def put(entry: _Item[T] | _End) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                waiting.put(entry, timeout=0.1)
                return

    def make() -> None:
        end = _End()
        try:
            for item in items:
                put(_Item(item))
                if stopped.is_set():
                    return
        except BaseException as error:
            end = _End(error)
        put(end)

    def take() -> Iterator[T]:
        while not isinstance(entry := waiting.get(), _End):
            yield entry.value
        if entry.error is not None:
            raise entry.error

    thread = threading.Thread(target=make, name="reading ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        stopped.set()
        thread.join()

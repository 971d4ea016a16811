"""Rooms that open when they are first entered.

`import trundle` and `trundle --help` must not pay for torch. Each room's `__init__` therefore lists its public
names with the file that holds them, and the file is imported when one of them is first used. A public name must not be
the name of a file in the room: importing the file would put the module in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module `__getattr__` for `package` that finds each public name in the submodule given for it."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{names[name]}"), name)

    return __getattr__

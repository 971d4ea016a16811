"""The help of every command at 80 columns: nothing is cut, and no Python type is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.main import get_command

from trundle.cli.app import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[Any]:
    yield pytest.param(path, command, id=" ".join(path) or "trundle")
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(commands(get_command(app))))
def test_nothing_is_cut_at_80_columns(
    path: tuple[str, ...], command: Any, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = run(*path, "--help", columns=80)
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert not re.search(r"<\w+>|<list", out)
    said = " ".join(out.split())
    for each in command.params:
        if not each.hidden:
            assert all(re.search(rf"(?<![\w-]){name}(?![\w-])", said) for name in each.opts)
            assert " ".join(each.help.split()) in said
    for inner in getattr(command, "commands", {}).values():
        assert inner.help.split("\n\n")[0].replace("\n", " ") in said
    for example in (command.epilog or "").split("\n\n"):
        assert " ".join(example.split()) in said.replace(" \\ ", " ")


def test_no_arguments_print_the_help(run: Callable[..., tuple[int, str, str]]) -> None:
    for path in ((), ("index",), ("targets",)):
        assert run(*path) == run(*path, "--help")

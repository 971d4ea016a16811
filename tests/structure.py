"""Counts the size and structure of the source: `python tests/structure.py` prints it.

Public names are classes and functions at the top of a module without a leading underscore. Import cycles
include imports inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src"
MOST_LINES, MOST_PARAMETERS = 80, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Structure:
    files: int
    lines: int
    median: float
    public_names: int
    long_functions: list[str]
    cycle: list[str]
    repeated_classes: list[str]
    repeated_files: list[str]


def count() -> Structure:
    """Reads every module below src/ once."""
    paths = {_module(path): path for path in sorted(SOURCE.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths.values()]
    tops = [
        node for tree in trees.values() for node in tree.body if isinstance(node, Function | ast.ClassDef)
    ]
    classes = Counter(node.name.lstrip("_") for node in tops if isinstance(node, ast.ClassDef))
    names = Counter(path.name for path in paths.values() if path.name != "__init__.py")
    return Structure(
        files=len(paths),
        lines=sum(lines),
        median=median(lines),
        public_names=sum(not node.name.startswith("_") for node in tops),
        long_functions=[found for name, tree in trees.items() for found in _long_functions(name, tree)],
        cycle=_cycle({name: _imports(tree, paths) - {name} for name, tree in trees.items()}),
        repeated_classes=[name for name, times in classes.items() if times > 1],
        repeated_files=[name for name, times in names.items() if times > 1],
    )


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def _long_functions(module: str, tree: ast.Module) -> Iterator[str]:
    if module.startswith("trundle.cli."):
        return  # a command has a parameter for each flag
    for node in ast.walk(tree):
        if isinstance(node, Function):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [each.arg for each in given if each.arg not in ("self", "cls")]
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES or len(parameters) > MOST_PARAMETERS:
                yield f"{module}.{node.name}: {lines} lines, {len(parameters)} parameters"


def _imports(tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & modules.keys() or {node.module} & modules.keys()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules.keys()
    return found


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


if __name__ == "__main__":
    for name, value in vars(count()).items():
        print(f"{name:>18}  {value or 0 if isinstance(value, list) else value}")

"""Compresses a model by a recipe or for a budget, with what the command line would ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request
from trundle.recipe import Recipe
from trundle.search.limits import TeacherOptions
from trundle.search.search import compress_to_budget

SEARCHED = ("minutes", "students")
TAUGHT = {"teacher_model": "model", "teacher_calls": "calls", "queries": "queries", "index": "index"}
TAUGHT |= {"table": "table", "texts": "texts", "vectors": "vectors", "rows": "rows"}


def compress(
    source: str | SentenceTransformer = "",
    recipe: Recipe | None = None,
    *,
    budget: str | Sequence[str] = "4x",
    **options: Any,
) -> Any:
    """The `Run` of a recipe, or the `Outcome` of a search; a search without an output has a temporary one."""
    searched = {name: options.pop(name) for name in SEARCHED if name in options}
    taught = {own: options.pop(name) for name, own in TAUGHT.items() if name in options}
    if recipe is not None:
        return run_recipe(Request(source=source, **options), recipe)
    if options.get("output") is None and not options.get("dry_run"):
        options["output"] = Path(mkdtemp(prefix="trundle-")) / "small"
    limits = [budget] if isinstance(budget, str) else budget
    request = Request(source=source, **options)
    return compress_to_budget(request, limits, **searched, teacher_options=TeacherOptions(**taught))

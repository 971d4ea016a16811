"""`trundle.compress`: make a small model by a recipe or for a budget, from any teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TypedDict, Unpack, overload

from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus
from trundle.errors import BadInput
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request, Run
from trundle.progress import SILENT, Progress
from trundle.recipe import Recipe
from trundle.search.search import MINUTES, compress_to_budget
from trundle.search.training_source import TeacherOptions
from trundle.search.trials import Outcome
from trundle.teacher.stored import ROWS


class _CompressOptions(TypedDict, total=False):
    """What every compression takes."""

    output: str | Path | None
    """Folder for the result."""
    corpus: Corpus | None
    """The texts to learn from (see `read_corpus`)."""
    seed: int
    dry_run: bool
    """Plan, predict the size, and write nothing."""
    replace: bool
    """Allow an existing output folder."""
    pair: bool
    """Also write the result and its teacher as one model."""
    progress: Progress


class _BudgetOptions(_CompressOptions, total=False):
    """What a compression to a budget takes as well; see `TeacherOptions`."""

    minutes: float
    students: Sequence[str]
    index: str | None
    table: str | None
    texts: str | None
    vectors: str | None
    rows: int
    teacher_model: str | None
    teacher_calls: int | None
    queries: str | None


@overload
def compress(
    source: str | SentenceTransformer, recipe: Recipe, **options: Unpack[_CompressOptions]
) -> Run: ...


@overload
def compress(
    source: str = "", *, budget: str | Sequence[str], **options: Unpack[_BudgetOptions]
) -> Outcome: ...


def compress(
    source: str | SentenceTransformer = "",
    recipe: Recipe | None = None,
    *,
    budget: str | Sequence[str] | None = None,
    **options: Unpack[_BudgetOptions],
) -> Run | Outcome:
    """Makes a small model out of a large one, by a recipe or for a budget.

    Parameters: `source` is a model folder, a hub name or, with a recipe, a model in memory; `recipe` the
    methods to apply (see `read_recipe`); `budget` a limit such as "12MB", or several. With a budget the
    source may be any teacher, and `index` an index to learn from, whose maker the source then is. `students`
    are other models to cut and train. `_CompressOptions` and `_BudgetOptions` list the rest.

    A run with a recipe returns a `Run` with the new model in `Run.model`; a search returns an `Outcome`, and
    writes to a temporary folder (`Outcome.run.output`) if there is no output. An interrupted run with an
    output resumes when it is started again.
    """
    request = Request(
        source=source,
        output=options.get("output"),
        corpus=options.get("corpus"),
        seed=options.get("seed", 0),
        dry_run=options.get("dry_run", False),
        replace=options.get("replace", False),
        pair=options.get("pair", False),
        progress=options.get("progress", SILENT),
    )
    if recipe is not None:
        if budget is not None or options.get("index") is not None:
            raise BadInput("a recipe takes no budget and no index; pass one or the other")
        return run_recipe(request, recipe)
    if budget is None:
        raise BadInput("pass either a recipe or a budget such as '12MB'")
    if request.output is None and not request.dry_run:
        request = Request(**{**vars(request), "output": Path(mkdtemp(prefix="trundle-")) / "small"})
    teacher_options = TeacherOptions(
        index=options.get("index"),
        table=options.get("table"),
        texts=options.get("texts"),
        vectors=options.get("vectors"),
        rows=options.get("rows", ROWS),
        model=options.get("teacher_model"),
        calls=options.get("teacher_calls"),
        queries=options.get("queries"),
    )
    return compress_to_budget(
        request,
        [budget] if isinstance(budget, str) else budget,
        minutes=options.get("minutes", MINUTES),
        students=options.get("students", ()),
        teacher_options=teacher_options,
    )

"""The Python API: `import trundle`.

Each function takes a `SentenceTransformer`, or the folder or hub name of one, and calls what the command of
the same purpose calls. Functions that make a model need the extra `compress`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack

from sentence_transformers import SentenceTransformer
from transformers.utils.logging import disable_progress_bar

from trundle.cli.console import terminal
from trundle.data.corpus import Corpus, corpus_of, read_corpus, unseen_texts
from trundle.data.sampling import sample
from trundle.data.texts import Text
from trundle.embedder import Embedder
from trundle.errors import BadInput, UserError
from trundle.evaluate.comparison import Comparison, compare
from trundle.evaluate.fidelity import MEASURED_TEXTS, Fidelity
from trundle.evaluate.index_check import IndexCheck
from trundle.evaluate.index_check import check_index as check_rows_of
from trundle.evaluate.scoring import find_tasks
from trundle.export.exporting import export_model as write_graph
from trundle.export.open import open_embedder, open_sides
from trundle.export.quantise import ExportOptions
from trundle.index.readers import open_reader
from trundle.methods import METHODS
from trundle.model.encode import embedder
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request, Run
from trundle.precision import Precision
from trundle.progress import Progress
from trundle.recipe import Recipe, read_recipe, single
from trundle.records import read_lineage
from trundle.report.report import make_report, write_report
from trundle.runtime.encoder import Encoder
from trundle.search.limits import MINUTES, TeacherOptions
from trundle.search.search import compress_to_budget
from trundle.search.trials import Outcome

Model = str | Path | SentenceTransformer
"""A model in memory, or the folder or hub name of one."""
Texts = str | Path | Corpus | Iterable[str | Path | Mapping[str, Any]]
"""A file or folder, several of them as `Path`, a list of texts, or a dataset with a column `text`."""

_TEACHER = "teacher"
_TAUGHT = {"text_column": "texts", "vector_column": "vectors", "teacher_model": "model"}
_TAUGHT |= {"teacher_calls": "calls", "table": "table", "rows": "rows", "queries": "queries"}
"""Options of the index and the teacher, and what the search calls them."""
_OPTION, _COMMAND = re.compile(r"--([a-z][a-z-]+)"), re.compile(r"\btrundle [a-z]")
_ARGUMENTS = {"data": "texts", "force": "replace=True"}
"""What commands call otherwise than these functions."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _python_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes errors name arguments instead of a command's options; a command to run stays as it is."""

    @wraps(function)
    def call(*given: _P.args, **named: _P.kwargs) -> _R:
        try:
            return function(*given, **named)
        except UserError as error:
            if not _COMMAND.search(message := str(error)):
                error.args = (_OPTION.sub(lambda one: _argument(one[1]), message),)
            raise

    return call


def _argument(option: str) -> str:
    return _ARGUMENTS.get(option, option.replace("-", "_"))


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A model that `compress` or `distill` made.

    Attributes:
        model: The small model.
        folder: Where it is saved, with its lineage and model card, and its graph after a search.
        fidelity: How far it agrees with the large model on held-out texts; None if there were too few.
        run: What was done, method by method.
        outcome: The candidates, sizes and speeds of a search; None if a recipe was run.
    """

    model: SentenceTransformer = field(repr=False)
    folder: Path
    fidelity: Fidelity | None
    run: Run = field(repr=False)
    outcome: Outcome | None = field(default=None, repr=False)
    texts: tuple[Text, ...] = field(default=(), repr=False)

    def report(self, file: str | Path | None = None) -> Path:
        """Writes an HTML page about the model that opens offline.

        Args:
            file: The page; by default `report.html` in the model's folder.

        Returns:
            The page. The same figures are next to it, as JSON.
        """
        measured = self.texts if self.run.teacher.model is not None else ()
        made = make_report([self.folder], teacher=self.run.teacher, texts=measured, speed=False)
        return write_report(made, file or self.folder / "report.html")[0]

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> str:
        """Uploads the folder, with graph and model card, to the Hugging Face Hub.

        Args:
            repo_id: The repository, such as `me/small`; it is created if it does not exist.
            private: Whether a new repository is private.

        Returns:
            The address of the commit.
        """
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(repo_id, private=private, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo_id, folder_path=str(self.folder)).commit_url)


class _SearchSettings(TypedDict, total=False):
    """The less common options of `compress`."""

    minutes: float
    students: Sequence[str]
    fast: bool
    seed: int
    replace: bool
    pair: bool
    table: str
    text_column: str
    vector_column: str
    rows: int
    queries: str
    teacher_model: str
    teacher_calls: int


@_python_names
def compress(
    model: Model = "",
    recipe: str | Recipe | None = None,
    *,
    budget: str | Sequence[str] | None = None,
    texts: Texts | None = None,
    index: str | None = None,
    output: str | Path | None = None,
    progress: bool | Progress | None = None,
    **options: Unpack[_SearchSettings],
) -> SmallModel:
    """Makes a small model in the vector space of a large one.

    With a budget, the best model within it is searched for, trained and exported. With a recipe, its methods
    are applied. With neither, the budget is `4x`.

    Args:
        model: The large model; with a budget also any other teacher: an endpoint, a table or a store.
        recipe: A built-in recipe, a `.yaml` file or a `Recipe`, instead of a budget.
        budget: One or more limits: `12MB`, `10x`, `20M-params`, `5ms`.
        texts: The texts to learn from: a list, a dataset, or files.
        index: An index to learn from instead, such as `postgresql://user@host/db?table=chunks`.
        output: Folder for the result; by default a temporary folder.
        progress: Whether to show progress; by default only in a terminal or notebook.
        options: `minutes` of a search (30), `students` (more models to cut and train), `seed`, `replace` (an
            existing output), `fast`, `pair`, and `table`, `text_column`, `vector_column`, `rows`, `queries`,
            `teacher_model`, `teacher_calls` as in `trundle compress --help`.

    Returns:
        The small model, where it is saved, and what was measured.

    Example:
        >>> result = trundle.compress("all-mpnet-base-v2", budget="12MB", texts="my-texts/")
        >>> result.fidelity.agreement_asymmetric
        >>> result.model.encode_query("how do I open a file?")
    """
    if unknown := options.keys() - _SearchSettings.__annotations__.keys():
        raise BadInput(
            f"compress has no option {min(unknown)!r}; help(trundle.compress) lists them, such as texts"
        )
    if not isinstance(minutes := options.get("minutes", 0.0), int | float):
        raise BadInput(f"{minutes!r} is not a number of minutes; pass a number such as 20")
    if not isinstance(budget, str | Sequence | None):
        raise BadInput(f"{budget!r} is not a budget; pass a string such as '12MB'")
    shown, seed = _progress(progress), options.get("seed", 0)
    if recipe is not None and not isinstance(recipe, Recipe):
        recipe = read_recipe(recipe)
    corpus = _corpus(texts, seed, shown)
    request = Request(
        source=_named(model) if recipe is None or isinstance(model, Path) else model,
        output=_output(output),
        corpus=corpus,
        seed=seed,
        replace=options.get("replace", False),
        pair=options.get("pair", False),
        progress=shown,
    )
    if recipe is not None:
        if budget is not None or index is not None:
            raise BadInput("a recipe takes no budget and no index; pass one or the other")
        return _result(run_recipe(request, recipe), corpus, seed)
    given: dict[str, Any] = {own: options.get(name) for name, own in _TAUGHT.items()}
    outcome = compress_to_budget(
        request,
        [budget or "4x"] if isinstance(budget, str | None) else budget,
        minutes=options.get("minutes", MINUTES),
        students=options.get("students", ()),
        fast=options.get("fast", False),
        teacher_options=TeacherOptions(index=index, **given),
    )
    assert outcome.run is not None
    return replace(_result(outcome.run, corpus, seed), outcome=outcome)


@_python_names
def distill(
    student: Model,
    teacher: Model,
    texts: Texts,
    *,
    minutes: float | None = None,
    output: str | Path | None = None,
    progress: bool | Progress | None = None,
    seed: int = 0,
    **options: Any,
) -> SmallModel:
    """Trains a student to give its teacher's vectors (LEAF), so that it can search the teacher's index.

    Args:
        student: The small model; it is not changed.
        teacher: The large model, or the name of another teacher: an endpoint, a table, a store, an index.
        texts: Texts like those you will encode; no labels are needed.
        minutes: The longest training time; by default 30 epochs.
        output: Folder for the result; by default a temporary folder.
        progress: Whether to show progress; by default only in a terminal or notebook.
        seed: The same seed gives the same model.
        options: Any option of `trundle align`, such as `steps`, `batch_size` or `learning_rate`.

    Returns:
        The trained student and how far it agrees with its teacher on held-out texts.

    Example:
        >>> small = trundle.prune_layers("all-mpnet-base-v2", keep=6)
        >>> result = trundle.distill(small, "all-mpnet-base-v2", texts="my-texts/", minutes=30)
    """
    shown = _progress(progress)
    opened = {_TEACHER: teacher} if isinstance(teacher, SentenceTransformer) else {}
    options |= {"teacher": _TEACHER if opened else str(teacher), "minutes": minutes}
    request = Request(
        source=student if not isinstance(student, Path) else str(student),
        output=_output(output),
        corpus=_corpus(texts, seed, shown),
        seed=seed,
        opened=opened,
        progress=shown,
    )
    return _result(run_recipe(request, single(METHODS["align"], options)), request.corpus, seed)


@_python_names
def prune_layers(
    model: Model,
    keep: int | None = None,
    *,
    texts: Texts | None = None,
    progress: bool | Progress | None = None,
    **options: Any,
) -> SentenceTransformer:
    """Removes layers; with texts, the others are fitted to the uncut model by least squares.

    Args:
        model: The model; it is not changed.
        keep: How many layers to keep; 0 makes a static model.
        texts: Texts to fit the kept layers to.
        progress: Whether to show progress; by default only in a terminal or notebook.
        options: Any option of `trundle depth`, such as `blocks` or `heal`.

    Returns:
        The shorter model. Train it with `distill`.

    Example:
        >>> six = trundle.prune_layers("all-mpnet-base-v2", keep=6)
    """
    return _apply("depth", model, texts, progress, options | ({} if keep is None else {"keep": keep}))


@_python_names
def prune_vocabulary(
    model: Model,
    keep: int | None = None,
    *,
    texts: Texts | None = None,
    progress: bool | Progress | None = None,
    **options: Any,
) -> SentenceTransformer:
    """Keeps the tokens that matter in your texts and rebuilds the tokenizer.

    Args:
        model: The model; it is not changed.
        keep: How many tokens to keep.
        texts: The texts in which tokens are counted.
        progress: Whether to show progress; by default only in a terminal or notebook.
        options: Any option of `trundle vocabulary`, such as `score` or `oov`.

    Returns:
        The model with fewer tokens; texts of kept tokens only keep their vectors exactly.

    Example:
        >>> fewer = trundle.prune_vocabulary("all-mpnet-base-v2", keep=8000, texts="my-texts/")
    """
    return _apply("vocabulary", model, texts, progress, options | ({} if keep is None else {"keep": keep}))


@_python_names
def prune_weights(
    model: Model,
    sparsity: str | float,
    *,
    texts: Texts | None = None,
    progress: bool | Progress | None = None,
    **options: Any,
) -> SentenceTransformer:
    """Removes single weights or MLP neurons that matter least in your domain (GAPrune and others).

    Args:
        model: The model; it is not changed.
        sparsity: The share of weights or neurons to remove, such as `"50%"`.
        texts: Tuples or texts of your domain.
        progress: Whether to show progress; by default only in a terminal or notebook.
        options: Any option of `trundle weights`, such as `general`, `structure` or `method`.

    Returns:
        The pruned model.

    Example:
        >>> pruned = trundle.prune_weights("all-mpnet-base-v2", "50%", method="magnitude")
    """
    return _apply("weights", model, texts, progress, options | {"sparsity": sparsity})


@_python_names
def narrow(
    model: Model,
    width: str | float,
    *,
    texts: Texts | None = None,
    progress: bool | Progress | None = None,
    **options: Any,
) -> SentenceTransformer:
    """Cuts every layer to a share of its width; with texts, by importance and fitted by least squares.

    Args:
        model: The model; it is not changed. A nested model gives the width it was trained for.
        width: The share to keep, such as `"1/2"`.
        texts: Texts to choose dimensions with and to fit the narrow model to.
        progress: Whether to show progress; by default only in a terminal or notebook.
        options: Any option of `trundle width --extract`, such as `mlp` or `select`.

    Returns:
        The narrow model. Train it with `distill`.

    Example:
        >>> half = trundle.narrow("all-mpnet-base-v2", "1/2", texts="my-texts/")
    """
    return _apply("width", model, texts, progress, options | {"extract": width})


@_python_names
def evaluate_model(
    model: Model,
    teacher: Model | None = None,
    *,
    texts: Texts | None = None,
    tasks: Sequence[str] = (),
    progress: bool | Progress | None = None,
) -> Comparison:
    """Scores a model on tasks, and on texts against a teacher.

    Args:
        model: The model, or the folder of an exported one.
        teacher: The large model; the small one is also scored on the large one's index.
        texts: Texts without labels, for the agreement with the teacher.
        tasks: Files or folders of tasks, or `mteb:NAME`.
        progress: Whether to show progress; by default only in a terminal or notebook.

    Returns:
        `results` by task, `shares` of the teacher's scores, and `fidelity` on the texts.

    Example:
        >>> found = trundle.evaluate_model("small", "all-mpnet-base-v2", texts="my-texts/")
        >>> found.fidelity[0].agreement_asymmetric
    """
    shown = _progress(progress)
    return compare(
        [_embedder(model, "model", shown)],
        teacher=None if teacher is None else _embedder(teacher, _TEACHER, shown),
        tasks=find_tasks(tasks) if tasks else [],
        texts=_measured(texts, model, shown),
        progress=shown,
    )


@_python_names
def export_model(
    model: Model,
    *,
    output: str | Path | None = None,
    to: Literal["onnx", "openvino"] = "onnx",
    precision: Precision = "float32",
    texts: Texts | None = None,
    replace: bool = False,
    progress: bool | Progress | None = None,
) -> Encoder:
    """Writes the model as one graph that runs without torch.

    Args:
        model: The model.
        output: A new folder; by default the graph goes into the model's own folder.
        to: The runtime that the graph is for.
        precision: `float32`, `float16`, `int8`, `int4`, `int4+int8` or `int8+int4_tokens`.
        texts: Texts to fit and measure int8 and int4 with.
        replace: Whether to replace an existing graph or folder.
        progress: Whether to show progress; by default only in a terminal or notebook.

    Returns:
        The exported model, ready to encode.

    Example:
        >>> encoder = trundle.export_model("small", precision="int8", texts="my-texts/")
        >>> encoder.encode_query("how do I open a file?")
    """
    if output is None and isinstance(model, SentenceTransformer):
        raise BadInput("a model in memory has no folder of its own; pass output=FOLDER")
    shown = _progress(progress)
    calibrate = [] if texts is None else [text.text for text in _all_texts(_corpus(texts, 0, shown))]
    exported = write_graph(
        _named(model),
        to=to,
        precision=precision,
        output=output,
        options=ExportOptions(calibrate=calibrate),
        force=replace,
        progress=shown,
    )
    return Encoder(exported.folder.parent if exported.documents is not None else exported.folder)


@_python_names
def check_index(
    model: Model,
    index: str,
    *,
    teacher: Model | None = None,
    queries: Sequence[str] = (),
    sample_size: int = 5000,
    progress: bool | Progress | None = None,
) -> IndexCheck:
    """Checks on your own index that a model finds what the index's maker finds; writes nothing.

    Args:
        model: The small model.
        index: A file, a folder or an address such as `postgresql://user@host/db?table=chunks`.
        teacher: The model or endpoint that made the index; by default its stored vectors are used.
        queries: Your users' queries; they need the teacher.
        sample_size: How many rows of the index to search in.
        progress: Whether to show progress; by default only in a terminal or notebook.

    Returns:
        `agreement` of the ten results, `cosine`, and `says()`, the finding in sentences.

    Example:
        >>> check = trundle.check_index("small", "qdrant://localhost:6333/chunks")
        >>> print(check.agreement, *check.says(), sep=" ")
    """
    shown = _progress(progress)
    with closing(open_reader(index, progress=shown)) as reader:
        if isinstance(model, SentenceTransformer):
            small = embedder(model, name="model")
        else:
            small = open_sides(str(model), progress=shown)[0].embedder(str(model))
        large = None if teacher is None else _embedder(teacher, _TEACHER, shown)
        return check_rows_of(reader, small, teacher=large, queries=queries, texts=sample_size, progress=shown)


def _progress(wanted: bool | Progress | None) -> Progress:
    if wanted is None:
        wanted = sys.stderr.isatty() or "ipykernel" in sys.modules
    if wanted is False:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, while it loads weights
    return terminal(quiet=not wanted) if isinstance(wanted, bool) else wanted


def _corpus(texts: Texts | None, seed: int, progress: Progress) -> Corpus | None:
    """Returns the texts as a corpus: a string or a path names a source, a list of strings holds texts."""
    if texts is None or isinstance(texts, Corpus):
        return texts
    if isinstance(texts, str | Path):
        return read_corpus([str(texts)], seed=seed, progress=progress)
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise BadInput(f"{texts!r:.60} are no texts; pass a list of strings, a dataset, or files")
    given = list(texts)
    if given and all(isinstance(one, Path) for one in given):
        return read_corpus([str(one) for one in given], seed=seed, progress=progress)
    return corpus_of([Text(text=_text(one)) for one in given], "texts in memory", seed=seed)


def _text(row: object) -> str:
    if isinstance(row, Mapping):
        if not isinstance(row.get("text"), str):
            raise BadInput(f"a row has the columns {', '.join(row)}; pass its texts as a column `text`")
        return str(row["text"])
    if not isinstance(row, str):
        raise BadInput(f"a text is a {type(row).__name__}; pass strings, files, or rows with a column `text`")
    return row


def _all_texts(corpus: Corpus | None) -> list[Text]:
    return [] if corpus is None else [*corpus.train(), *corpus.validation(), *corpus.held_out()]


def _measured(texts: Texts | None, model: Model, progress: Progress) -> list[Text]:
    """Returns the texts to measure on; of files, only those that the model was not trained on."""
    if isinstance(texts, str | Path):
        lineage = None if isinstance(model, SentenceTransformer) else read_lineage(str(model))
        return unseen_texts([str(texts)], [lineage], MEASURED_TEXTS, progress=progress)
    return sample(_all_texts(_corpus(texts, 0, progress)), MEASURED_TEXTS, 0)


def _named(model: Model) -> str:
    """Returns the model's folder or hub name; a model in memory is saved to a temporary folder."""
    if not isinstance(model, SentenceTransformer):
        return str(model)
    folder = Path(mkdtemp(prefix="trundle-")) / "model"
    model.save_pretrained(str(folder), create_model_card=False)
    return str(folder)


def _output(folder: str | Path | None) -> Path:
    return Path(mkdtemp(prefix="trundle-")) / "small" if folder is None else Path(folder).expanduser()


def _embedder(model: Model, name: str, progress: Progress) -> Embedder:
    if isinstance(model, SentenceTransformer):
        return embedder(model, name=name)
    return open_embedder(str(model), progress=progress)[0]


def _apply(
    method: str,
    model: Model,
    texts: Texts | None,
    progress: bool | Progress | None,
    options: Mapping[str, Any],
) -> SentenceTransformer:
    """Applies one method and returns the new model; nothing is written."""
    shown = _progress(progress)
    source = str(model) if isinstance(model, Path) else model
    request = Request(source=source, corpus=_corpus(texts, 0, shown), progress=shown, compare=False)
    return run_recipe(request, single(METHODS[method], options)).model


def _result(run: Run, corpus: Corpus | None, seed: int) -> SmallModel:
    assert run.output is not None
    held_out = [] if corpus is None else list(corpus.held_out())
    texts = tuple(sample(held_out, MEASURED_TEXTS, seed))
    return SmallModel(model=run.model, folder=run.output, fidelity=run.fidelity, run=run, texts=texts)

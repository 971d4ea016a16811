"""The verbs for an index: build one, search it, and prove that a student may search one that is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trundle.cli.common import _Json, _Model, _Quiet, _Seed, _TrustRemoteCode, _Verbose
from trundle.cli.console import _calm_libraries, _show, _show_json, _terminal
from trundle.errors import BadInput

if TYPE_CHECKING:
    from trundle.embedder import Embedder
    from trundle.progress import Progress

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build, search and check indexes, in a folder or in Postgres.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Where = Annotated[str, typer.Argument(help="An index: a folder, or postgresql://user@host/database.")]
_Table = Annotated[str, typer.Option(help="The table, in Postgres.")]
_ENVIRONMENT = "environment"


@app.command()
def build(
    model: Annotated[
        str, typer.Argument(help="The model that embeds the documents; of a pair, its teacher does.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            "-d",
            help="Texts: .txt .jsonl .csv .tsv .parquet, a folder, or 'environment'; repeatable.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="A folder, or postgresql://user@host/database.")
    ],
    precision: Annotated[
        Literal["float", "int8", "binary"] | None,
        typer.Option(
            help="What is searched first, float by default; the best are looked at again with full vectors."
        ),
    ] = None,
    table: _Table = "trundle",
    graph: Annotated[
        str | None, typer.Option(help="Which graph of the model to run, such as onnx-int8.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build anew; the old index is there until the new one is whole.")
    ] = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Embed texts and store them with their vectors.

    What is stored already is not embedded again: a build that was stopped goes on, and more --data is added.
    """
    _calm_libraries(verbose=verbose)
    from trundle.data.files import parse_source
    from trundle.export.open import open_encoder
    from trundle.index.base import Wanted
    from trundle.index.stores import build_index, create_store

    progress = _terminal(quiet=quiet or as_json)
    for source in data:
        if source != _ENVIRONMENT:
            parse_source(source)
    encoder = open_encoder(model, graph=graph, trust_remote_code=trust, progress=progress)
    wanted = Wanted(model=_shown(model), dimensions=encoder.dimensions, precision=precision)
    with create_store(output, wanted, table=table, force=force, progress=progress) as store:
        built = build_index(store, _texts(data, progress), encoder.encode_document, progress=progress)
        name, precision = store.name, store.facts.precision
    if as_json:
        _show_json({"index": name, "texts": built.total, "added": built.added, "precision": precision})
        return
    _show(f"{name}: {built.total:,} texts, {built.added:,} of them new.")


@app.command()
def search(
    where: _Where,
    queries: Annotated[list[str], typer.Argument(help="What to search for; each word group in quotes.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model that embeds the queries; the index's own by default."),
    ] = None,
    results: Annotated[int, typer.Option("--results", "-n", min=1, max=1000, help="How many to show.")] = 10,
    table: _Table = "trundle",
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Find the nearest texts, with the student's queries or the builder's own."""
    _calm_libraries(verbose=verbose)
    from trundle.export.open import open_encoder
    from trundle.index.stores import open_store

    progress = _terminal(quiet=quiet or as_json)
    store = open_store(where, table=table, progress=progress)
    encoder = open_encoder(model or store.facts.model, trust_remote_code=trust, progress=progress)
    if encoder.dimensions != store.dimensions:
        raise BadInput(
            f"the model gives vectors of {encoder.dimensions} numbers and the index stores {store.dimensions}; "
            "search with a model in the space of the one that built it"
        )
    with closing(store):
        found = store.search(encoder.encode_query(queries), results)
    if as_json:
        rows = [
            {"query": query, "results": [{"text": one.text, "score": one.score} for one in row]}
            for query, row in zip(queries, found, strict=True)
        ]
        _show_json(rows)
        return
    for query, row in zip(queries, found, strict=True):
        if len(queries) > 1:
            _show(f"{query}")
        for one in row:
            _show(f"{one.score:6.3f}  {' '.join(one.text.split())[:160]}")


@app.command()
def check(
    student: _Model,
    against: Annotated[
        str, typer.Option(help="The index that is there: postgresql://user@host/database, or a folder.")
    ],
    teacher: Annotated[
        str | None,
        typer.Option(help="The model (or endpoint URL) that built it; without it the index stands in."),
    ] = None,
    teacher_model: Annotated[str | None, typer.Option(help="Which model of an endpoint.")] = None,
    queries: Annotated[
        str | None, typer.Option(help="A file of queries as your users ask; needs --teacher.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="The table, where several hold vectors.")] = None,
    texts: Annotated[str | None, typer.Option(help="Its column of texts.")] = None,
    vectors: Annotated[str | None, typer.Option(help="Its column of vectors.")] = None,
    sample: Annotated[int, typer.Option(min=50, help="Texts to search in.")] = 5000,
    most_queries: Annotated[int, typer.Option(min=1, help="Queries to ask.")] = 200,
    seed: _Seed = 0,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Prove on your own index that the student may search it.

    Nothing is written: a sample is read, and the ten texts the student finds are compared with the teacher's.
    """
    _calm_libraries(verbose=verbose)
    from trundle.data.texts import read_texts
    from trundle.export.open import open_sides
    from trundle.index.check import check_index
    from trundle.index.stores import open_readable

    progress = _terminal(quiet=quiet or as_json)
    asked = [text.text for text in read_texts(queries)] if queries else []
    small, *_ = open_sides(student, trust_remote_code=trust, progress=progress)
    reader = small.embedder(_shown(student))
    master = None if teacher is None else _teacher(teacher, teacher_model, trust=trust, progress=progress)
    index = open_readable(against, table=table, text_column=texts, vector_column=vectors, progress=progress)
    with closing(index):
        found = check_index(
            index,
            reader,
            teacher=master,
            queries=asked,
            texts=sample,
            most_queries=most_queries,
            seed=seed,
            progress=progress,
        )
    if as_json:
        _show_json(found.as_json())
        return
    _show(f"agreement@10 {found.agreement:.3f}, cosine {found.cosine:.3f}")
    _show()
    for line in found.says():
        _show(line)


def _teacher(name: str, endpoint_model: str | None, *, trust: bool, progress: Progress) -> Embedder:
    from trundle.export.open import open_encoder
    from trundle.teacher import teacher_kind

    if teacher_kind(name) == "endpoint":
        from trundle.teacher.endpoint import endpoint_teacher

        return endpoint_teacher(name, endpoint_model)
    return open_encoder(name, trust_remote_code=trust, progress=progress).embedder(_shown(name))


def _shown(model: str) -> str:
    """A folder by its whole path, so that the index finds it again from elsewhere; a hub name as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _texts(sources: Sequence[str], progress: Progress) -> Iterator[str]:
    from trundle.data.environment import environment_pairs
    from trundle.data.texts import read_texts

    for source in sources:
        if source == _ENVIRONMENT:
            yield from (pair.document for pair in environment_pairs(progress=progress))
        else:
            yield from (text.text for text in read_texts(source))

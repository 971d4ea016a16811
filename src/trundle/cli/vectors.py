"""The commands that store vectors: `index` for searching, `targets` for training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from trundle.cli import console
from trundle.cli.evaluate import _open_teacher
from trundle.errors import BadInput, TrundleError
from trundle.folders import absolute_name, check_not_read
from trundle.teacher import MANIFEST

if TYPE_CHECKING:
    from trundle.progress import Progress

_RAY = "--ray"


def _group(about: str) -> typer.Typer:
    help_flags = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        cls=console._CommandGroup, rich_markup_mode=None, help=about, context_settings=help_flags
    )


index = _group("Build, search, check and read indexes.")
targets = _group("Compute a teacher's vectors once, to train students from.")
_Table = Annotated[str, Option(help="Name of the table in Postgres.")]
_ANY_INDEX = "a folder, a file, or an address such as postgresql://host/db."
_ADDRESSES = """Addresses: postgresql://user@host/db?table=NAME, qdrant://host:6333/NAME,
chroma://host:8000/NAME, milvus://host:19530/NAME, s3://bucket/path of LanceDB.

Folders: LanceDB, Qdrant, Chroma, Milvus Lite, trundle.

Files: FAISS, sqlite-vec, parquet, arrow, npz."""


def _check_unused(folder: Path, own: str) -> None:
    """Rejects a folder of other files; hidden ones are what an interrupted build left."""
    there = [] if (folder / own).is_file() or not folder.is_dir() else sorted(folder.iterdir())
    if others := [entry.name for entry in there if not entry.name.startswith(".")]:
        raise BadInput(f"{folder} holds other files ({others[0]}); choose another folder")


@index.command("build", cls=console._Command)
@console._with_flags
def _build_index(
    flags: console._CommonFlags,
    model: Annotated[str, Argument(help="The model that embeds the documents; a pair uses its teacher.")],
    data: Annotated[list[str], console._DATA],
    output: Annotated[str, Option("--output", "-o", help="A folder, or postgresql://host/db.")],
    precision: Annotated[
        Literal["float", "int8", "binary"] | None,
        Option(help="Precision of the first search; full vectors rescore it; default: float."),
    ] = None,
    table: _Table = "trundle",
    graph: console._Graph = None,
    force: Annotated[bool, Option("--force", help="Rebuild, and replace the index when complete.")] = False,
) -> None:
    """Embed texts and store them with their vectors.

    Stored texts are not embedded again: an interrupted build resumes, and more --data is added.
    """
    console._check_inputs(data=data, graph=graph)
    if "://" in output and not output.startswith(("postgres://", "postgresql://")):
        raise BadInput(f"{output} can't be built; pass a folder, or postgresql://user@host/database")
    if "://" not in output:
        _check_unused(Path(output), "index.json")
    console._check_inputs(model, trust=flags.trust)
    progress = flags.progress()
    from trundle.data.corpus import files_of
    from trundle.export.open import open_encoder
    from trundle.index.base import Wanted
    from trundle.index.readers import build_index, create_store

    read = [model, *files_of(data)]
    next(_texts(data, progress), None)  # rejects a file without texts before the index is created
    encoder = open_encoder(model, graph=graph, trust_remote_code=flags.trust, progress=progress)
    wanted = Wanted(
        model=absolute_name(model),
        dimensions=encoder.dimensions,
        precision=precision,
        identity=encoder.identity,
    )
    with create_store(output, wanted, table=table, force=force, read=read, progress=progress) as store:
        built = build_index(store, _texts(data, progress), encoder.encode_document, progress=progress)
        name, precision = store.name, store.facts.precision
    counts = {"texts": built.total, "added": built.added, "empty": built.empty}
    if flags.shows_json({"index": name, **counts, "precision": precision}):
        return
    console._show(f"{name}: {built.total:,} texts, {built.added:,} of them new.")


def _texts(sources: Sequence[str], progress: Progress) -> Iterator[str]:
    from trundle.data.corpus import ENVIRONMENT
    from trundle.data.environment import environment_pairs
    from trundle.data.texts import read_texts

    for source in sources:
        if source == ENVIRONMENT:
            yield from (pair.document for pair in environment_pairs(progress=progress))
        else:
            yield from (text.text for text in read_texts(source))


@index.command(cls=console._Command)
@console._with_flags
def search(
    flags: console._CommonFlags,
    where: Annotated[str, Argument(help="An index: a folder, or postgresql://user@host/database.")],
    queries: Annotated[list[str], Argument(help="What to search for; put each query in quotes.")],
    model: Annotated[
        str | None,
        Option("--model", "-m", help="Model for the queries; default: the one that built the index."),
    ] = None,
    results: Annotated[int, Option("--results", "-n", min=1, max=1000, help="How many to show.")] = 10,
    table: _Table = "trundle",
) -> None:
    """Search an index with its own model, or with a student of it."""
    progress = flags.progress()
    from trundle.export.open import open_encoder
    from trundle.index.base import same_model
    from trundle.index.readers import open_store

    store = open_store(where, table=table, progress=progress)
    encoder = open_encoder(model or store.facts.model, trust_remote_code=flags.trust, progress=progress)
    if encoder.dimensions != store.dimensions:
        widths = (
            f"the model's vectors have {encoder.dimensions} dimensions and the index has {store.dimensions}"
        )
        raise BadInput(f"{widths}; search with a model in the vector space of the index")
    if model is None and not same_model(store.facts.identity, encoder.identity):
        changed = f"{store.facts.model} has changed since {store.name} was built"
        raise BadInput(f"{changed}; build the index again with --force, or name a model with --model")
    with closing(store):
        found = store.search(encoder.encode_query(queries), results)
    by_query = list(zip(queries, found, strict=True))
    if flags.shows_json(
        [{"query": query, "results": [asdict(one) for one in row]} for query, row in by_query]
    ):
        return
    for query, row in by_query:
        if len(queries) > 1:
            console._show(query)
        for one in row:
            console._show(f"{one.score:6.3f}  {' '.join(one.text.split())[:160]}")


@index.command(cls=console._Command)
@console._with_flags
def check(
    flags: console._IndexFlags,
    student: console._Model,
    against: Annotated[str, Option(help=f"The index to check: {_ANY_INDEX}")],
    teacher: Annotated[
        str | None, Option(help="Model or endpoint URL that built the index; default: its stored vectors.")
    ] = None,
    teacher_model: console._TeacherModel = None,
    queries: Annotated[str | None, Option(help="File of your users' queries; needs --teacher.")] = None,
    sample: Annotated[int, Option(min=50, help="How many texts of the index to search in.")] = 5000,
    most_queries: Annotated[int, Option(min=1, help="Maximum number of queries to run.")] = 200,
    fail_under: Annotated[
        float | None, Option(min=0, max=100, help="Exit with code 1 if fewer percent agree.")
    ] = None,
    seed: console._Seed = 0,
) -> None:
    """Check on your own index that the student can search it.

    Reads a sample and compares the student's ten results with the teacher's. Writes nothing.
    """
    console._check_inputs(data=[queries] if queries else None)
    progress = flags.progress()
    from trundle.data.texts import read_texts
    from trundle.index.readers import open_reader

    own_queries = [text.text for text in read_texts(queries)] if queries else []
    with closing(open_reader(against, progress=progress, **flags.named())) as reader:
        # Only now, because importing and opening models takes long and a wrong address is refused at once.
        console._check_inputs(student, teacher=teacher, trust=flags.trust)
        from trundle.evaluate.index_check import check_index
        from trundle.export.open import open_sides

        small, *_ = open_sides(student, trust_remote_code=flags.trust, progress=progress)
        large = None
        if teacher is not None:
            large = _open_teacher(
                teacher, teacher_model, graph="fastest", trust=flags.trust, progress=progress
            )
        found = check_index(
            reader,
            small.embedder(student),
            teacher=large,
            queries=own_queries,
            texts=sample,
            most_queries=most_queries,
            seed=seed,
            progress=progress,
        )
        left_out = reader.counts.says()
    if not flags.shows_json(found.as_json()):
        if left_out:
            progress.say(left_out)
        console._show(f"agreement@10 {found.agreement:.1%}, cosine {found.cosine:.3f}\n")
        for line in found.says():
            console._show(line)
    if fail_under is not None and 100 * found.agreement < fail_under:
        missed = f"agreement@10 is {found.agreement:.1%}, under {fail_under:g}%"
        raise TrundleError(f"{missed}; keep the teacher for queries, or train the student further")


@index.command("read", cls=console._Command, epilog=_ADDRESSES)
@console._with_flags
def _read_index(
    flags: console._IndexFlags,
    where: Annotated[str, Argument(help=f"An index: {_ANY_INDEX}")],
    output: Annotated[Path, Option("--output", "-o", help="A parquet file for ids, texts and vectors.")],
    sample: Annotated[int | None, Option(min=1, help="Rows to draw at random; default: all.")] = None,
    seed: console._Seed = 0,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Copy the texts and vectors of any vector database to a parquet file.

    Rows without a text or a usable vector are left out and counted. Nothing is written to the index.
    """
    progress = flags.progress()
    if output.suffix != ".parquet":
        raise BadInput(f"{output} does not end in .parquet; choose a name that does")
    if output.exists() and not force:
        raise BadInput(f"{output} already exists; choose another file, or pass --force to replace it")
    from trundle.index.flat_files import write_table
    from trundle.index.readers import open_reader

    check_not_read(output, [where])
    with closing(open_reader(where, progress=progress, **flags.named())) as reader:
        written = write_table(reader, output, sample=sample, seed=seed, progress=progress)
    counts = reader.counts
    about = {"index": reader.where, "table": str(output), "rows": written, "width": reader.width}
    left = {"metric": reader.metric, "left_out": counts.left_out, "duplicates": counts.duplicates}
    if flags.shows_json(about | left):
        return
    rows = f"{written:,} of {reader.count:,} rows of {reader.where}"
    console._show(f"{output}: {rows}, {reader.width} dimensions, {reader.metric}.")
    if said := counts.says():
        console._show(said)


class _RayCommand(console._Command):
    """A command whose `--ray` may have no value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        for place, word in enumerate(given):
            following = given[place + 1 : place + 2]
            if word == _RAY and (not following or following[0].startswith("-")):
                given[place] = f"{_RAY}=here"
        return super().parse_args(ctx, given)


@targets.command("build", cls=_RayCommand)
@console._with_flags
def _build_targets(
    flags: console._CommonFlags,
    model: Annotated[str, Argument(help="The teacher: a model folder or hub name.")],
    data: Annotated[
        list[str],
        Option("--data", "-d", help="Texts; with --ray only parquet, also at s3://… or gs://…; repeatable."),
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder; with --ray on a disk all nodes share.")],
    ray: Annotated[
        str | None,
        Option(_RAY, metavar="[HOST:PORT]", help="Use a Ray cluster; default: the one here, or a new one."),
    ] = None,
    workers: Annotated[
        int | None,
        Option(min=1, help="With --ray: number of workers; default: one per GPU, or else per core."),
    ] = None,
    runtime: Annotated[bool, Option("--runtime", help="Run the exported graph on the CPU.")] = False,
    threads: Annotated[int | None, Option(min=1, help="Cores per worker, or for --runtime.")] = None,
    dtype: Annotated[Literal["float16", "float32"], Option(help="Type of the stored vectors.")] = "float16",
) -> None:
    """Store a teacher's vectors of many texts.

    Stored vectors are not computed again: an interrupted build resumes. Train on the store with
    `trundle align STUDENT --teacher STORE`.
    """
    progress = flags.progress()
    if ray is None and workers is not None:
        raise BadInput("--workers goes with --ray; without it there is only one process")
    if ray is None and threads is not None and not runtime:
        raise BadInput("--threads goes with --ray or --runtime; for torch, set OMP_NUM_THREADS")
    console._check_inputs(data=data)
    _check_unused(output, MANIFEST)
    console._check_inputs(teacher=model, trust=flags.trust)
    from trundle.scale.shard_writer import TeacherSpec, build_local

    name, trust = absolute_name(model), flags.trust
    asked = TeacherSpec(model=name, runtime=runtime, threads=threads, trust_remote_code=trust)
    if ray is None:
        made = build_local(data, asked, output, dtype=dtype, progress=progress)
    else:
        from trundle.scale.on_ray import build_on_ray

        made = build_on_ray(data, asked, output, address=ray, workers=workers, dtype=dtype, progress=progress)
    facts = made.manifest
    stored = sum(part.size for shard in facts.shards for part in shard.files.values())
    about = {"store": str(output), "teacher": facts.teacher, "texts": facts.count, "kinds": facts.kinds}
    sizes = {"repeats": facts.repeats, "width": facts.width, "shards": len(facts.shards), "bytes": stored}
    if flags.shows_json(about | sizes):
        return
    console._show(
        f"{output}: {facts.count:,} texts, vectors of {facts.width} dimensions, {stored / 1e6:,.1f} MB.\n"
    )
    console._show(f"    trundle align STUDENT --teacher {output} -o SMALL")

"""The rows of any index: what every reader provides, and what all readers share.

A reader opens an index that may be large and that other software wrote, and never writes. It yields ids,
texts and vectors a batch at a time, of all rows or of a uniform sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import blake2b
from importlib import import_module
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import BadInput, MissingExtra, OtherTexts, TrundleError

Metric = Literal["cosine", "inner product", "l2"]
_Places = NDArray[np.int64]
"""Positions of rows, sorted."""

_Mask = NDArray[np.bool_]
_BATCH_ROWS = 1024
_IDS_AT_ONCE = 10_000
_TEXT_NAMES = (
    *("text", "content", "document", "body", "chunk", "page_content", "passage", "chunk_text", "contents"),
)
_LOOKED_AT = 8
"""The first numbers of each vector that show that it is not zero."""
_MOST_ROUNDS = 4
"""How often more rows are drawn in place of those without a text or vector."""
_TOLERATED = 0.1
"""From this share of vectors of another width on, the index has no width of its own."""


@dataclass(frozen=True, kw_only=True)
class _RowBatch:
    """Some rows that have a text and a vector; row i is `ids[i]`, `texts[i]`, `vectors[i]`."""

    texts: tuple[str, ...]
    vectors: Vectors
    raw_ids: Any
    """The ids as the database has them: a sequence, or an array of numpy or Arrow."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids as strings; few callers need them, so they are not made before."""
        return tuple(map(str, self.raw_ids if isinstance(self.raw_ids, list) else self.raw_ids.tolist()))


@dataclass(kw_only=True)
class _RowCounts:
    """How many rows were read, how many of them were left out, and why."""

    read: int = 0
    no_text: int = 0
    no_vector: int = 0
    zero: int = 0
    not_finite: int = 0
    other_width: int = 0
    last: str = ""
    """A hash of the last row that was read, used or not."""
    _hashes: array[int] = field(default_factory=lambda: array("Q"), repr=False)

    @property
    def left_out(self) -> int:
        """The number of rows without a text or a usable vector."""
        return self.no_text + self.no_vector + self.zero + self.not_finite + self.other_width

    @property
    def duplicates(self) -> int:
        """The number of rows whose vector equals an earlier one; they are not left out."""
        return len(self._hashes) - len(np.unique(np.frombuffer(self._hashes, dtype=np.uint64)))

    def says(self) -> str:
        """One sentence, or nothing if every row was used and no vector occurs twice."""
        reasons = {
            "no text": self.no_text,
            "no vector": self.no_vector,
            "a vector of zeros": self.zero,
            "a vector with NaN or infinity": self.not_finite,
            "a vector of another width": self.other_width,
        }
        parts = [f"{count:,} with {reason}" for reason, count in reasons.items() if count]
        said = f"left out {', '.join(parts)}" if parts else ""
        if duplicates := self.duplicates:
            said += f"{'; ' if said else ''}{duplicates:,} have the same vector as another row"
        return f"Of {self.read:,} rows read, {said}." if said else ""

    def as_json(self) -> dict[str, int | str]:
        """Return what continues a count in another process, but for the vectors that were noted."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name[0] != "_"}

    def _note(self, vectors: Vectors) -> None:
        """Remember the vectors by a hash of 8 bytes each."""
        odd = vectors.shape[1] % 2
        words = np.ascontiguousarray(np.pad(vectors, ((0, 0), (0, odd))) if odd else vectors).view(np.uint64)
        sums: Any = np.einsum("ij,j->i", words, _factors(words.shape[1]))
        self._hashes.frombytes(sums.tobytes())


class _RawRows(NamedTuple):
    """Rows as a database returns them: texts may be missing, vectors missing or of any width."""

    ids: Any
    """A list, or an array of numpy or Arrow."""
    texts: Sequence[Any]
    vectors: Any
    """A 2-D array, or a sequence of arrays and None."""


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What the user named: a table or collection, its column of texts, and its column of vectors."""

    table: str | None = None
    texts: str | None = None
    vectors: str | None = None

    def table_of(self, there: Sequence[str], what: str, where: str) -> str:
        """Return the table or collection to read."""
        return _one_of(there, self.table, what, where, "--table")

    def texts_of(self, there: Sequence[str], where: str) -> str:
        """Return the column of texts: the one that is named, one with a usual name, or the only one."""
        if self.texts is not None and self.texts not in there:
            raise BadInput(f"{where} has no column of texts {self.texts!r}; pass one of: {_listed(there)}")
        usual = [name for name in ((self.texts,) if self.texts else _TEXT_NAMES) if name in there]
        if usual or len(there) == 1:
            return (usual or list(there))[0]
        if not there:
            raise BadInput(f"{where} has no column of texts; only an index with its texts can be read")
        what = f"{where} may hold texts in several columns"
        raise BadInput(f"{what}; name one with --text-column: {_listed(there)}")

    def vectors_of(self, there: Sequence[str], what: str, where: str) -> str:
        """Return the column of vectors."""
        return _one_of(there, self.vectors, what, where, "--vector-column")


class IndexReader:
    """An index that is only read, which other software may have written.

    Rows that can't be used are left out. A database has a class that scans them, or takes some of them.
    """

    where: str
    """Its folder or address, without secrets."""
    count: int
    """The number of rows; of a very large table in Postgres, the server's estimate."""
    width: int
    """The number of dimensions of its vectors."""
    metric: Metric
    """What the index searches by; cosine if it does not say."""
    counts: _RowCounts
    """What the last `rows` read and left out."""
    _client: Any = None
    """What is closed with the reader."""

    def __init__(
        self, where: str, *, count: int, width: int, metric: Metric, secret: str | None = None
    ) -> None:
        """`secret` is left out of every message."""
        if not count:
            raise BadInput(f"{where} is empty; fill it first")
        self.where, self.count, self.width, self.metric = where, count, width, metric
        self._secret = secret
        self.counts = _RowCounts()

    @contextmanager
    def _opening(self, where: str, *, hide: str | None = None) -> Iterator[None]:
        """Explain the errors of a client, as `_explained` does; after any error it is closed."""
        try:
            with _explained(where, hide=hide):
                yield
        except BaseException:
            self.close()
            raise

    def rows(
        self, sample: int | None = None, seed: int = 0, *, after: _RowCounts | None = None
    ) -> Iterator[_RowBatch]:
        """Yield all rows, or up to `sample` rows drawn uniformly, a batch at a time.

        A sample comes in storage order or a random one: shuffle it where the order matters. Of all rows,
        those that an interrupted call counted in `after` are skipped.
        """
        self.counts = _RowCounts() if after is None else after
        found = self.counts.read - self.counts.left_out
        with _explained(self.where, hide=self._secret):
            source = self._rest() if sample is None or sample >= self.count else self._draw(sample, seed)
            for raw in source:
                batch = self._kept(raw)
                if sample is not None and found + len(batch.texts) > sample:
                    batch = _part(batch, np.arange(sample - found))
                found += len(batch.texts)
                if batch.texts:
                    yield batch
                if found == sample:
                    return
            if (now := self._count()) != self.count:
                what = f"{self.where} changed while it was read ({self.count:,} rows before, {now:,} now)"
                raise BadInput(f"{what}; run again while nothing writes to it")
        if not found:
            what = f"{self.where} has no row with a text and a vector ({self.counts.says().rstrip('.')})"
            raise BadInput(f"{what}; fill it, or name other columns with --text-column and --vector-column")

    def close(self) -> None:
        """Close files and connections."""
        if self._client is not None:
            self._client.close()

    def _count(self) -> int:
        """Count the rows again; a reader that sees one version of them does not need to."""
        return self.count

    def _rest(self) -> Iterator[_RawRows]:
        """Yield every row that is not counted yet."""
        if not self.counts.read:
            yield from self._scan(0)
            return
        rows = self._scan(self.counts.read - 1)
        first = next(rows, None)
        if first is None or _mark(first, _matrix(first.vectors, self.width)[0], 0) != self.counts.last:
            raise OtherTexts(f"{self.where} has changed since it was read; read it again from the start")
        yield _RawRows(first.ids[1:], first.texts[1:], first.vectors[1:])
        yield from rows

    def _scan(self, first: int) -> Iterator[_RawRows]:
        """Yield every row from a position on, in an order that is the same until a row is written."""
        raise NotImplementedError

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        """Yield the rows at some positions from 0 to `count`; without positions, those with the ids there."""
        yield from _chosen_ids(self._id_pages(_IDS_AT_ONCE), places, self._fetch)

    def _id_pages(self, size: int) -> Iterator[Sequence[Any]]:
        """Yield all ids, `size` at a time."""
        raise NotImplementedError

    def _id_at(self, place: int) -> Any:
        """Return the id of the row at a position, without reading its vector."""
        return next(islice(chain.from_iterable(self._id_pages(_IDS_AT_ONCE)), place, None), None)

    def _fetch(self, ids: list[Any]) -> _RawRows:
        """Return the rows with these ids."""
        raise NotImplementedError

    @staticmethod
    def _known_metric(name: str, metrics: Mapping[str, Metric], where: str) -> Metric:
        """Return what the database calls `name`."""
        if name not in metrics:
            raise BadInput(f"{where} searches by {name}; only {', '.join(metrics)} are supported")
        return metrics[name]

    def _draw(self, sample: int, seed: int) -> Iterator[_RawRows]:
        """Yield rows drawn uniformly, each at most once; more of them if some can't be used."""
        rng, tried = np.random.default_rng(seed), np.empty(0, dtype=np.int64)
        for _ in range(_MOST_ROUNDS):
            wanted = sample - (self.counts.read - self.counts.left_out)
            if wanted <= 0 or len(tried) == self.count:
                return
            chosen = rng.choice(self.count, size=min(self.count, wanted + len(tried)), replace=False)
            new = chosen[~np.isin(chosen, tried)][:wanted]
            tried = np.concatenate([tried, new])
            yield from self._take(np.sort(new))

    def _kept(self, raw: _RawRows) -> _RowBatch:
        vectors, missing, other = _matrix(raw.vectors, self.width)
        batch = _RowBatch(texts=tuple(raw.texts), vectors=vectors, raw_ids=raw.ids)
        counts = self.counts
        if batch.texts:
            counts.read, counts.last = counts.read + len(batch.texts), _mark(raw, vectors, -1)
        if missing.any() or other.any() or not _all_readable(batch.texts) or not _all_usable(vectors):
            left = self._counted(batch, {"no_vector": missing, "other_width": other})
            batch = _part(batch, np.flatnonzero(left))
        if counts.other_width > max(1, _TOLERATED * counts.read):
            what = f"holds vectors of several widths ({self.width} and others)"
            raise BadInput(
                f"{self.where} {what}; name one column with --vector-column, or one table with --table"
            )
        counts._note(batch.vectors)
        return batch

    def _counted(self, batch: _RowBatch, bad: dict[str, Any]) -> _Mask:
        """Count each row that can't be used for one reason, and return those that can."""
        readable = [isinstance(text, str) and bool(text.strip()) for text in batch.texts]
        bad |= {
            "no_text": ~np.array(readable, dtype=bool),
            "zero": np.logical_not(batch.vectors.any(axis=1)),
            "not_finite": np.logical_not(np.isfinite(batch.vectors).all(axis=1)),
        }
        left = np.ones(len(batch.texts), dtype=bool)
        for name, rows in bad.items():
            setattr(self.counts, name, getattr(self.counts, name) + int((left & rows).sum()))
            left &= ~rows
        return left


def _mark(raw: _RawRows, vectors: Vectors, place: int) -> str:
    """Return a hash of one row, by which it is found again."""
    words = f"{raw.ids[place]}\0{raw.texts[place]}".encode("utf-8", "surrogatepass")
    return blake2b(words + vectors[place].tobytes(), digest_size=16).hexdigest()


def _all_readable(texts: Sequence[Any]) -> bool:
    """Whether all texts are strings with something in them."""
    return set(map(type, texts)) <= {str} and all(texts) and not any(map(str.isspace, texts))


def _all_usable(vectors: Vectors) -> bool:
    """Whether no vector is zero or has NaN or infinity; False also where only a closer look can tell."""
    flat = vectors.ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)) and vectors[:, :_LOOKED_AT].any(axis=1).all())


@cache
def _factors(count: int) -> NDArray[np.uint64]:
    """The odd factors of a hash of `count` words."""
    return np.random.default_rng(0).integers(1 << 63, size=count, dtype=np.uint64) * 2 + 1


def _part(batch: _RowBatch, places: _Places) -> _RowBatch:
    ids, texts = batch.ids, batch.texts
    return _RowBatch(
        texts=tuple(texts[place] for place in places),
        vectors=batch.vectors[places],
        raw_ids=[ids[place] for place in places],
    )


def _matrix(found: Any, width: int) -> tuple[Vectors, _Mask, _Mask]:
    """Return vectors as one array, and which of them are missing or of another width."""
    if isinstance(found, np.ndarray) and found.ndim == 2:
        widths = np.full(len(found), found.shape[1])
    else:
        widths = np.array([-1 if one is None else len(one) for one in found], dtype=np.int64)
    fits = widths == width
    with np.errstate(over="ignore"):
        if len(widths) and fits.all():
            return np.asarray(found, dtype=np.float32), ~fits, ~fits
        array = np.zeros((len(widths), width), dtype=np.float32)
        for place in np.flatnonzero(fits):
            array[place] = found[place]
    return array, widths < 0, (widths >= 0) & ~fits


@contextmanager
def _explained(where: str, *, hide: str | None = None) -> Iterator[None]:
    """Raise what a database's client raises as one sentence, without the secret `hide`."""
    try:
        yield
    except (TrundleError, GeneratorExit, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        reason = reason.replace(hide, "…") if hide else reason
        what = f"{where} can't be read ({reason.rstrip('.')})"
        raise BadInput(f"{what}; check that it is there and complete, then run again") from None


def _import(module: str, feature: str, extra: str) -> Any:
    """Import a database's client, which is an optional package."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(feature, extra) from error


def _fields(rows: Iterable[Mapping[str, Any] | None]) -> list[str]:
    """Return the names of the fields that hold strings in some rows, inner ones as `outer.inner`."""
    found: dict[str, None] = {}
    for row in rows:
        for name, value in (row or {}).items():
            if isinstance(value, str):
                found[name] = None
            elif isinstance(value, Mapping):
                found |= dict.fromkeys(f"{name}.{inner}" for inner in _fields([value]))
    return list(found)


def _field(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field that `_fields` named."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    below = row.get(outer)
    return _field(below, inner) if inner and isinstance(below, Mapping) else None


def _one_of(there: Sequence[str], wanted: str | None, what: str, where: str, flag: str) -> str:
    """Return the table, collection or column that is named, or the only one there is."""
    if wanted is not None and wanted not in there:
        raise BadInput(f"{where} has no {what} {wanted!r}; pass one of: {_listed(there)}")
    if wanted is not None or len(there) == 1:
        return wanted or there[0]
    if not there:
        raise BadInput(f"{where} has no {what}; fill it first, or name another place")
    raise BadInput(f"{where} has several {what}s ({_listed(there)}); name one with {flag}")


def _listed(names: Sequence[str], most: int = 20) -> str:
    """Return names in one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _chosen_ids(
    pages: Iterator[Sequence[Any]], places: _Places, fetch: Callable[[list[Any]], _RawRows]
) -> Iterator[_RawRows]:
    """Yield the rows at some positions of a database that lists its ids but has no positions."""
    chosen: list[Any] = []
    first = 0
    for page in pages:
        low, high = np.searchsorted(places, [first, first + len(page)])
        chosen += [page[place - first] for place in places[low:high].tolist()]
        first += len(page)
        if high == len(places):
            break
    for start in range(0, len(chosen), _BATCH_ROWS):
        yield fetch(chosen[start : start + _BATCH_ROWS])


@dataclass(frozen=True, kw_only=True)
class SearchedRows:
    """Some rows of an index that are searched, and how it compares vectors."""

    index: str
    texts: Sequence[str]
    vectors: Vectors
    total: int
    """The number of all rows of the index."""
    similarity: Metric = "cosine"


def draw_sample(reader: IndexReader, count: int, seed: int) -> SearchedRows:
    """Return up to `count` rows sampled uniformly, in random order."""
    batches = list(reader.rows(count, seed))
    vectors = np.concatenate([batch.vectors for batch in batches])
    texts = [text for batch in batches for text in batch.texts]
    order = np.random.default_rng(seed).permutation(len(texts))
    return SearchedRows(
        index=reader.where,
        texts=[texts[place] for place in order],
        vectors=vectors[order],
        total=reader.count,
        similarity=reader.metric,
    )

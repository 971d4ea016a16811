"""Which table and columns of a database are an index: found by their types and names, or said by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trundle.errors import BadInput

TEXT_NAMES = ("text", "content", "document", "body", "chunk", "page_content", "passage")

COLUMNS = """
SELECT n.nspname, c.relname, a.attname, t.typname
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
WHERE c.relkind IN ('r', 'p', 'm') AND a.attnum > 0 AND NOT a.attisdropped
  AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND t.typname IN ('vector', 'halfvec', 'text', 'varchar', 'bpchar')
ORDER BY n.nspname, c.relname, a.attnum
"""
"""Every column that could be a vector or a text."""

Column = tuple[str, str, str, str]
VECTORS = ("vector", "halfvec")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where texts and vectors lie in a database."""

    schema: str
    table: str
    text: str
    vector: str


def find_place(
    columns: Sequence[Column], *, table: str | None, text: str | None, vector: str | None
) -> Place:
    """The one table that holds texts and vectors; where there are several, the user must say which."""
    kept = [each for each in columns if table is None or table in (each[1], f"{each[0]}.{each[1]}")]
    if table is not None and not kept:
        known = _listed(sorted({each[1] for each in columns if each[3] in VECTORS}))
        raise BadInput(f"there is no table {table!r} with texts or vectors; give one of: {known}")
    found = [each for each in kept if each[3] in VECTORS and vector in (None, each[2])]
    if not found:
        what = f"column {vector!r} with vectors" if vector else "column of pgvector's type vector or halfvec"
        raise BadInput(f"there is no {what}; name the table and its column with --table and --vectors")
    tables = sorted({(each[0], each[1]) for each in found})
    if len(tables) > 1:
        names = _listed([f"{schema}.{name}" for schema, name in tables])
        raise BadInput(f"several tables hold vectors ({names}); name one with --table")
    if len(found) > 1:
        names = _listed([each[2] for each in found])
        raise BadInput(f"{tables[0][1]} has several columns of vectors ({names}); name one with --vectors")
    schema, name = tables[0]
    texts = [each[2] for each in kept if each[:2] == (schema, name) and each[3] not in VECTORS]
    return Place(schema=schema, table=name, text=_text_column(texts, text, name), vector=found[0][2])


def _text_column(there: Sequence[str], wanted: str | None, table: str) -> str:
    if wanted is not None:
        if wanted not in there:
            raise BadInput(f"{table} has no column of texts {wanted!r}; give one of: {_listed(there)}")
        return wanted
    usual = [name for name in TEXT_NAMES if name in there]
    if usual or len(there) == 1:
        return (usual or list(there))[0]
    raise BadInput(
        f"{table} does not say which column holds the texts; name it with --texts: {_listed(there)}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"

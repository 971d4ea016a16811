"""An index of vectors that a small model searches though a large one built it.

contract    what every store can do              codes       vectors in fewer bits, and scans over them
embedded    a folder: sqlite, flat files, usearch graph      the graph over a large set
postgres    a table in Postgres with pgvector    foreign     a table that somebody else filled
link        a connection that is made again      tables      which table and columns are an index
building    texts into a store                   check       how far a student agrees with what is stored
opening     a folder or an address as a store
"""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.index.building import build_index as build_index
    from trundle.index.check import Check as Check
    from trundle.index.check import check_index as check_index
    from trundle.index.contract import Found as Found
    from trundle.index.contract import Store as Store
    from trundle.index.foreign import open_table as open_table
    from trundle.index.graph import open_graph as open_graph
    from trundle.index.graph import write_graph as write_graph
    from trundle.index.opening import create_store as create_store
    from trundle.index.opening import open_readable as open_readable
    from trundle.index.opening import open_store as open_store
    from trundle.index.postgres import PostgresStore as PostgresStore

__getattr__ = lazy(
    __name__,
    {
        "Check": "check",
        "Found": "contract",
        "Store": "contract",
        "build_index": "building",
        "check_index": "check",
        "open_graph": "graph",
        "write_graph": "graph",
        "create_store": "opening",
        "open_readable": "opening",
        "open_store": "opening",
        "open_table": "foreign",
        "PostgresStore": "postgres",
    },
)

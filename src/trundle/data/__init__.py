"""Reading texts and examples, drawing samples of them, and finding real text on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.data.environment import Documented as Documented
    from trundle.data.environment import environment_pairs as environment_pairs
    from trundle.data.environment import split_by_package as split_by_package
    from trundle.data.sampling import Fingerprinted as Fingerprinted
    from trundle.data.sampling import distinct as distinct
    from trundle.data.sampling import fingerprint as fingerprint
    from trundle.data.sampling import held_out as held_out
    from trundle.data.sampling import sample as sample
    from trundle.data.sampling import split as split
    from trundle.data.source import Row as Row
    from trundle.data.source import Source as Source
    from trundle.data.source import parse_source as parse_source
    from trundle.data.source import read_rows as read_rows
    from trundle.data.texts import Kind as Kind
    from trundle.data.texts import Text as Text
    from trundle.data.texts import read_texts as read_texts
    from trundle.data.tuples import Example as Example
    from trundle.data.tuples import read_examples as read_examples

__getattr__ = lazy(
    __name__,
    {
        "Documented": "environment",
        "environment_pairs": "environment",
        "split_by_package": "environment",
        "Fingerprinted": "sampling",
        "distinct": "sampling",
        "fingerprint": "sampling",
        "held_out": "sampling",
        "sample": "sampling",
        "split": "sampling",
        "Row": "source",
        "Source": "source",
        "parse_source": "source",
        "read_rows": "source",
        "Kind": "texts",
        "Text": "texts",
        "read_texts": "texts",
        "Example": "tuples",
        "read_examples": "tuples",
    },
)

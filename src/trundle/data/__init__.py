"""Reading texts and examples, drawing samples of them, and finding real text on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.data.augment import augmented as augmented
    from trundle.data.augment import check_augmentations as check_augmentations
    from trundle.data.corpus import Corpus as Corpus
    from trundle.data.corpus import read_corpus as read_corpus
    from trundle.data.digest import table_id as table_id
    from trundle.data.endpoint import endpoint_id as endpoint_id
    from trundle.data.endpoint import endpoint_teacher as endpoint_teacher
    from trundle.data.environment import Documented as Documented
    from trundle.data.environment import environment_pairs as environment_pairs
    from trundle.data.environment import split_by_package as split_by_package
    from trundle.data.labelled import LabelledRow as LabelledRow
    from trundle.data.labelled import read_labelled as read_labelled
    from trundle.data.labelling import build_targets as build_targets
    from trundle.data.labelling import encode_by_role as encode_by_role
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
    from trundle.data.targets import Targets as Targets
    from trundle.data.targets import find_targets as find_targets
    from trundle.data.targets import finished_manifest as finished_manifest
    from trundle.data.targets import is_store as is_store
    from trundle.data.targets import open_share as open_share
    from trundle.data.targets import open_targets as open_targets
    from trundle.data.targets import store_id as store_id
    from trundle.data.targets import wait_for_targets as wait_for_targets
    from trundle.data.text_pairs import DROPOUT as DROPOUT
    from trundle.data.text_pairs import pairs_from_texts as pairs_from_texts
    from trundle.data.texts import Kind as Kind
    from trundle.data.texts import Text as Text
    from trundle.data.texts import read_texts as read_texts
    from trundle.data.tuples import Example as Example
    from trundle.data.tuples import read_examples as read_examples
    from trundle.data.unseen import unseen_texts as unseen_texts
    from trundle.data.vector_table import TableTeacher as TableTeacher
    from trundle.data.vector_table import teacher_from_parquet as teacher_from_parquet

__getattr__ = lazy(
    __name__,
    {
        "augmented": "augment",
        "check_augmentations": "augment",
        "Corpus": "corpus",
        "read_corpus": "corpus",
        "endpoint_id": "endpoint",
        "endpoint_teacher": "endpoint",
        "Documented": "environment",
        "environment_pairs": "environment",
        "split_by_package": "environment",
        "build_targets": "labelling",
        "encode_by_role": "labelling",
        "LabelledRow": "labelled",
        "read_labelled": "labelled",
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
        "Targets": "targets",
        "find_targets": "targets",
        "finished_manifest": "targets",
        "is_store": "targets",
        "store_id": "targets",
        "open_share": "targets",
        "open_targets": "targets",
        "wait_for_targets": "targets",
        "table_id": "digest",
        "Kind": "texts",
        "Text": "texts",
        "read_texts": "texts",
        "Example": "tuples",
        "read_examples": "tuples",
        "unseen_texts": "unseen",
        "TableTeacher": "vector_table",
        "teacher_from_parquet": "vector_table",
        "DROPOUT": "text_pairs",
        "pairs_from_texts": "text_pairs",
    },
)

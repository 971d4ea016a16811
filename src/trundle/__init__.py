"""trundle: shrink any text-embedding model, keep your index.

from trundle import compress, read_corpus, read_recipe

compress("path/to/model", read_recipe("half"), output="small", corpus=read_corpus(["texts.txt"], seed=0))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trundle.data.corpus import read_corpus as read_corpus
    from trundle.export.exporting import export_model as export_model
    from trundle.model.load import load as load
    from trundle.pipeline.run import Request as Request
    from trundle.recipe import make_recipe as make_recipe
    from trundle.recipe import parse_recipe as parse_recipe
    from trundle.recipe import read_recipe as read_recipe
    from trundle.runtime.encoder import Encoder as Encoder
    from trundle.search.compressing import compress as compress
    from trundle.search.search import compress_to_budget as compress_to_budget
    from trundle.search.training_source import TeacherOptions as TeacherOptions

_HOMES = {
    "Encoder": "trundle.runtime.encoder",
    "Request": "trundle.pipeline.run",
    "TeacherOptions": "trundle.search.training_source",
    "compress": "trundle.search.compressing",
    "compress_to_budget": "trundle.search.search",
    "export_model": "trundle.export.exporting",
    "load": "trundle.model.load",
    "make_recipe": "trundle.recipe",
    "parse_recipe": "trundle.recipe",
    "read_corpus": "trundle.data.corpus",
    "read_recipe": "trundle.recipe",
}
__all__ = [
    "Encoder",
    "Request",
    "TeacherOptions",
    "compress",
    "compress_to_budget",
    "export_model",
    "load",
    "make_recipe",
    "parse_recipe",
    "read_corpus",
    "read_recipe",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import trundle` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trundle' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""trundle: shrink any text-embedding model, keep your index.

import trundle

result = trundle.compress("all-mpnet-base-v2", budget="12MB", texts="my-texts/")
result.model.encode_query("how do I open a file?")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trundle.errors import MissingExtra
from trundle.errors import TrundleError as TrundleError

if TYPE_CHECKING:
    from trundle.api import SmallModel as SmallModel
    from trundle.api import check_index as check_index
    from trundle.api import compress as compress
    from trundle.api import distill as distill
    from trundle.api import evaluate_model as evaluate_model
    from trundle.api import export_model as export_model
    from trundle.api import narrow as narrow
    from trundle.api import prune_layers as prune_layers
    from trundle.api import prune_vocabulary as prune_vocabulary
    from trundle.api import prune_weights as prune_weights
    from trundle.data.corpus import read_corpus as read_corpus
    from trundle.model.load import load as load
    from trundle.recipe import make_recipe as make_recipe
    from trundle.recipe import parse_recipe as parse_recipe
    from trundle.recipe import read_recipe as read_recipe
    from trundle.runtime.encoder import Encoder as Encoder

_API = ["SmallModel", "check_index", "compress", "distill", "evaluate_model", "export_model", "narrow"]
_HOMES = {
    "Encoder": "trundle.runtime.encoder",
    "load": "trundle.model.load",
    "read_corpus": "trundle.data.corpus",
    **dict.fromkeys(("make_recipe", "parse_recipe", "read_recipe"), "trundle.recipe"),
    **dict.fromkeys((*_API, "prune_layers", "prune_vocabulary", "prune_weights"), "trundle.api"),
}
__all__ = ["TrundleError", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import trundle` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trundle' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise MissingExtra.explain(error, f"trundle.{name}") from error

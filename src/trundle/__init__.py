"""trundle: shrink any text-embedding model, keep your index.

from trundle import compress, read_corpus, read_recipe

compress("path/to/model", read_recipe("half"), output="small", corpus=read_corpus(["texts.txt"], seed=0))
"""

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.data.corpus import read_corpus as read_corpus
    from trundle.model.loading import load as load
    from trundle.pipeline import compress as compress
    from trundle.recipe import read_recipe as read_recipe

__all__ = ["compress", "load", "read_corpus", "read_recipe"]

__getattr__ = lazy(
    __name__,
    {
        "compress": "pipeline",
        "load": "model.loading",
        "read_corpus": "data.corpus",
        "read_recipe": "recipe",
    },
)

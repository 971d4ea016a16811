"""How token states become one vector, and what a decoder needs for it: an end token to read the whole text from.

A decoder's tokenizer usually ends a text with nothing, so its last token is some piece of a word. For last-token pooling the
tokenizer is changed to add its end token itself, which every library that opens the folder then does as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import processors
from transformers import AutoTokenizer

from trundle.errors import BadModel
from trundle.model.surgery import with_modules

PoolingMode = Literal["mean", "weightedmean", "last", "cls"]
LIBRARY_NAMES = {"last": "lasttoken"}
PROBES = ("a", "one two three")


def with_pooling(
    model: SentenceTransformer, mode: PoolingMode | None = None, *, include_prompt: bool | None = None
) -> SentenceTransformer:
    """The model pooled in another way, as it was where nothing is said.

    With `last`, texts end in the tokenizer's end token from now on. Without `include_prompt`, a prompt is read but its
    tokens don't count.
    """
    modules = list(model)
    places = [place for place, module in enumerate(modules) if isinstance(module, Pooling)]
    if len(places) != 1 or (mode is not None and not isinstance(modules[places[0]].pooling_mode, str)):
        raise BadModel(
            "the model does not pool in one single way, so it can't be changed; leave pooling: keep"
        )
    old = modules[places[0]]
    modules[places[0]] = Pooling(
        old.embedding_dimension,
        old.pooling_mode if mode is None else LIBRARY_NAMES.get(mode, mode),
        include_prompt=old.include_prompt if include_prompt is None else include_prompt,
    )
    if mode == "last":
        modules[0] = copy.copy(modules[0])
        modules[0].processor = ending_tokenizer(model.tokenizer)
    return with_modules(model, modules)


def ending_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer that ends every text with a special token, as it was if it does so already."""
    if _ends_well(tokenizer, tokenizer.all_special_ids):
        return tokenizer
    if tokenizer.eos_token is None:
        raise BadModel(
            "the tokenizer has no end token for last-token pooling; set eos_token in tokenizer_config.json, "
            "or choose another pooling"
        )
    ending = copy.deepcopy(tokenizer)
    end, backend = f"{tokenizer.eos_token}:0", ending.backend_tokenizer
    adding = processors.TemplateProcessing(
        single=f"$A:0 {end}",
        pair=f"$A:0 {end} $B:1 {tokenizer.eos_token}:1",
        special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)],
    )
    before = backend.post_processor
    backend.post_processor = adding if before is None else processors.Sequence([before, adding])
    with TemporaryDirectory() as folder:
        ending.save_pretrained(folder)
        reopened = AutoTokenizer.from_pretrained(folder)
    if not _ends_well(reopened, [tokenizer.eos_token_id]):
        raise BadModel(
            f"a {type(tokenizer).__name__} does not keep an added end token when it is saved; choose another pooling"
        )
    return reopened


def _ends_well(tokenizer: Any, ends: Sequence[int]) -> bool:
    return all(ids and ids[-1] in ends for ids in tokenizer(list(PROBES))["input_ids"])

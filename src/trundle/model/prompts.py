"""Which prompt a model puts before a text of a kind: the same choice sentence-transformers makes when encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from trundle.errors import BadModel

Role = Literal["text", "query", "document"]
DOCUMENT_NAMES = ("document", "passage", "corpus")


def prompts_by_role(model: SentenceTransformer) -> dict[Role, str]:
    """The prompt for each of the roles text, query and document; empty where there is none."""
    prompts = model.prompts
    default = prompts.get(model.default_prompt_name or "") or ""
    document = next((prompts[name] for name in DOCUMENT_NAMES if name in prompts), default)
    return {"text": default, "query": prompts.get("query", default) or "", "document": document or ""}


def pools_prompts(model: SentenceTransformer) -> bool:
    """Whether a prompt is for this model nothing but the beginning of the text."""
    return not any(isinstance(module, Pooling) and not module.include_prompt for module in model)


def check_prompts_are_pooled(model: SentenceTransformer, prompts: Mapping[str, str | None]) -> None:
    """Refuse the one arrangement training can't imitate: prompts that are read but not pooled."""
    if not pools_prompts(model) and (any(prompts.values()) or any(prompts_by_role(model).values())):
        raise BadModel(
            "the model leaves its prompts out of pooling, which align can't train; set include_prompt to true"
        )

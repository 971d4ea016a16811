"""Two models in one folder: queries go to the student, documents to the teacher (a sentence-transformers Router).

`encode_query` and `encode_document` choose the route by themselves, and so does whatever is built on them. Plain `encode`
goes the teacher's way, as in an index. What this is not: it trains nothing and checks no closeness.
"""

from __future__ import annotations

from typing import cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Module, Router
from torch import nn

from trundle.errors import BadInput
from trundle.model.prompts import prompts_by_role

TEXT_PROMPT = "text"


def check_pairable(student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    """Refuse two models whose vectors can't be compared."""
    ours, theirs = student.get_embedding_dimension(), teacher.get_embedding_dimension()
    if ours != theirs:
        raise BadInput(
            f"the student's vectors are {ours} wide and the teacher's {theirs}, so they make no pair; "
            "bring the student into the teacher's space with trundle align"
        )


def paired(student: SentenceTransformer, teacher: SentenceTransformer) -> SentenceTransformer:
    """One model of both; it shares its weights with them."""
    check_pairable(student, teacher)
    prompts, default = _prompts(student, teacher)
    router = Router.for_query_document(
        query_modules=cast("list[Module]", list(student)),
        document_modules=cast("list[Module]", list(teacher)),
    )
    return SentenceTransformer(
        modules=[router],
        device=str(student.device),
        prompts=prompts,
        default_prompt_name=default,
        similarity_fn_name=teacher.similarity_fn_name,
    ).eval()


def _prompts(student: SentenceTransformer, teacher: SentenceTransformer) -> tuple[dict[str, str], str | None]:
    """The prompts of both by role, the teacher's other ones, and the name of the one that plain `encode` uses."""
    theirs = prompts_by_role(teacher)
    prompts = {name: prompt or "" for name, prompt in teacher.prompts.items()}
    prompts |= {"query": prompts_by_role(student)["query"], "document": theirs["document"]}
    default = teacher.default_prompt_name
    if default is not None and prompts.get(default) != theirs["text"]:
        default = TEXT_PROMPT
        prompts[default] = theirs["text"]
    return prompts, default


def is_pair(model: SentenceTransformer) -> bool:
    """Whether the model is two, one for queries and one for documents."""
    router = model[0] if len(model) == 1 else None
    return isinstance(router, Router) and {"query", "document"} <= set(router.sub_modules)


def one_route(both: SentenceTransformer, route: str) -> SentenceTransformer:
    """The student or the teacher of a pair as a model of its own; it shares its weights with the pair."""
    router = both[0]
    if not isinstance(router, Router) or route not in router.sub_modules:
        raise BadInput(f"the model has no route {route!r}; give a folder that trundle pair wrote")
    prompts = prompts_by_role(both)
    own = {name: prompt or "" for name, prompt in both.prompts.items()} if route == "document" else {}
    kept = {**own, "query": prompts["query"], "document": prompts["document"]}
    return SentenceTransformer(
        modules=list(cast("nn.Sequential", router.sub_modules[route])),
        device=str(both.device),
        prompts=kept,
        default_prompt_name=both.default_prompt_name if route == "document" else None,
        similarity_fn_name=both.similarity_fn_name,
    ).eval()

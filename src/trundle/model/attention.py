"""Which tokens see which: a decoder may be made to look both ways, by an entry of its config that transformers reads."""

from __future__ import annotations

import copy

import torch
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedModel

from trundle.errors import BadModel
from trundle.model.layout import layout_of
from trundle.model.modes import dropping
from trundle.model.surgery import Cut, cut_backbone, transformer_of, with_modules

ENTRY = "is_causal"
PROBE = 6


def with_both_ways(model: SentenceTransformer) -> SentenceTransformer:
    """A copy of a decoder in which every token sees the whole text. The saved config says so to whoever opens it."""
    transformer = transformer_of(model)
    family = layout_of(transformer.model).family
    if not family.causal:
        raise BadModel(f"a {family.name} model looks both ways already; leave attention: keep")
    twin = copy.deepcopy(model)
    backbone = transformer_of(twin).model
    setattr(backbone.config, ENTRY, False)
    # Built anew, since blocks remember from their construction which way they look.
    rebuilt = cut_backbone(backbone, Cut())
    if not looks_both_ways(rebuilt):
        raise BadModel(
            f"a {family.name} model can't be made to look both ways by its config alone; leave attention: keep"
        )
    transformer_of(twin).model = rebuilt
    return with_modules(model, list(twin))


def looks_both_ways(backbone: PreTrainedModel) -> bool:
    """Whether the first token's state depends on the last token, tried out with and without padding."""
    one = torch.ones(2, PROBE, dtype=torch.long, device=backbone.device)
    other = one.clone()
    other[:, -2] = 0
    padded = torch.ones_like(one)
    padded[:, -1] = 0
    with torch.no_grad(), dropping(backbone, False):
        seen = [
            (
                backbone(input_ids=one, attention_mask=mask).last_hidden_state[:, 0]
                - backbone(input_ids=other, attention_mask=mask).last_hidden_state[:, 0]
            ).any()
            for mask in (torch.ones_like(one), padded)
        ]
    return all(bool(answer) for answer in seen)

"""The arithmetic of the layer-loss curve: pooling a state, the loss of a layer, and which layers to cut to.

What this is not: it knows no model. Tensors in, tensors and numbers out.

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

SCALE = 20.0
"""What cosines are multiplied by before the softmax."""

WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda places, count: (places > 0) / count,
    "weightedmean": lambda places, count: 2 * places / (count * (count + 1)),
    "mean_sqrt_len_tokens": lambda places, count: (places > 0) / count.sqrt(),
    "lasttoken": lambda places, count: (places == count).float(),
    "cls": lambda places, _count: (places == 1).float(),
}
"""How much each token counts, given its place 1..n among the pooled tokens of its text (0: not pooled) and n.

Places count pooled tokens only, on whichever side the padding is. sentence-transformers' weighted mean counts them from
the first token of the text, prompt included, so with a prompt of 10 tokens left out of pooling its weights are 11, 12, …
where these are 1, 2, …: the flatter the longer the prompt. Without a prompt both are the same, save that
its version 6.0 also counts left padding.
"""
MAXIMUM = "max"
POOLINGS = (*WEIGHTS, MAXIMUM)
SHALLOW = 10
"""One of so many layers is too few to have computed much."""


def token_weights(pooled: Tensor, mode: str) -> Tensor:
    """The weight of every token, from a mask (texts × tokens) of the tokens that are pooled."""
    places = (pooled.cumsum(dim=1) * pooled).float()
    return WEIGHTS[mode](places, pooled.sum(dim=1, keepdim=True).float()).float()


def pool(states: Tensor, pooled: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    """One vector a text from states (texts × tokens × width), in full precision; no weights: the maximum."""
    states = states.float()
    parts = []
    for weight in weights:
        if weight is None:
            parts.append(states.masked_fill(pooled[..., None] == 0, -torch.inf).amax(dim=1))
        else:
            parts.append(torch.bmm(weight[:, None, :], states)[:, 0])
    return torch.cat(parts, dim=-1)


def layer_losses(queries: Tensor, candidates: Tensor, scale: float = SCALE) -> Tensor:
    """The mean loss of each layer, from vectors of all layers (layers × texts × width).

    Cross-entropy over cosine × scale. Candidate i answers query i; all the others are wrong: the answers to the other
    queries, and whatever follows them.
    """
    queries, candidates = (functional.normalize(part.float(), dim=-1) for part in (queries, candidates))
    scores = scale * queries @ candidates.transpose(1, 2)
    layers, count, _ = scores.shape
    right = torch.arange(count, device=scores.device).repeat(layers)
    losses = functional.cross_entropy(scores.flatten(0, 1), right, reduction="none")
    return losses.view(layers, count).mean(dim=1)


def pick_layers(losses: Sequence[float]) -> tuple[int | None, int]:
    """How many layers *small* and *large* keep: the lowest loss in the lower and in the upper half of the model.

    Plain minima; of equal ones the fewer layers. A model of one layer has no lower half.
    """
    middle = len(losses) // 2

    def lowest(first: int, last: int) -> int:
        return min(range(first, last + 1), key=lambda layers: losses[layers - 1])

    return (lowest(1, middle) if middle else None), lowest(middle + 1, len(losses))


def deeper_dip(losses: Sequence[float]) -> int | None:
    """Where *small* keeps less than a tenth of the layers: the lowest dip of the curve beyond, up to the middle.

    The first layers have computed next to nothing, and a low loss there is that of a bag of words: it does not promise what
    training makes of such a model. None where *small* is no such case, or there is no other dip.
    """
    small, middle = pick_layers(losses)[0], len(losses) // 2
    if small is None or SHALLOW * small >= len(losses):
        return None
    first = -(-len(losses) // SHALLOW)
    dips = [
        layers
        for layers in range(max(first, 2), middle + 1)
        if losses[layers - 2] > losses[layers - 1] <= losses[layers]
    ]
    return min(dips, key=lambda layers: losses[layers - 1], default=None)

"""The layer-loss curve of a model: how well each of its layers would do as the last one, before any training (L³Prune).

One forward pass gives the loss of all layers at once. Each state is pooled as its block gives it, by a hook, and then
forgotten, so the pass needs hardly more memory than plain encoding. The final norm of a pre-norm model is applied to what
*every* block gives, the last one included, which is before the model's own use of it: nothing is normed twice. Instruction
tokens (the model's prompts) are read but not pooled, save by a model that pools its first token, which stands before them.

What this is not: it trains nothing, and a Dense layer after pooling, which was made for the last layer, plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.nn import functional

from trundle.data.examples import Example
from trundle.data.sampling import distinct, sample
from trundle.embedder import check_texts
from trundle.errors import BadInput, BadModel
from trundle.methods.contract import LONGEST
from trundle.model.encode import dropping, multiplies_bf16
from trundle.model.heads import prompts_by_role
from trundle.model.layout import layout_of
from trundle.model.surgery import transformer_of
from trundle.progress import SILENT, Progress

_SCALE = 20.0
"""What cosines are multiplied by before the softmax."""

_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
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
_MAXIMUM = "max"
_POOLINGS = (*_WEIGHTS, _MAXIMUM)
_SHALLOW = 10
"""One of so many layers is too few to have computed much."""


def _token_weights(pooled: Tensor, mode: str) -> Tensor:
    """The weight of every token, from a mask (texts × tokens) of the tokens that are pooled."""
    places = (pooled.cumsum(dim=1) * pooled).float()
    return _WEIGHTS[mode](places, pooled.sum(dim=1, keepdim=True).float()).float()


def _pool(states: Tensor, pooled: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    """One vector a text from states (texts × tokens × width), in full precision; no weights: the maximum."""
    states = states.float()
    parts = []
    for weight in weights:
        if weight is None:
            parts.append(states.masked_fill(pooled[..., None] == 0, -torch.inf).amax(dim=1))
        else:
            parts.append(torch.bmm(weight[:, None, :], states)[:, 0])
    return torch.cat(parts, dim=-1)


def _layer_losses(queries: Tensor, candidates: Tensor, scale: float = _SCALE) -> Tensor:
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


def _pick_layers(losses: Sequence[float]) -> tuple[int | None, int]:
    """How many layers *small* and *large* keep: the lowest loss in the lower and in the upper half of the model.

    Plain minima; of equal ones the fewer layers. A model of one layer has no lower half.
    """
    middle = len(losses) // 2

    def lowest(first: int, last: int) -> int:
        return min(range(first, last + 1), key=lambda layers: losses[layers - 1])

    return (lowest(1, middle) if middle else None), lowest(middle + 1, len(losses))


def _deeper_dip(losses: Sequence[float]) -> int | None:
    """Where *small* keeps less than a tenth of the layers: the lowest dip of the curve beyond, up to the middle.

    The first layers have computed next to nothing, and a low loss there is that of a bag of words: it does not promise what
    training makes of such a model. None where *small* is no such case, or there is no other dip.
    """
    small, middle = _pick_layers(losses)[0], len(losses) // 2
    if small is None or _SHALLOW * small >= len(losses):
        return None
    first = -(-len(losses) // _SHALLOW)
    dips = [
        layers
        for layers in range(max(first, 2), middle + 1)
        if losses[layers - 2] > losses[layers - 1] <= losses[layers]
    ]
    return min(dips, key=lambda layers: losses[layers - 1], default=None)


_TUPLES = 1280
_BATCH = 64
"""Tuples whose texts compete with each other."""
_TEXTS_AT_ONCE = 32
_ROUGH = 128
"""With fewer tuples than this the curve is not to be trusted."""


@dataclass(frozen=True, kw_only=True)
class LayerCurve:
    """The mean loss of a model that ends after its first, second, … layer."""

    losses: tuple[float, ...]
    tuples: int

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.losses)

    @property
    def small(self) -> int | None:
        """How many layers the small variant keeps; None for a model of one layer."""
        return _pick_layers(self.losses)[0]

    @property
    def large(self) -> int:
        """How many layers the large variant keeps; all of them means that there is nothing to cut."""
        return _pick_layers(self.losses)[1]

    @property
    def advice(self) -> str | None:
        """Where *small* is not what it seems."""
        deeper = _deeper_dip(self.losses)
        if deeper is None:
            return None
        return (
            f"small keeps {self.small} of {self.layers} layers, where next to nothing has been computed, so its low loss "
            f"promises little; the curve dips again at {deeper}: try keep {deeper} beside it"
        )

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "losses": [round(loss, 6) for loss in self.losses],
            "tuples": self.tuples,
            "small": self.small,
            "large": self.large,
        }


def measure_curve(
    model: SentenceTransformer,
    examples: Iterator[Example] | Sequence[Example],
    *,
    tuples: int = _TUPLES,
    scale: float = _SCALE,
    seed: int = 0,
    progress: Progress = SILENT,
) -> LayerCurve:
    """Draw tuples and take the loss of every layer on them, in one pass.

    Where the machine multiplies bf16 by hardware the model runs in it, many times as fast; pooling and losses are taken in full
    precision, and differences between layers are far larger than what is lost.
    """
    drawn = _draw_tuples(examples, tuples, seed)
    if len(drawn) < _ROUGH:
        progress.say(f"the curve is drawn from {len(drawn)} tuples only; {_TUPLES:,} make it reliable")
    batches = np.array_split(np.arange(len(drawn)), -(-len(drawn) // _BATCH))
    total = torch.zeros(layout_of(transformer_of(model).model).layers, dtype=torch.float64)
    with progress.task("layer losses", len(drawn)) as advance:
        for numbers in batches:
            batch = [drawn[number] for number in numbers]
            losses_here = _batch_losses(model, batch, scale, bf16=multiplies_bf16(model.device))
            total += losses_here.cpu().double() * len(batch)
            advance(len(batch))
    losses = tuple((total / len(drawn)).tolist())
    if not np.isfinite(losses).all():
        layer = int(np.argmin(np.isfinite(losses))) + 1
        raise BadModel(f"the loss of layer {layer} is NaN or infinite; check the model's weights")
    return LayerCurve(losses=losses, tuples=len(drawn))


def _draw_tuples(examples: Iterator[Example] | Sequence[Example], count: int, seed: int) -> list[Example]:
    """Distinct tuples, those of one source together: a batch of one source is the harder one to tell apart."""
    different = distinct(examples, key=lambda example: f"{example.query}\0{example.positive}")
    drawn = sample(different, count, seed=seed)
    if len(drawn) < 2:
        raise BadInput(
            f"the layers are compared on tuples of query and positive, and there {'is only 1' if drawn else 'are none'} "
            f"to learn from; give at least 2, better {_TUPLES:,}, with --data"
        )
    shuffled = [drawn[number] for number in np.random.default_rng(seed).permutation(len(drawn))]
    return sorted(shuffled, key=lambda example: example.source)


def _batch_losses(
    model: SentenceTransformer, batch: Sequence[Example], scale: float = _SCALE, *, bf16: bool = False
) -> Tensor:
    """The loss of each layer on tuples that compete with each other."""
    prompts = prompts_by_role(model)
    documents = [example.positive for example in batch]
    documents += [negative for example in batch for negative in example.negatives]
    queries = _pooled_by_layer(model, [example.query for example in batch], prompts["query"], bf16=bf16)
    return _layer_losses(queries, _pooled_by_layer(model, documents, prompts["document"], bf16=bf16), scale)


def _pooled_by_layer(
    model: SentenceTransformer, texts: Sequence[str], prompt: str = "", *, bf16: bool = False
) -> Tensor:
    """What pooling gives after each layer (layers × texts × width), texts of similar length side by side."""
    check_texts(texts)
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    places = torch.empty(len(texts), dtype=torch.long)
    places[torch.tensor(order)] = torch.arange(len(texts))
    parts = [
        _pooled(model, [texts[number] for number in order[start : start + _TEXTS_AT_ONCE]], prompt, bf16=bf16)
        for start in range(0, len(texts), _TEXTS_AT_ONCE)
    ]
    return torch.cat(parts, dim=1)[:, places]


def _pooled(model: SentenceTransformer, texts: list[str], prompt: str, *, bf16: bool) -> Tensor:
    modes = _pooling_modes(model)
    features = _tokens_of(model, texts, prompt)
    pooled = _pooled_tokens(model, features, texts, skips_prompt="cls" not in modes)
    weights = [None if mode == _MAXIMUM else _token_weights(pooled, mode) for mode in modes]
    found: list[Tensor] = []

    device = model.device.type

    def keep(state: Tensor) -> None:
        with torch.autocast(device, enabled=False):
            found.append(_pool(state, pooled, weights))

    computing = torch.autocast(device, dtype=torch.bfloat16, enabled=bf16)
    with torch.inference_mode(), dropping(model, False), _tapped(model, keep), computing:
        model[0](features)
    return torch.stack(found)


@contextmanager
def _tapped(model: SentenceTransformer, keep: Any) -> Iterator[None]:
    """While the block runs, hand what each transformer block gives to `keep`, under the final norm if there is one."""
    backbone = transformer_of(model).model
    family = layout_of(backbone).family
    norm = nn.Identity() if family.final_norm is None else backbone.get_submodule(family.final_norm)

    def tap(_block: nn.Module, _inputs: Any, output: Any) -> None:
        keep(norm(output[0] if isinstance(output, tuple) else output))

    handles = [block.register_forward_hook(tap) for block in backbone.get_submodule(family.blocks).children()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pooling_modes(model: SentenceTransformer) -> tuple[str, ...]:
    """How the model pools."""
    found = next((module for module in model if isinstance(module, Pooling)), None)
    if found is None:
        raise BadModel("the model has no pooling module, so its layers can't be compared; give it one")
    modes = (found.pooling_mode,) if isinstance(found.pooling_mode, str) else tuple(found.pooling_mode)
    unknown = [mode for mode in modes if mode not in _POOLINGS]
    if unknown:
        raise BadModel(f"the pooling {unknown[0]!r} is not known here; use one of {', '.join(_POOLINGS)}")
    return modes


def _tokens_of(model: SentenceTransformer, texts: list[str], prompt: str = "") -> dict[str, Any]:
    """What the model takes for texts under a prompt, no longer than it can read."""
    limit = int(min(model.max_seq_length or LONGEST, LONGEST))
    features = model.preprocess(texts, prompt=prompt or None, max_length=limit)
    return {
        name: value.to(model.device) if torch.is_tensor(value) else value for name, value in features.items()
    }


def _pooled_tokens(
    model: SentenceTransformer, features: dict[str, Any], texts: Sequence[str], *, skips_prompt: bool
) -> Tensor:
    """Which tokens are pooled (texts × tokens): no padding, no instruction; a text without any is named."""
    real: Tensor = features["attention_mask"].long()
    places = real.cumsum(dim=1) * real
    skipped = int(features.get("prompt_length") or 0) if skips_prompt else 0
    pooled = (places > skipped).long()
    tokenizer = model.tokenizer
    special = torch.tensor(
        sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id}), device=real.device
    )
    empty = (pooled.bool() & ~torch.isin(features["input_ids"], special)).sum(dim=1) == 0
    if empty.any():
        text = texts[int(empty.int().argmax())]
        raise BadInput(
            f"the text {text[:60]!r} has nothing to pool beside the instruction before it; "
            "leave it out, or shorten the prompt if that fills all the model reads"
        )
    return pooled

"""The layer-loss curve: the loss of a model that ends after each of its layers, before training (L³Prune).

One forward pass computes the losses of all layers. A hook pools each block's output and discards it, so the
pass needs little more memory than encoding. The final norm of a pre-norm model is applied to the output of
every block. Prompts are pooled if the model pools them. Dense layers after pooling are ignored, because they
were trained for the last layer.

Also what each kind of cut would save, as `trundle inspect` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from torch.nn import functional

from trundle.data.examples import Example
from trundle.data.sampling import distinct, sample
from trundle.embedder import LONGEST, check_texts
from trundle.errors import BadInput, BadModel
from trundle.methods.contract import Given
from trundle.methods.depth import _SCALE
from trundle.methods.training import Prompts, prompts_by_file
from trundle.model.cost import Cost, cost, predict
from trundle.model.encode import dropping, multiplies_bf16
from trundle.model.heads import prompt_tokens
from trundle.model.layout import layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of
from trundle.progress import SILENT, Progress

_SHALLOW = 10
"""Fewer than one in this many layers is too few to have computed much."""
_TUPLES = 1280
_BATCH = 64
"""Tuples whose texts are each other's negatives."""
_TEXTS_AT_ONCE = 32
_ROUGH = 128
"""With fewer tuples than this the curve is not reliable."""


def _layer_losses(queries: Tensor, candidates: Tensor, scale: float = _SCALE) -> Tensor:
    """The mean loss of each layer (layers × texts × width); candidate i is the positive of query i."""
    queries, candidates = (functional.normalize(part.float(), dim=-1) for part in (queries, candidates))
    scores = scale * queries @ candidates.transpose(1, 2)
    layers, count, _ = scores.shape
    positives = torch.arange(count, device=scores.device).repeat(layers)
    losses = functional.cross_entropy(scores.flatten(0, 1), positives, reduction="none")
    return losses.view(layers, count).mean(dim=1)


def _pick_layers(losses: Sequence[float]) -> tuple[int | None, int]:
    """How many layers *small* and *large* keep: the lowest loss in the lower and in the upper half."""
    middle = len(losses) // 2

    def lowest(first: int, last: int) -> int:
        return min(range(first, last + 1), key=lambda layers: losses[layers - 1])

    return (lowest(1, middle) if middle else None), lowest(middle + 1, len(losses))


def _deeper_dip(losses: Sequence[float]) -> int | None:
    """If *small* keeps less than a tenth of the layers: the lowest later local minimum, up to the middle.

    The low loss of the first layers is that of a bag of words, and says little about the trained model.
    """
    small, middle = _pick_layers(losses)[0], len(losses) // 2
    if small is None or _SHALLOW * small >= len(losses):
        return None
    dips = [
        layers
        for layers in range(max(-(-len(losses) // _SHALLOW), 2), middle + 1)
        if losses[layers - 2] > losses[layers - 1] <= losses[layers]
    ]
    return min(dips, key=lambda layers: losses[layers - 1], default=None)


@dataclass(frozen=True, kw_only=True)
class LayerCurve:
    """The mean loss of a model that ends after its first, second, … layer."""

    losses: tuple[float, ...]
    tuples: int

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return len(self.losses)

    @property
    def small(self) -> int | None:
        """How many layers the small variant keeps; None for a model of one layer."""
        return _pick_layers(self.losses)[0]

    @property
    def large(self) -> int:
        """How many layers the large variant keeps; if all of them, there is nothing to cut."""
        return _pick_layers(self.losses)[1]

    @property
    def advice(self) -> str | None:
        """A warning if *small* keeps very few layers and there is a deeper minimum."""
        deeper = _deeper_dip(self.losses)
        if deeper is None:
            return None
        return (
            f"small keeps {self.small} of {self.layers} layers, which compute very little, so its low loss "
            f"is not meaningful; the curve has another minimum at {deeper}: also try keep {deeper}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the losses and the two variants for JSON."""
        losses = [round(loss, 6) for loss in self.losses]
        return {"losses": losses, "tuples": self.tuples, "small": self.small, "large": self.large}


def measure_curve(
    model: SentenceTransformer,
    examples: Iterator[Example] | Sequence[Example],
    *,
    tuples: int = _TUPLES,
    scale: float = _SCALE,
    prompts: Mapping[str, Given] | None = None,
    max_length: int | None = None,
    seed: int = 0,
    progress: Progress = SILENT,
) -> LayerCurve:
    """Sample up to `tuples` examples and measure the loss of every layer on them, in one pass.

    Cosines are multiplied by `scale` before the softmax. `prompts` are by data file, in place of the model's
    own. If the hardware multiplies bf16, the model runs in bf16; pooling and losses are computed in fp32.
    """
    drawn = _draw_tuples(examples, tuples, seed)
    by_source = prompts_by_file(model, prompts or {}, drawn)
    if len(drawn) < _ROUGH:
        progress.say(f"the curve is based on {len(drawn)} tuples only; {_TUPLES:,} make it reliable")
    bf16 = multiplies_bf16(model.device)
    total = torch.zeros(layout_of(transformer_of(model).model).layers, dtype=torch.float64)
    with progress.task("layer losses", len(drawn)) as advance:
        for numbers in np.array_split(np.arange(len(drawn)), -(-len(drawn) // _BATCH)):
            batch = [drawn[number] for number in numbers]
            found = _batch_losses(model, batch, by_source, scale=scale, limit=max_length, bf16=bf16)
            total += found.cpu().double() * len(batch)
            advance(len(batch))
    losses = tuple((total / len(drawn)).tolist())
    if not np.isfinite(losses).all():
        layer = int(np.argmin(np.isfinite(losses))) + 1
        raise BadModel(f"the loss of layer {layer} is NaN or infinite; check the model's weights")
    return LayerCurve(losses=losses, tuples=len(drawn))


def _draw_tuples(examples: Iterator[Example] | Sequence[Example], count: int, seed: int) -> list[Example]:
    """Distinct tuples, sorted by source: negatives from the same source are harder to distinguish."""
    different = distinct(examples, key=lambda example: f"{example.query}\0{example.positive}")
    drawn = sample(different, count, seed=seed)
    if len(drawn) < 2:
        there = "is only 1" if drawn else "are none"
        raise BadInput(f"layers are compared on tuples, and there {there}; pass at least 2 with --data")
    shuffled = [drawn[number] for number in np.random.default_rng(seed).permutation(len(drawn))]
    return sorted(shuffled, key=lambda example: example.source)


def _batch_losses(
    model: SentenceTransformer,
    batch: Sequence[Example],
    prompts: Mapping[str, Prompts],
    *,
    scale: float = _SCALE,
    limit: int | None = None,
    bf16: bool = False,
) -> Tensor:
    def pooled(prompted: Sequence[tuple[str, str]]) -> Tensor:
        """The vectors of pairs of prompt and text, in their order."""
        places = {
            prompt: [n for n, (own, _) in enumerate(prompted) if own == prompt] for prompt, _ in prompted
        }
        parts = [
            _pooled_by_layer(model, [prompted[n][1] for n in numbers], prompt, limit=limit, bf16=bf16)
            for prompt, numbers in places.items()
        ]
        order = torch.tensor([n for numbers in places.values() for n in numbers])
        return torch.cat(parts, dim=1)[:, torch.argsort(order)]

    queries = [(prompts[example.source].query, example.query) for example in batch]
    documents = [(prompts[example.source].document, example.positive) for example in batch]
    documents += [(prompts[one.source].document, negative) for one in batch for negative in one.negatives]
    return _layer_losses(pooled(queries), pooled(documents), scale)


def _pooled_by_layer(
    model: SentenceTransformer,
    texts: Sequence[str],
    prompt: str = "",
    *,
    limit: int | None = None,
    bf16: bool = False,
) -> Tensor:
    """The pooled output of each layer (layers × texts × width); texts of similar length share a batch."""
    check_texts(texts)
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    places = torch.empty(len(texts), dtype=torch.long)
    places[torch.tensor(order)] = torch.arange(len(texts))
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        chosen = [texts[number] for number in order[start : start + _TEXTS_AT_ONCE]]
        parts.append(_pooled(model, _tokens_of(model, chosen, prompt, limit), chosen, bf16=bf16))
    return torch.cat(parts, dim=1)[:, places]


def _pooled(model: SentenceTransformer, features: dict[str, Any], texts: list[str], *, bf16: bool) -> Tensor:
    _check_pooled(model, features, texts)
    pooling = next((module for module in model if isinstance(module, Pooling)), None)
    if pooling is None:
        raise BadModel("the model has no pooling module, so its layers can't be compared; add one")
    backbone, device = transformer_of(model).model, model.device.type
    family = layout_of(backbone).family
    norm = nn.Identity() if family.final_norm is None else backbone.get_submodule(family.final_norm)
    found: list[Tensor] = []

    def hook(_block: nn.Module, _inputs: Any, output: Any) -> None:
        state = norm(output[0] if isinstance(output, tuple) else output)
        with torch.autocast(device, enabled=False):
            pooled = pooling({**features, "token_embeddings": state.float()})
        found.append(pooled["sentence_embedding"])

    computing = torch.autocast(device, dtype=torch.bfloat16, enabled=bf16)
    with torch.inference_mode(), dropping(model, False), computing, ExitStack() as hooks:
        for block in backbone.get_submodule(family.blocks).children():
            hooks.enter_context(block.register_forward_hook(hook))
        model[0](dict(features))
    return torch.stack(found)


def _tokens_of(
    model: SentenceTransformer, texts: list[str], prompt: str = "", limit: int | None = None
) -> dict[str, Any]:
    limit = limit or int(min(model.max_seq_length or LONGEST, LONGEST))
    features: dict[str, Any] = model.preprocess(texts, prompt=prompt or None, max_length=limit)
    if prompt:
        features["prompt_length"] = prompt_tokens(model, prompt)
    return batch_to_device(features, model.device)


def _check_pooled(model: SentenceTransformer, features: dict[str, Any], texts: Sequence[str]) -> None:
    """Reject a text without a token of its own, besides padding, prompt and special tokens."""
    real: Tensor = features["attention_mask"].long()
    own = real.cumsum(dim=1) * real > features.get("prompt_length", 0)
    ids = {*model.tokenizer.all_special_ids} - {model.tokenizer.unk_token_id}
    special = torch.tensor(sorted(ids), device=real.device)
    empty = (own & ~torch.isin(features["input_ids"], special)).sum(dim=1) == 0
    if empty.any():
        text = texts[int(empty.int().argmax())]
        raise BadInput(f"{text[:60]!r} has nothing to pool after its prompt; remove it or shorten the prompt")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One possible cut, and the cost of the model after it."""

    name: str
    """The method, or a variant of a layer-loss curve."""
    keeps: str
    after: Cost


def list_savings(model: SentenceTransformer) -> list[Saving]:
    """List cuts to a half and a quarter of each kind of part; a static model has no parts to cut."""
    if static_table(model) is not None:
        return []
    layout = layout_of(transformer_of(model).model)
    layers = layout.layers
    hidden, head, vocab, mlp = (layout.sizes[axis] for axis in ("hidden", "head", "vocab", "mlp"))
    found: dict[str, list[Saving]] = {"depth": [], "width": [], "vocabulary": [], "weights": []}

    def add(method: str, keeps: str, after: Cost) -> None:
        found[method].append(Saving(name=method, keeps=keeps, after=after))

    for share in (2, 4):
        if layers >= share:
            keep = layers // share
            add("depth", f"{keep} of {layers} layers", predict(model, blocks=range(keep)))
        if hidden % share == 0 and head % (2 * share) == 0:
            after = predict(model, hidden=hidden // share, head=head // share)
            add("width", f"{hidden // share} of {hidden} wide", after)
        if vocab >= share:
            keep = vocab // share
            add("vocabulary", f"{keep:,} of {vocab:,} tokens", predict(model, vocab=keep))
        if mlp >= share:
            keep = mlp // share
            add("weights", f"{keep:,} of {mlp:,} MLP neurons", predict(model, mlp=keep))
    return [saving for savings in found.values() for saving in savings]


def layer_savings(model: SentenceTransformer, curve: LayerCurve) -> list[Saving]:
    """List the small and the large variant of a layer-loss curve, and the full model for comparison."""
    found = [
        Saving(name=name, keeps=f"{keep} of {curve.layers} layers", after=predict(model, blocks=range(keep)))
        for name, keep in (("small", curve.small), ("large", curve.large))
        if keep is not None
    ]
    return [*found, Saving(name="whole", keeps=f"{curve.layers} layers", after=cost(model))]

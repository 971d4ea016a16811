"""What each kind of cut could save, by arithmetic on the model's layout: the menu before anything is ordered."""

from __future__ import annotations

from dataclasses import dataclass

from sentence_transformers import SentenceTransformer

from trundle.methods.depth.curve import LayerCurve
from trundle.model.cost import Cost, cost, predict
from trundle.model.layout import layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of

_SHARES = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One cut that could be made, and what would be left."""

    step: str
    says: str
    after: Cost


def list_savings(model: SentenceTransformer) -> list[Saving]:
    """Half and a quarter of each thing that can be cut; a static model has no layers or neurons to cut."""
    if static_table(model) is not None:
        return []
    layout = layout_of(transformer_of(model).model)
    sizes, found = layout.sizes, []
    for share in _SHARES:
        if layout.layers >= share:
            keep = layout.layers // share
            says = f"{keep} of {layout.layers} layers"
            found.append(Saving(step="depth", says=says, after=predict(model, blocks=range(keep))))
    for share in _SHARES:
        if sizes["hidden"] % share == 0 and sizes["head"] % (2 * share) == 0:
            hidden, head = sizes["hidden"] // share, sizes["head"] // share
            says = f"{hidden} of {sizes['hidden']} wide"
            found.append(Saving(step="width", says=says, after=predict(model, hidden=hidden, head=head)))
    for share in _SHARES:
        if sizes["vocab"] >= share:
            keep = sizes["vocab"] // share
            says = f"{keep:,} of {sizes['vocab']:,} tokens"
            found.append(Saving(step="vocabulary", says=says, after=predict(model, vocab=keep)))
    for share in _SHARES:
        if sizes["mlp"] >= share:
            keep = sizes["mlp"] // share
            says = f"{keep:,} of {sizes['mlp']:,} MLP neurons"
            found.append(Saving(step="weights", says=says, after=predict(model, mlp=keep)))
    return found


def layer_savings(model: SentenceTransformer, curve: LayerCurve) -> list[Saving]:
    """What the small and the large variant of a layer-loss curve would leave, and the whole model beside them."""
    variants = [("small", curve.small), ("large", curve.large)]
    found = [
        Saving(step=name, says=f"{keep} of {curve.layers} layers", after=predict(model, blocks=range(keep)))
        for name, keep in variants
        if keep is not None
    ]
    return [*found, Saving(step="whole", says=f"{curve.layers} layers", after=cost(model))]

"""What each kind of cut would save, by arithmetic on the model's layout; shown by `trundle inspect`."""

from __future__ import annotations

from dataclasses import dataclass

from sentence_transformers import SentenceTransformer

from trundle.methods.depth.curve import LayerCurve
from trundle.model.cost import Cost, cost, predict
from trundle.model.layout import layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of


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
    layers, hidden, head, vocab, mlp = (
        layout.layers,
        *(layout.sizes[axis] for axis in ("hidden", "head", "vocab", "mlp")),
    )
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
    variants = [("small", curve.small), ("large", curve.large)]
    found = [
        Saving(name=name, keeps=f"{keep} of {curve.layers} layers", after=predict(model, blocks=range(keep)))
        for name, keep in variants
        if keep is not None
    ]
    return [*found, Saving(name="whole", keeps=f"{curve.layers} layers", after=cost(model))]

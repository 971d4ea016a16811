"""What a model costs, by part, and what it would cost after a cut that has not been made.

FLOPs count a multiply and an add as two and every matrix a token meets, at a stated text length: attention between tokens
grows with it, and what happens once per text (pooler, Dense) is spread over the text's tokens. Sliding windows are
counted as full attention, which is how they run. A static model meets no matrix; it is counted one addition a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sentence_transformers import SentenceTransformer

from trundle.model.anatomy import Conv1D, _Part
from trundle.model.heads import _is_bare_table, without_head
from trundle.model.layout import Layout, _shrunk, layout_of
from trundle.model.matrices import _grid_bytes, fits_grid
from trundle.model.static import static_shape, static_table
from trundle.model.surgery import transformer_of
from trundle.precision import FORMATS, GraphFormat, Precision

_PARTS: tuple[_Part, ...] = ("embeddings", "attention", "mlp", "norm", "pooler", "head")
_LENGTH = 128
_SAFETENSORS_ALIGNMENT = 8
_BACKBONE_METADATA: dict[str, object] = {"__metadata__": {"format": "pt"}}
_SMALLEST_INT8 = 4096
"""Values under which a table or matrix stays float in an int8 graph."""
_DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}
"""Names by size, for the length of a header only."""


@dataclass(frozen=True, kw_only=True)
class _PartCost:
    """One part's share."""

    parameters: int = 0
    bytes: int = 0
    flops_per_token: float = 0.0

    def __add__(self, other: _PartCost) -> _PartCost:
        return _PartCost(
            parameters=self.parameters + other.parameters,
            bytes=self.bytes + other.bytes,
            flops_per_token=self.flops_per_token + other.flops_per_token,
        )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A model's cost by part, at one text length."""

    parts: dict[_Part, _PartCost]
    layers: int
    width: int
    length: int
    header_bytes: int
    graph_bytes: Mapping[Precision, int]
    """Predicted file size of each quantised graph, as export writes it."""

    @property
    def total(self) -> _PartCost:
        """All parts together."""
        return sum(self.parts.values(), _PartCost())

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.total.parameters

    @property
    def file_bytes(self) -> int:
        """What the weights weigh on disk, as safetensors."""
        return self.total.bytes + self.header_bytes

    @property
    def flops_per_token(self) -> float:
        """The work per token."""
        return self.total.flops_per_token

    def as_json(self) -> dict[str, object]:
        """The facts, for machines and for the lineage."""
        return {
            "parameters": self.parameters,
            "bytes": self.file_bytes,
            "flops_per_token": round(self.flops_per_token),
            "length": self.length,
            "layers": self.layers,
            "width": self.width,
            "parts": {
                part: {
                    "parameters": cost.parameters,
                    "bytes": cost.bytes,
                    "flops_per_token": round(cost.flops_per_token),
                }
                for part, cost in self.parts.items()
            },
        }


def cost(model: SentenceTransformer, *, length: int = _LENGTH) -> Cost:
    """What the model costs as it is."""
    if (table := static_table(model)) is not None:
        shape = (table.num_embeddings, table.embedding_dim)
        return _static_cost(shape, _itemsize(model), _heads(model), length)
    return _cost(layout_of(transformer_of(model).model), _heads(model), length)


def predict(
    model: SentenceTransformer,
    *,
    blocks: Sequence[int] | None = None,
    hidden: int | None = None,
    head: int | None = None,
    mlp: int | None = None,
    vocab: int | None = None,
    dense: tuple[int, int] | None = None,
    length: int = _LENGTH,
) -> Cost:
    """What the model would cost after a cut to these counts, with its linear head replaced by a Dense (in, out) if given."""
    if static_table(model) is not None:
        return _predict_static(model, dense, length)
    before = layout_of(transformer_of(model).model)
    after = _shrunk(before, blocks=blocks, hidden=hidden, head=head, mlp=mlp, vocab=vocab)
    if dense is None:
        return _cost(after, _narrowed(_heads(model), before.sizes["hidden"], after.sizes["hidden"]), length)
    kept = _narrowed(_heads(without_head(model)), before.sizes["hidden"], after.sizes["hidden"])
    return _cost(after, [*kept, _dense(*dense, itemsize=after.parameters[0].itemsize)], length)


def predict_static(
    model: SentenceTransformer, *, rows: int | None = None, width: int | None = None, length: int = _LENGTH
) -> Cost:
    """What the model would cost with no layers left: one vector a token, of all its tokens and its width if nothing is said."""
    shape = static_shape(model)
    return _static_cost((rows or shape[0], width or shape[1]), _itemsize(model), [], length)


def _predict_static(model: SentenceTransformer, dense: tuple[int, int] | None, length: int) -> Cost:
    """A static model with its linear head replaced: the map goes into the table where nothing stands between."""
    table, body = static_table(model), without_head(model)
    assert table is not None
    shape = (table.num_embeddings, table.embedding_dim)
    if dense is None:
        return _static_cost(shape, _itemsize(model), _heads(model), length)
    if _is_bare_table(body):
        return _static_cost((shape[0], dense[1]), _itemsize(model), [], length)
    heads = [*_heads(body), _dense(*dense, itemsize=_itemsize(model))]
    return _static_cost(shape, _itemsize(model), heads, length)


def _itemsize(model: SentenceTransformer) -> int:
    return next(model.parameters()).element_size()


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The weights of one module after the backbone."""

    shapes: dict[str, tuple[int, ...]]
    itemsize: int

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def flops_per_text(self) -> float:
        return sum(2.0 * math.prod(shape) for shape in self.shapes.values() if len(shape) == 2)


def _heads(model: SentenceTransformer) -> list[_Head]:
    found = []
    for module in list(model)[1:]:
        weights = dict(module.named_parameters())
        if weights:
            shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
            found.append(_Head(shapes=shapes, itemsize=next(iter(weights.values())).element_size()))
    return found


def _dense(columns: int, rows: int, *, itemsize: int) -> _Head:
    return _Head(shapes={"linear.weight": (rows, columns), "linear.bias": (rows,)}, itemsize=itemsize)


def _narrowed(heads: Sequence[_Head], before: int, after: int) -> list[_Head]:
    """The modules after a backbone that went from one width to another: all until the first matrix feel it."""
    narrow: list[_Head] = []
    for head in heads:
        if any(len(shape) == 2 for head in narrow for shape in head.shapes.values()):
            narrow.append(head)
            continue
        is_matrix = any(len(shape) == 2 for shape in head.shapes.values())
        shapes = {
            name: (*shape[:-1], shape[-1] * after // before) if len(shape) == 2 or not is_matrix else shape
            for name, shape in head.shapes.items()
        }
        narrow.append(_Head(shapes=shapes, itemsize=head.itemsize))
    return narrow


def _cost(layout: Layout, heads: Sequence[_Head], length: int) -> Cost:
    parts = {part: _PartCost() for part in _PARTS}
    for parameter in layout.parameters:
        count = layout.numel(parameter)
        share = 0.0
        if parameter.multiplies:
            share = 2.0 * count / (length if parameter.part == "pooler" else 1)
        parts[parameter.part] += _PartCost(
            parameters=count, bytes=count * parameter.itemsize, flops_per_token=share
        )
    between_tokens = 4.0 * length * layout.sizes["q"] * layout.layers
    parts["attention"] += _PartCost(flops_per_token=between_tokens)
    parts["head"] += _head_cost(heads, length)
    backbone = {parameter.name: layout.shape(parameter) for parameter in layout.parameters}
    headers = [_header_bytes(backbone, layout.parameters[0].itemsize, _BACKBONE_METADATA)]
    headers += [_header_bytes(head.shapes, head.itemsize, {}) for head in heads]
    return Cost(
        parts=parts,
        layers=layout.layers,
        width=layout.sizes["hidden"],
        length=length,
        header_bytes=sum(headers),
        graph_bytes=_graph_bytes(layout.layers, [*_graph_weights(layout), *_head_weights(heads)]),
    )


@dataclass(frozen=True, kw_only=True)
class _GraphWeight:
    """A weight of an exported graph, in the shape of the torch model."""

    shape: tuple[int, ...]
    in_matmul: bool = False
    is_table: bool = False
    """Whether it is the token table."""
    inputs_first: bool = False


def _graph_weights(layout: Layout) -> list[_GraphWeight]:
    """All weights but the pooler's, which the graph does not need."""
    return [
        _GraphWeight(
            shape=layout.shape(parameter),
            in_matmul=parameter.multiplies,
            is_table=parameter.axes[0] == "vocab",
            inputs_first=isinstance(parameter.member, Conv1D),
        )
        for parameter in layout.parameters
        if parameter.part != "pooler"
    ]


def _head_weights(heads: Sequence[_Head]) -> list[_GraphWeight]:
    return [_GraphWeight(shape=shape, in_matmul=True) for head in heads for shape in head.shapes.values()]


def _graph_bytes(layers: int, weights: Sequence[_GraphWeight]) -> dict[Precision, int]:
    return {
        row.precision: layers * row.bytes_per_layer + sum(_weight_bytes(weight, row) for weight in weights)
        for row in FORMATS
        if row.engine == "onnx" and row.is_quantised
    }


def _weight_bytes(weight: _GraphWeight, row: GraphFormat) -> int:
    """Bytes of a quantised weight with its scales; a small one and one without rows stay float."""
    shape, count = weight.shape, math.prod(weight.shape)
    if row.weights == "int4" and (weight.in_matmul or weight.is_table):
        grid = shape[::-1] if weight.inputs_first else shape
        quantised = _grid_bytes(grid) if len(grid) == 2 and fits_grid(*grid) else 4 * count
        # An int8 matmul has a scale and a zero point per output.
        return quantised + (
            5 * grid[0] if row.matmuls == "int8" and weight.in_matmul and len(grid) == 2 else 0
        )
    if len(shape) < 2 or count < _SMALLEST_INT8:
        return 4 * count
    return count + (5 if weight.in_matmul else 4) * shape[0]


def _static_cost(shape: tuple[int, int], itemsize: int, heads: Sequence[_Head], length: int) -> Cost:
    rows, width = shape
    parts = {part: _PartCost() for part in _PARTS}
    parts["embeddings"] = _PartCost(
        parameters=rows * width, bytes=rows * width * itemsize, flops_per_token=float(width)
    )
    parts["head"] = _head_cost(heads, length)
    headers = [_header_bytes({"embedding.weight": shape}, itemsize, {})]
    headers += [_header_bytes(head.shapes, head.itemsize, {}) for head in heads]
    return Cost(
        parts=parts,
        layers=0,
        width=width,
        length=length,
        header_bytes=sum(headers),
        graph_bytes=_graph_bytes(0, [_GraphWeight(shape=shape, is_table=True), *_head_weights(heads)]),
    )


def _head_cost(heads: Sequence[_Head], length: int) -> _PartCost:
    each = [
        _PartCost(
            parameters=head.parameters,
            bytes=head.parameters * head.itemsize,
            flops_per_token=head.flops_per_text / length,
        )
        for head in heads
    ]
    return sum(each, _PartCost())


def _header_bytes(shapes: dict[str, tuple[int, ...]], itemsize: int, metadata: dict[str, object]) -> int:
    """What a safetensors file spends on saying what is in it: its JSON table, padded."""
    table = dict(metadata)
    offset = 0
    for name in sorted(shapes):
        end = offset + math.prod(shapes[name]) * itemsize
        table[name] = {"dtype": _DTYPES[itemsize], "shape": shapes[name], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"))
    return _SAFETENSORS_ALIGNMENT + -(-len(text) // _SAFETENSORS_ALIGNMENT) * _SAFETENSORS_ALIGNMENT

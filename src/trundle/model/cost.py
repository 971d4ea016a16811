"""The cost of a model by part, now or after a cut that has not been made.

FLOPs count a multiply and an add as two, for every matrix a token is multiplied with, at a stated text length: attention
between tokens grows with it, and the work done once per text (pooler, Dense) is divided by the text's tokens. Sliding
windows count as full attention, which is how they run. A static model does one addition per dimension.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sentence_transformers import SentenceTransformer

from trundle.model.anatomy import Conv1D, _Part
from trundle.model.heads import _is_bare_table, without_head
from trundle.model.layout import Layout, _shrunk, layout_of
from trundle.model.matrices import _grid_bytes, fits_grid
from trundle.model.static import static_shape, static_table
from trundle.model.surgery import transformer_of

_PARTS: tuple[_Part, ...] = ("embeddings", "attention", "mlp", "norm", "pooler", "head")
_ONCE_PER_TEXT = ("pooler", "head")
_LENGTH = 128
_SAFETENSORS_ALIGNMENT = 8
_SMALLEST_INT8 = 4096
"""A table or matrix with fewer values stays float in an int8 graph."""
_GRAPH_BYTES_PER_LAYER = 36_400
"""The operations of an int8 graph, measured on BERT-like models of four and six layers."""
_INT4_GRAPH_BYTES_PER_LAYER = 29_300
"""The same for an int4 graph, measured on the same models."""
_INT8_MATMUL_BYTES_PER_LAYER = 19_400
"""What int8 matmuls add to an int4 graph, measured on three and six layers of MiniLM."""
_INT8_MATMUL_BYTES_PER_OUTPUT = 5
"""A scale and a zero point."""
_DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}
"""Names by size; only their length matters, for the size of a header."""


@dataclass(frozen=True, kw_only=True)
class _PartCost:
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
    """The cost of a model by part, at one text length."""

    parts: dict[_Part, _PartCost]
    layers: int
    width: int
    length: int
    header_bytes: int
    int8_file_bytes: int
    """The size of the int8 graph that export writes."""
    int4_file_bytes: int
    """The size of the int4 graph that export writes."""
    int8_product_bytes: int
    """What int8 matmuls add to the int4 graph."""

    @property
    def total(self) -> _PartCost:
        """The sum of all parts."""
        return sum(self.parts.values(), _PartCost())

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return self.total.parameters

    @property
    def file_bytes(self) -> int:
        """The size of the weights on disk, as safetensors."""
        return self.total.bytes + self.header_bytes

    @property
    def flops_per_token(self) -> float:
        """The work per token."""
        return self.total.flops_per_token

    def as_json(self) -> dict[str, object]:
        """Return the cost for the lineage and for `--json`."""
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
    """Return the cost of the model as it is."""
    return predict(model, length=length)


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
    """Predict the cost after a cut to these sizes, with the linear head replaced by a Dense (in, out) if given."""
    body = model if dense is None else without_head(model)
    itemsize = _itemsize(model)
    new = [] if dense is None else _dense_tensors(*dense, itemsize=itemsize, file=len(body))
    if (table := static_table(model)) is not None:
        width = table.embedding_dim
        if dense is not None and _is_bare_table(body):
            # a linear map of a bare table is stored in the table
            width, new = dense[1], []
        return _static_cost(table.num_embeddings, width, itemsize, [*_head_tensors(body), *new], length)
    before = layout_of(transformer_of(model).model)
    after = _shrunk(before, blocks=blocks, hidden=hidden, head=head, mlp=mlp, vocab=vocab)
    heads = _narrowed(_head_tensors(body), before.sizes["hidden"], after.sizes["hidden"])
    return _layout_cost(after, [*heads, *new], length)


def predict_static(
    model: SentenceTransformer, *, rows: int | None = None, width: int | None = None, length: int = _LENGTH
) -> Cost:
    """Predict the cost of a static model made from this one; rows and width default to its tokens and width."""
    all_rows, full_width = static_shape(model)
    return _static_cost(rows or all_rows, width or full_width, _itemsize(model), [], length)


def _itemsize(model: SentenceTransformer) -> int:
    return next(model.parameters()).element_size()


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """One tensor of a model's files: 0 is the backbone, the others are the modules after it."""

    file: int = 0
    name: str
    shape: tuple[int, ...]
    itemsize: int
    part: _Part
    matmul: bool = False
    token_table: bool = False
    transposed: bool = False

    @property
    def outputs_first(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


def _head_tensors(model: SentenceTransformer) -> list[_Tensor]:
    return [
        _Tensor(
            file=file,
            name=name,
            shape=tuple(weight.shape),
            itemsize=weight.element_size(),
            part="head",
            matmul=weight.ndim == 2,
        )
        for file, module in enumerate(list(model)[1:], 1)
        for name, weight in module.named_parameters()
    ]


def _dense_tensors(columns: int, rows: int, *, itemsize: int, file: int) -> list[_Tensor]:
    shapes = {"linear.weight": (rows, columns), "linear.bias": (rows,)}
    return [
        _Tensor(file=file, name=name, shape=shape, itemsize=itemsize, part="head", matmul=len(shape) == 2)
        for name, shape in shapes.items()
    ]


def _narrowed(heads: Sequence[_Tensor], before: int, after: int) -> list[_Tensor]:
    """The tensors after a backbone of another width: it changes all of them up to the inputs of the first matrix."""
    first = min((tensor.file for tensor in heads if tensor.matmul), default=math.inf)
    return [
        replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] * after // before))
        if tensor.file < first or (tensor.file == first and tensor.matmul)
        else tensor
        for tensor in heads
    ]


def _layout_cost(layout: Layout, heads: Sequence[_Tensor], length: int) -> Cost:
    backbone = [
        _Tensor(
            name=parameter.name,
            shape=layout.shape(parameter),
            itemsize=parameter.itemsize,
            part=parameter.part,
            matmul=parameter.multiplies,
            token_table=parameter.axes[0] == "vocab",
            transposed=isinstance(parameter.member, Conv1D),
        )
        for parameter in layout.parameters
    ]
    between_tokens = _PartCost(flops_per_token=4.0 * length * layout.sizes["q"] * layout.layers)
    made = _cost([*backbone, *heads], layout.layers, layout.sizes["hidden"], length)
    return replace(made, parts=made.parts | {"attention": made.parts["attention"] + between_tokens})


def _static_cost(rows: int, width: int, itemsize: int, heads: Sequence[_Tensor], length: int) -> Cost:
    table = _Tensor(
        name="embedding.weight", shape=(rows, width), itemsize=itemsize, part="embeddings", token_table=True
    )
    made = _cost([table, *heads], 0, width, length)
    additions = _PartCost(flops_per_token=float(width))
    return replace(made, parts=made.parts | {"embeddings": made.parts["embeddings"] + additions})


def _cost(tensors: Sequence[_Tensor], layers: int, width: int, length: int) -> Cost:
    parts = {part: _PartCost() for part in _PARTS}
    int8, int4, outputs = layers * _GRAPH_BYTES_PER_LAYER, layers * _INT4_GRAPH_BYTES_PER_LAYER, 0
    for tensor in tensors:
        count = math.prod(tensor.shape)
        flops = 2.0 * count / (length if tensor.part in _ONCE_PER_TEXT else 1) if tensor.matmul else 0.0
        parts[tensor.part] += _PartCost(
            parameters=count, bytes=count * tensor.itemsize, flops_per_token=flops
        )
        if tensor.part == "pooler":  # not exported
            continue
        int8 += _int8_bytes(tensor.shape, 5 if tensor.matmul else 4)
        if tensor.matmul or tensor.token_table:
            int4 += _int4_bytes(tensor.outputs_first)
        else:
            int4 += _int8_bytes(tensor.shape, 4)
        outputs += tensor.outputs_first[0] if tensor.matmul else 0
    int8_matmuls = layers * _INT8_MATMUL_BYTES_PER_LAYER + _INT8_MATMUL_BYTES_PER_OUTPUT * outputs
    files = sorted({tensor.file for tensor in tensors})
    return Cost(
        parts=parts,
        layers=layers,
        width=width,
        length=length,
        header_bytes=sum(
            _header_bytes([tensor for tensor in tensors if tensor.file == file], bool(layers) and file == 0)
            for file in files
        ),
        int8_file_bytes=int8,
        int4_file_bytes=int4,
        int8_product_bytes=int8_matmuls if layers else 0,
    )


def _int4_bytes(shape: tuple[int, ...]) -> int:
    return _grid_bytes(shape) if len(shape) == 2 and fits_grid(*shape) else 4 * math.prod(shape)


def _int8_bytes(shape: tuple[int, ...], bytes_per_row: int) -> int:
    """Matrices and tables in int8 with a scale (and for matmuls a zero point) per row, the rest as floats."""
    count = math.prod(shape)
    if len(shape) < 2 or count < _SMALLEST_INT8:
        return 4 * count
    return count + bytes_per_row * shape[0]


def _header_bytes(tensors: Sequence[_Tensor], is_backbone: bool) -> int:
    """The size of the JSON header of a safetensors file, padded."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}} if is_backbone else {}
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        end = offset + math.prod(tensor.shape) * tensor.itemsize
        dtype = _DTYPES[tensor.itemsize]
        table[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"))
    return _SAFETENSORS_ALIGNMENT + -(-len(text) // _SAFETENSORS_ALIGNMENT) * _SAFETENSORS_ALIGNMENT

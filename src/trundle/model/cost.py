"""The cost of a model by part, now or after a cut that has not been made.

FLOPs count a multiply and an add as two, at a stated text length: attention between tokens grows with it, and
the work done once per text (pooler, Dense) is divided by the text's tokens. Sliding windows count as full
attention, which is how they run. A static model does one addition per dimension.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import PreTrainedModel

from trundle.model.anatomy import _BY_MODEL_TYPE, _Conv1D, _Part, _Table
from trundle.model.heads import _modules_without_head
from trundle.model.layout import Layout, _shrunk, layout_of
from trundle.model.matrices import BLOCK, fits_grid
from trundle.model.static import static_shape, static_table
from trundle.model.surgery import transformer_of
from trundle.precision import FORMATS, GraphFormat, Precision

_PARTS: tuple[_Part, ...] = ("embeddings", "attention", "mlp", "norm", "pooler", "head")
_ONCE_PER_TEXT = ("pooler", "head")
_LENGTH = 128
_SAFETENSORS_ALIGNMENT = 8
_SMALLEST_INT8 = 4096
"""A table or matrix with fewer values stays float in an int8 graph."""
_DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}
"""Names by size; only their length matters, for the size of a header."""


@dataclass(frozen=True)
class _PartCost:
    parameters: int = 0
    bytes: int = 0
    flops_per_token: float = 0.0

    def __add__(self, other: _PartCost) -> _PartCost:
        flops = self.flops_per_token + other.flops_per_token
        return _PartCost(self.parameters + other.parameters, self.bytes + other.bytes, flops)

    def as_json(self) -> dict[str, int]:
        flops = round(self.flops_per_token)
        return {"parameters": self.parameters, "bytes": self.bytes, "flops_per_token": flops}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a model by part, at one text length."""

    parts: dict[_Part, _PartCost]
    layers: int
    width: int
    length: int
    header_bytes: int
    graph_bytes: Mapping[Precision, int]
    """Predicted file size of each quantised graph that export writes."""

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
        sizes = {"length": self.length, "layers": self.layers, "width": self.width}
        parts = {part: cost.as_json() for part, cost in self.parts.items()}
        return {**self.total.as_json(), "bytes": self.file_bytes, **sizes, "parts": parts}


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
    """Predict the cost after a cut to these sizes, and with a Dense (in, out) as the new linear head."""
    body = list(model) if dense is None else _modules_without_head(model)
    itemsize = next(model.parameters()).element_size()
    new = []
    if dense is not None:
        shapes = {"linear.weight": (dense[1], dense[0]), "linear.bias": (dense[1],)}
        new = [_Tensor(len(body), name, shape, itemsize) for name, shape in shapes.items()]
    if (table := static_table(model)) is not None:
        width = table.embedding_dim
        if dense is not None and len(body) == 1:
            # a linear map directly after the table is applied to the table
            width, new = dense[1], []
        return _static_cost(table.num_embeddings, width, itemsize, [*_head_tensors(body), *new], length)
    backbone = transformer_of(model).model
    if backbone.config.model_type not in _BY_MODEL_TYPE and (blocks, hidden, head, mlp, vocab) == (None,) * 5:
        return _uncut_cost(backbone, [*_head_tensors(body), *new], length)
    before = layout_of(backbone)
    after = _shrunk(before, blocks=blocks, hidden=hidden, head=head, mlp=mlp, vocab=vocab)
    heads = _narrowed(_head_tensors(body), before.sizes["hidden"], after.sizes["hidden"])
    return _layout_cost(after, [*heads, *new], length)


def predict_static(
    model: SentenceTransformer, *, rows: int | None = None, width: int | None = None, length: int = _LENGTH
) -> Cost:
    """Predict the cost of a static model made from this one; the default is all its tokens and its width."""
    if rows is None or width is None:
        all_rows, full_width = static_shape(model)
        rows, width = rows or all_rows, width or full_width
    return _static_cost(rows, width, next(model.parameters()).element_size(), [], length)


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a model's files: file 0 is the backbone's, the others belong to the modules after it."""

    file: int
    name: str
    shape: tuple[int, ...]
    itemsize: int
    part: _Part = "head"
    looked_up: bool = False
    token_table: bool = False
    transposed: bool = False

    @property
    def matmul(self) -> bool:
        return len(self.shape) == 2 and not self.looked_up


def _head_tensors(modules: Sequence[nn.Module]) -> list[_Tensor]:
    return [
        _Tensor(file, name, tuple(weight.shape), weight.element_size())
        for file, module in enumerate(modules[1:], 1)
        for name, weight in module.named_parameters()
    ]


def _narrowed(heads: Sequence[_Tensor], before: int, after: int) -> list[_Tensor]:
    """The tensors after a narrower backbone: all shrink, up to the inputs of the first matrix."""
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
            0,
            parameter.name,
            layout.shape(parameter),
            parameter.itemsize,
            parameter.part,
            looked_up=isinstance(parameter.member, _Table),
            token_table=parameter.axes[0] == "vocab",
            transposed=isinstance(parameter.member, _Conv1D),
        )
        for parameter in layout.parameters
    ]
    width, queries, distances = (layout.sizes.get(axis, 0) for axis in ("hidden", "q", "relative"))
    # The vectors of distances become queries and keys once per text, and meet those of every token.
    work = 4.0 * queries * (length + distances + distances * width / length) * layout.layers
    return _cost([*backbone, *heads], ("attention", work), layout.layers, width, length)


_PART_WORDS: dict[str, _Part] = {
    "embed": "embeddings",
    "pooler": "pooler",
    "norm": "norm",
    "att": "attention",
}


def _uncut_cost(backbone: PreTrainedModel, heads: Sequence[_Tensor], length: int) -> Cost:
    """The cost of a model without a row in the anatomy, whose parts are guessed by the weights' names."""
    tables = {name for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
    words = _PART_WORDS.items()
    tensors = [
        _Tensor(
            0,
            name,
            tuple(weight.shape),
            weight.element_size(),
            next((part for word, part in words if word in name.lower()), "mlp"),
            looked_up=name.rpartition(".")[0] in tables,
        )
        for name, weight in backbone.named_parameters()
    ]
    layers, width = int(backbone.config.num_hidden_layers), int(backbone.config.hidden_size)
    return _cost([*tensors, *heads], ("attention", 4.0 * length * width * layers), layers, width, length)


def _static_cost(rows: int, width: int, itemsize: int, heads: Sequence[_Tensor], length: int) -> Cost:
    shape = (rows, width)
    table = _Tensor(0, "embedding.weight", shape, itemsize, "embeddings", looked_up=True, token_table=True)
    return _cost([table, *heads], ("embeddings", float(width)), 0, width, length)


def _cost(
    tensors: Sequence[_Tensor], extra_flops: tuple[_Part, float], layers: int, width: int, length: int
) -> Cost:
    parts = {part: _PartCost() for part in _PARTS}
    for tensor in tensors:
        count = math.prod(tensor.shape)
        flops = 2.0 * count / (length if tensor.part in _ONCE_PER_TEXT else 1) if tensor.matmul else 0.0
        parts[tensor.part] += _PartCost(count, count * tensor.itemsize, flops)
    part, flops = extra_flops
    parts[part] += _PartCost(flops_per_token=flops)
    files = [[tensor for tensor in tensors if tensor.file == file] for file in {one.file for one in tensors}]
    exported = [tensor for tensor in tensors if tensor.part != "pooler"]
    return Cost(
        parts=parts,
        layers=layers,
        width=width,
        length=length,
        header_bytes=sum(_header_bytes(file, has_format=layers > 0 and file[0].file == 0) for file in files),
        graph_bytes={
            row.precision: (layers * row.bytes_per_layer + row.other_bytes if layers else 0)
            + sum(_graph_bytes(one, row) for one in exported)
            for row in FORMATS
            if row.engine == "onnx" and row.is_quantised
        },
    )


def _graph_bytes(tensor: _Tensor, row: GraphFormat) -> int:
    count = math.prod(tensor.shape)
    rows, columns = (*(tensor.shape[::-1] if tensor.transposed else tensor.shape), 0, 0)[:2]
    # An int8 matmul has a scale and a zero point per output, and a gain per input, which some matmuls share.
    scales = 5 * rows + 4 * columns if row.matmuls == "int8" and tensor.matmul else 0
    in_int4 = (row.tokens or row.weights if tensor.token_table else row.weights) == "int4"
    if in_int4 and (tensor.matmul or tensor.token_table):
        # int4 has two bytes per block.
        return scales + (count // 2 + 2 * count // BLOCK if fits_grid(rows, columns) else 4 * count)
    if len(tensor.shape) < 2 or count < _SMALLEST_INT8:
        return 4 * count
    return count + (scales or 4 * tensor.shape[0])


def _header_bytes(tensors: Sequence[_Tensor], *, has_format: bool) -> int:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}} if has_format else {}
    offset = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        end = offset + math.prod(tensor.shape) * tensor.itemsize
        dtype = _DTYPES[tensor.itemsize]
        table[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"))
    return _SAFETENSORS_ALIGNMENT + -(-len(text) // _SAFETENSORS_ALIGNMENT) * _SAFETENSORS_ALIGNMENT

"""The whole model as one function of token ids, traced into an ONNX file.

What this is not: it knows no architecture. Whatever the modules of a SentenceTransformer do between token ids and
`sentence_embedding` (a map of ids, the backbone, pooling, dense layers, normalisation) is traced as it is. Of a static model
it knows that a text is the mean of its tokens' rows.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn

from trundle.errors import BadModel
from trundle.export.parity import onnx
from trundle.model.matrices import token_rows
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of

_LARGEST_IN_ONE_FILE = 1_800_000_000
"""Bytes; the format itself ends at 2 GB."""


def _save_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph to `path`, with its weights in `path`_data if they are large."""
    if model.ByteSize() <= _LARGEST_IN_ONE_FILE:
        onnx.save(model, path)
        return
    data = path.with_name(f"{path.name}_data")
    data.unlink(missing_ok=True)  # the library would append to it
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=data.name,
        size_threshold=0,
    )


def _gather_weights(path: Path) -> None:
    """Put weights that a tracer scattered over many files beside `path` into one."""
    model = onnx.load(path)
    for file in path.parent.iterdir():
        file.unlink()
    _save_onnx(model, path)


_OPSET = 18
"""Old enough for fastembed, transformers.js and text-embeddings-inference as they are installed today."""

_SENTENCES, _TOKENS = "sentence_embedding", "token_embeddings"
_OUTPUTS = (_SENTENCES, _TOKENS)
"""Clients that pool by themselves take the second; for everyone else the first is all there is."""

_Tracer = Literal["torchscript", "dynamo"]


class _Whole(nn.Module):
    """A SentenceTransformer as a function of tensors alone."""

    def __init__(self, model: SentenceTransformer, *, with_types: bool = False) -> None:
        super().__init__()
        self.model = model
        self.input_names = ("input_ids", "attention_mask", *(("token_type_ids",) if with_types else ()))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Vectors of texts, and of their tokens."""
        features = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            features["token_type_ids"] = token_type_ids
        done = self.model(features)
        return done[_SENTENCES], done[_TOKENS]


class _WholeStatic(_Whole):
    """A static model as a function of padded rows of ids, where the model itself takes all texts end to end."""

    def __init__(self, model: SentenceTransformer, table: StaticEmbedding) -> None:
        super().__init__(model)
        self.table = table

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Vectors of texts, and of their tokens."""
        rows = nn.functional.embedding(input_ids, self.table.embedding.weight)
        counted = attention_mask[:, :, None].to(rows.dtype)
        done = {_SENTENCES: (rows * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)}
        for module in list(self.model)[1:]:
            done = module(done)
        return done[_SENTENCES], rows


def _whole(model: SentenceTransformer) -> _Whole:
    """The model ready to be traced; it shares its weights with `model`."""
    if (table := static_table(model)) is not None:
        return _WholeStatic(model, table).eval()
    backbone = getattr(model[0], "model", None)
    if not isinstance(backbone, nn.Module):
        raise BadModel("a model without a transformer inside can't be exported; use it as it is")
    types = inspect.signature(backbone.forward).parameters.get("token_type_ids")
    tokenizer_gives = "token_type_ids" in getattr(model.tokenizer, "model_input_names", ())
    return _Whole(model, with_types=types is not None and tokenizer_gives).eval()


def _example_inputs(graph: _Whole, *, texts: int = 2, tokens: int = 8) -> tuple[Tensor, ...]:
    """Made-up ids: two rows, the second shorter, so that tracing sees padding."""
    vocabulary = token_rows(graph.model)
    ids = torch.arange(texts * tokens).reshape(texts, tokens) % max(1, vocabulary - 10) + min(
        5, vocabulary - 1
    )
    mask = torch.ones_like(ids)
    mask[1:, -2:] = 0
    types = torch.zeros_like(ids)
    return (ids, mask, types)[: len(graph.input_names)]


def _write_onnx(graph: _Whole, path: Path, *, tracer: _Tracer) -> None:
    """Trace `graph` into `path`; weights over 2 GB go into a file beside it."""
    names, example = list(graph.input_names), _example_inputs(graph)
    weights = sum(weight.numel() * weight.element_size() for weight in graph.parameters())
    outside = weights > _LARGEST_IN_ONE_FILE
    with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(StringIO()), _quiet_logs():
        warnings.filterwarnings("ignore")  # tracers warn of every branch they see, and of themselves
        if tracer == "dynamo":
            any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
            torch.onnx.export(
                graph,
                example,
                str(path),
                input_names=names,
                output_names=list(_OUTPUTS),
                opset_version=_OPSET,
                dynamo=True,
                dynamic_shapes=tuple(any_size for _ in names),
                external_data=outside,
            )
        else:
            axes = {name: {0: "batch", 1: "tokens"} for name in [*names, _TOKENS]} | {
                _SENTENCES: {0: "batch"}
            }
            torch.onnx.export(
                graph,
                example,
                str(path),
                input_names=names,
                output_names=list(_OUTPUTS),
                opset_version=_OPSET,
                dynamo=False,
                dynamic_axes=axes,
            )
    if outside:
        _gather_weights(path)


@contextmanager
def _plain_attention(model: SentenceTransformer) -> Iterator[None]:
    """Attention as two products and a softmax while the block runs: the form that runtimes know how to fuse.

    The form torch prefers is traced with a search for NaN in every row, which costs as much as the softmax itself. A static
    model has none.
    """
    if static_table(model) is not None:
        yield
        return
    backbone = transformer_of(model).model
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("eager")
    try:
        yield
    finally:
        backbone.set_attn_implementation(before)


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Tracers also log; what matters of it comes back as an exception."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

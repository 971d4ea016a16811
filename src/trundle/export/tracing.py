"""The float ONNX graph that all others are made from: the full model, traced as a function of token ids.

Nothing here knows an architecture. Everything that the modules of a SentenceTransformer do between token ids
and `sentence_embedding` is traced unchanged. Only a static model is rebuilt, as the mean of its tokens' rows.
A graph's vectors are compared with torch's.
"""

from __future__ import annotations

import inspect
import logging
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn

from trundle.embedder import Vectors, top_agreement
from trundle.errors import BadModel, MissingExtra
from trundle.model.encode import _plain_attention
from trundle.model.matrices import token_rows
from trundle.model.static import static_table
from trundle.progress import Progress
from trundle.runtime.description import Description, Graph
from trundle.runtime.engines import OnnxSession
from trundle.runtime.model import Reader, padded

_PROBES = (
    "a",
    "how do I keep my index when the model changes?",
    "The river that runs through the old town carries more water in spring than in autumn.",
    "Größe, naïve café, 東京 and emoji 🙂 appear in real text",
    "SELECT name, COUNT(*) FROM visits WHERE day >= '2024-01-01' GROUP BY name;",
    "A small model that shares the frame of a large one is slid under it by day and pulled out by night. "
    * 6,
    "",
    "one text that is longer than anything a model takes, so that it is cut at the end " * 60,
)
_FLOAT_COSINE = 0.9999
"""What a float32 graph must reach on every probe; rounding alone leaves six nines."""
_NEIGHBOURS = 10
_LARGEST_IN_ONE_FILE = 1_800_000_000
"""Bytes; the limit of the format is 2 GB."""
_OPSET = 18
"""Old enough for the current releases of fastembed, transformers.js and text-embeddings-inference."""
_SENTENCES, _TOKENS = "sentence_embedding", "token_embeddings"
"""The outputs. Clients that pool by themselves use the second."""
_ROUNDS = 7

_Tracer = Literal["torchscript", "dynamo"]
_TRACERS: tuple[_Tracer, ...] = ("torchscript", "dynamo")


@dataclass(frozen=True, kw_only=True)
class _Closeness:
    """Cosines of a graph's vectors with torch's, over some texts."""

    texts: int
    lowest_cosine: float
    mean_cosine: float
    largest_difference: float
    worst: str
    """The text with the lowest cosine."""

    def as_json(self) -> dict[str, float | int | str]:
        return {
            "texts": self.texts,
            "lowest cosine": round(self.lowest_cosine, 6),
            "mean cosine": round(self.mean_cosine, 6),
            "largest difference": float(f"{self.largest_difference:.2g}"),
        }


def _torch_vectors(model: SentenceTransformer, texts: Sequence[str]) -> Vectors:
    """Torch's vectors, each text alone, so that padding has no influence."""
    with torch.inference_mode():
        vectors = model.encode(
            list(texts), batch_size=1, prompt="", convert_to_numpy=True, show_progress_bar=False
        )
    return np.asarray(vectors, dtype=np.float32)


def _compare(vectors: Vectors, reference: Vectors, texts: Sequence[str]) -> _Closeness:
    """A graph's vectors of texts compared with torch's; two equal vectors agree even if they are zero."""
    if vectors.shape != reference.shape:
        raise BadModel(
            f"the graph's vectors are {vectors.shape}, torch's {reference.shape}; report this model"
        )
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    dots = np.einsum("ij,ij->i", vectors, reference)
    same = np.abs(vectors - reference).max(axis=1, initial=0) < 1e-6
    cosines = np.where(same, np.float32(1), dots / np.maximum(lengths, 1e-12)).astype(np.float32)
    worst = int(np.argmin(cosines))
    return _Closeness(
        texts=len(texts),
        lowest_cosine=float(cosines[worst]),
        mean_cosine=float(cosines.mean(dtype=np.float64)),
        largest_difference=float(np.abs(vectors - reference).max()),
        worst=texts[worst],
    )


def _neighbour_agreement(vectors: Vectors, reference: Vectors) -> float:
    """Mean share of each text's ten nearest other texts that both sets of vectors agree on."""

    def nearest(those: Vectors) -> np.ndarray:
        scaled = those / np.maximum(np.linalg.norm(those, axis=1, keepdims=True), 1e-12)
        cosines = scaled @ scaled.T
        np.fill_diagonal(cosines, -np.inf)
        return np.argsort(-cosines, axis=1, kind="stable")[:, :_NEIGHBOURS]

    return top_agreement(nearest(reference), nearest(vectors))


def _check_tokens(
    model: SentenceTransformer, read: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str]
) -> None:
    """Reject a model that changes texts in another way than through its tokenizer."""
    for text, ids in zip(texts, read(texts), strict=True):
        wanted = model.preprocess([text])["input_ids"].flatten().tolist()
        if ids != wanted:
            raise BadModel(
                f"tokenizer.json and the model disagree on the tokens of {text[:40]!r}; "
                "save the model with sentence-transformers and export that"
            )


try:
    import onnx as onnx
    import onnxruntime as onnxruntime
except ImportError as error:
    raise MissingExtra("export", "compress") from error


@dataclass(frozen=True, kw_only=True)
class _GraphJob:
    """A graph to make: of which model, and in which scratch folder."""

    model: SentenceTransformer
    """What is traced."""
    exact: SentenceTransformer
    """What the graph is compared with: the model before it was rounded."""
    folder: Path
    description: Description
    reader: Reader
    graph: Graph
    progress: Progress

    @property
    def path(self) -> Path:
        return self.folder / self.graph.path

    @property
    def traced(self) -> Path:
        return self.folder / "traced" / "model.onnx"

    def with_facts(self, facts: Mapping[str, Any]) -> _GraphJob:
        return replace(self, graph=replace(self.graph, facts={**self.graph.facts, **facts}))


def _save_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph to `path`, with its weights in `path`_data if they are large."""
    if _weight_bytes(model) <= _LARGEST_IN_ONE_FILE:
        onnx.save(model, path)
        return
    data = path.with_name(f"{path.name}_data")
    data.unlink(missing_ok=True)  # the library would append to it
    onnx.save(model, path, save_as_external_data=True, location=data.name, size_threshold=0)


def _with_short_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with names as short as possible, except those of its inputs and outputs.

    A tracer's names take three quarters of what a layer's operations weigh in a file.
    """
    graph = model.graph
    if model.functions or any(each.HasField("g") for node in graph.node for each in node.attribute):
        return model  # branches and functions use the names of the graph around them
    short: dict[str, str] = {each.name: each.name for each in (*graph.input, *graph.output)}
    short[""] = ""  # an optional input that is left out

    def shortened(name: str) -> str:
        return short.setdefault(name, f"{len(short):x}")

    for tensor in graph.initializer:
        tensor.name = shortened(tensor.name)
    for node in graph.node:
        node.name = node.doc_string = ""
        node.input[:] = [shortened(name) for name in node.input]
        node.output[:] = [shortened(name) for name in node.output]
        del node.metadata_props[:]
    del graph.value_info[:]
    return model


def _weight_bytes(model: onnx.ModelProto) -> int:
    """The size of the graph's tensors; protobuf can't tell the size of a message above 2 GiB."""
    held = [
        attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t")
    ]
    tensors = [*model.graph.initializer, *held]
    return sum(len(tensor.raw_data) or tensor.ByteSize() for tensor in tensors)


class _TensorModel(nn.Module):
    """A SentenceTransformer as a function of tensors."""

    def __init__(
        self, model: SentenceTransformer, *, with_types: bool = False, table: StaticEmbedding | None = None
    ) -> None:
        super().__init__()
        self.model, self.table = model, table
        self.input_names = ("input_ids", "attention_mask", *(("token_type_ids",) if with_types else ()))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.table is None:
            features = {"input_ids": input_ids, "attention_mask": attention_mask}
            if token_type_ids is not None:
                features["token_type_ids"] = token_type_ids
            done = self.model(features)
            return done[_SENTENCES], done[_TOKENS]
        # A static model takes all texts concatenated, but a graph takes padded rows of ids.
        rows = nn.functional.embedding(input_ids, self.table.embedding.weight)
        counted = attention_mask[:, :, None].to(rows.dtype)
        done = {_SENTENCES: (rows * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)}
        for module in list(self.model)[1:]:
            done = module(done)
        return done[_SENTENCES], rows


def _tensor_model(model: SentenceTransformer) -> _TensorModel:
    """The model ready to be traced; it shares its weights with `model`."""
    if (table := static_table(model)) is not None:
        return _TensorModel(model, table=table).eval()
    backbone = getattr(model[0], "model", None)
    if not isinstance(backbone, nn.Module):
        raise BadModel("a model without a transformer can't be exported; use it with sentence-transformers")
    types = inspect.signature(backbone.forward).parameters.get("token_type_ids")
    tokenizer_gives = "token_type_ids" in getattr(model.tokenizer, "model_input_names", ())
    return _TensorModel(model, with_types=types is not None and tokenizer_gives).eval()


def _example_inputs(graph: _TensorModel) -> tuple[Tensor, ...]:
    """Two rows of ids, the second shorter, so that tracing sees padding."""
    vocabulary = token_rows(graph.model)
    ids = torch.arange(16).reshape(2, 8) % max(1, vocabulary - 10) + min(5, vocabulary - 1)
    mask = torch.ones_like(ids)
    mask[1:, -2:] = 0
    return (ids, mask, torch.zeros_like(ids))[: len(graph.input_names)]


def _write_onnx(graph: _TensorModel, path: Path, *, tracer: _Tracer) -> None:
    """Trace `graph` into `path`; weights over 2 GB go into one file next to it."""
    names = list(graph.input_names)
    weights = sum(weight.numel() * weight.element_size() for weight in graph.parameters())
    outside = weights > _LARGEST_IN_ONE_FILE
    if tracer == "dynamo":
        any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        how: dict[str, Any] = {"dynamic_shapes": tuple(any_size for _ in names), "external_data": outside}
    else:
        axes = {name: {0: "batch", 1: "tokens"} for name in [*names, _TOKENS]}
        how = {"dynamic_axes": axes | {_SENTENCES: {0: "batch"}}}
    with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(StringIO()), _quiet("torch.onnx"):
        warnings.filterwarnings("ignore")  # tracers warn about every branch
        torch.onnx.export(
            graph,
            _example_inputs(graph),
            str(path),
            input_names=names,
            output_names=[_SENTENCES, _TOKENS],
            opset_version=_OPSET,
            dynamo=tracer == "dynamo",
            **how,
        )
    if outside:  # the tracer wrote many files
        model = onnx.load(path)
        for file in path.parent.iterdir():
            file.unlink()
        _save_onnx(model, path)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trace(job: _GraphJob, texts: Sequence[str], reference: Vectors, *, try_both: bool) -> dict[str, Any]:
    """Write the float graph to `job.traced`, checked against torch's vectors; returns facts about it."""
    # Runtimes fuse the graphs of the older tracer better, so it comes first.
    seconds: dict[_Tracer, float] = {}
    problems: list[BadModel] = []
    for tracer in _TRACERS:
        if seconds and not try_both:
            break
        try:
            seconds[tracer] = _trace_with(tracer, job, texts, reference, timed=try_both)
        except BadModel as problem:
            problems.append(problem)
    if not seconds:
        raise problems[0]
    fastest = min(seconds, key=seconds.__getitem__)
    (job.folder / fastest).rename(job.traced.parent)
    facts: dict[str, Any] = {"tracer": fastest}
    if len(seconds) > 1:
        facts["dynamo / torchscript, seconds"] = round(seconds["dynamo"] / seconds["torchscript"], 3)
    return facts


def _trace_with(
    tracer: _Tracer, job: _GraphJob, texts: Sequence[str], reference: Vectors, *, timed: bool
) -> float:
    """Trace with one tracer and compare with torch; returns the graph's seconds for the texts if `timed`."""
    path = job.folder / tracer / job.traced.name
    path.parent.mkdir()
    graph = _tensor_model(job.model)
    with job.progress.task(f"tracing ({tracer})", None), _plain_attention(job.model):
        try:
            _write_onnx(graph, path, tracer=tracer)
        except Exception as error:  # tracers raise exceptions of any kind
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"torch can't trace the model ({reason}); report this model") from error
    session = OnnxSession(path, threads=1)
    rows = job.reader.read(texts)

    def encode() -> Vectors:
        return np.concatenate([session(*padded([row], len(row), job.description.pad_id)) for row in rows])

    closeness = _compare(encode(), reference, texts)
    if closeness.lowest_cosine < _FLOAT_COSINE:
        where = f"cosine {closeness.lowest_cosine:.4f} for {closeness.worst[:40]!r}"
        raise BadModel(f"the graph does not agree with torch ({where}); report this model")
    return median(timeit.repeat(encode, number=1, repeat=_ROUNDS)) if timed else 0.0

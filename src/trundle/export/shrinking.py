"""The files that are shipped, made from the traced graph, each measured with the runtime that will use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from trundle.embedder import Encode, Vectors
from trundle.errors import BadModel
from trundle.export.int4 import _write_int4, _write_int4_with_int8_products
from trundle.export.int8 import _Inputs, _worst_products, _write_float16, _write_int8
from trundle.export.parity import (
    _FLOAT_COSINE,
    _NEIGHBOURS,
    Limits,
    _compare,
    _keep_in_turn,
    _neighbour_agreement,
    _Parity,
    _passes,
    _split_texts,
    _spread,
    _torch_vectors,
    onnx,
)
from trundle.export.tracing import _Tracing
from trundle.model.matrices import token_rows
from trundle.progress import Progress
from trundle.runtime.description import FILE, Description, Graph
from trundle.runtime.encoder import Encoder
from trundle.runtime.tokens import Reader, padded

_CALIBRATED_ON = 48
_MEASURED_ON = 96
_PROBED_WITH = 16
_LEARN_INT4 = "trundle align … --rounding int4"
_HALF_COSINE = 0.999
"""What a half-precision graph must reach on every probe."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A graph on disk and how near it is."""

    graph: Graph
    parity: _Parity


@dataclass(frozen=True, kw_only=True)
class _Making:
    """What is being made, of what, and where."""

    model: SentenceTransformer
    folder: Path
    description: Description
    graph: Graph
    traced: Path
    progress: Progress

    @property
    def path(self) -> Path:
        """The file to make."""
        return self.folder / self.graph.path

    def tracing(self, texts: Sequence[str], reference: Vectors) -> _Tracing:
        """The first part of the work."""
        return _Tracing(
            model=self.model,
            path=self.traced,
            reader=Reader(self.folder, self.description),
            pad_id=self.description.pad_id,
            texts=texts,
            reference=reference,
            progress=self.progress,
        )

    def with_facts(self, facts: Mapping[str, Any]) -> _Making:
        """The same with more known of the graph."""
        return replace(self, graph=replace(self.graph, facts={**self.graph.facts, **facts}))

    def encoder(self) -> Encoder:
        """The graph as a user will run it."""
        (self.folder / FILE).write_text(self.description.with_graph(self.graph).as_text(), encoding="utf-8")
        return Encoder(self.folder)


def _make_float(making: _Making, probes: Sequence[str], *, half: bool) -> _Made:
    """Full or half precision, compared with torch on the probes."""
    if making.graph.engine == "openvino":
        _openvino_file().write_openvino(making.traced, making.path, half=half)
    elif half:
        _write_float16(making.traced, making.path)
    else:
        making.path.parent.rmdir()
        making.traced.parent.rename(making.path.parent)
    parity = _compare(_plain(making.encoder())(probes), _torch_vectors(making.model, probes), probes)
    least = _HALF_COSINE if half else _FLOAT_COSINE
    if parity.lowest_cosine < least:
        raise BadModel(
            f"{making.graph.precision} does not agree with torch (cosine {parity.lowest_cosine:.4f} for "
            f"{parity.worst[:60]!r}), so nothing was written; export in full precision"
        )
    return _Made(graph=making.with_facts(parity.as_json()).graph, parity=parity)


def _make_int8(making: _Making, texts: Sequence[str], *, limits: Limits, older_cpus: bool) -> _Made:
    """Int8 that stays within `limits`, with as few products kept in float as that takes.

    Where the graph is to be stored in int4 as well, the model had better have learned on that grid.
    """
    small = making.graph.precision == "int4+int8"
    tokens = token_rows(making.model) if small else 0
    read = Reader(making.folder, making.description).read
    usable = [text for text, ids in zip(texts, read(texts), strict=True) if ids]
    calibration, measured = _split_texts(usable)
    calibration, measured = _spread(calibration, _CALIBRATED_ON), _spread(measured, _MEASURED_ON)
    samples = _samples(making.traced, read(calibration))
    reference = _torch_vectors(making.model, measured)
    order = _worst_products(making.traced, _spread(samples, _PROBED_WITH))
    rounds_inputs = making.graph.engine == "onnx" and bool(order)
    making = replace(making, graph=replace(making.graph, one_by_one=rounds_inputs))
    tried = []
    for keep in _keep_in_turn(order):
        with making.progress.task(
            f"{making.graph.precision}, {len(keep)} of {len(order)} products in float", None
        ):
            if making.graph.engine == "openvino":
                _openvino_file().write_calibrated(
                    making.traced, making.path, samples, keep=keep, older_cpus=older_cpus
                )
            elif small:
                _write_int4_with_int8_products(
                    making.traced, making.path, tokens=tokens, keep=keep, older_cpus=older_cpus
                )
            else:
                _write_int8(making.traced, making.path, keep=keep, older_cpus=older_cpus)
            vectors = _plain(making.encoder())(measured)
        parity = _compare(vectors, reference, measured)
        agreement = _neighbour_agreement(vectors, reference)
        loss = f"cosine {parity.mean_cosine:.4f}, agreement@{_NEIGHBOURS} {agreement:.1%}"
        making.progress.say(
            f"{making.graph.precision} with {len(keep)} of {len(order)} products in float: {loss}"
        )
        tried.append(loss)
        if _passes(parity, agreement, limits):
            facts = {
                **parity.as_json(),
                f"agreement@{_NEIGHBOURS}": round(agreement, 4),
                "products in float": keep,
                "bits of a weight": 7 if older_cpus else 8,
            }
            return _Made(graph=making.with_facts(facts).graph, parity=parity)
    mend = f"let the model learn with int4 first ({_LEARN_INT4}), use --int4 alone" if small else "use --half"
    raise BadModel(
        f"{making.graph.precision} loses too much on these texts ({tried[0]}; with {len(keep)} of {len(order)} products in float {tried[-1]}), so nothing "
        f"was written; {mend}, or allow more with --max-cosine-loss and --max-agreement-loss"
    )


def _make_int4(making: _Making, texts: Sequence[str], *, limits: Limits) -> _Made:
    """Int4 that stays within `limits`; a model that has learned on the grid loses nothing."""
    read = Reader(making.folder, making.description).read
    _, measured = _split_texts([text for text, ids in zip(texts, read(texts), strict=True) if ids])
    measured = _spread(measured, _MEASURED_ON)
    with making.progress.task("int4", None):
        _write_int4(making.traced, making.path, tokens=token_rows(making.model))
        vectors = _plain(making.encoder())(measured)
    reference = _torch_vectors(making.model, measured)
    parity, agreement = _compare(vectors, reference, measured), _neighbour_agreement(vectors, reference)
    if not _passes(parity, agreement, limits):
        raise BadModel(
            f"int4 loses too much on these texts (cosine {parity.mean_cosine:.4f}, agreement@{_NEIGHBOURS} {agreement:.1%}), "
            f"so nothing was written; let the model learn with it first: {_LEARN_INT4}"
        )
    facts = {**parity.as_json(), f"agreement@{_NEIGHBOURS}": round(agreement, 4)}
    return _Made(graph=making.with_facts(facts).graph, parity=parity)


def _samples(traced: Path, rows: Sequence[Sequence[int]]) -> list[_Inputs]:
    """One input per text, without padding, by the names the graph knows."""
    names = [each.name for each in onnx.load(traced, load_external_data=False).graph.input]
    samples: list[_Inputs] = []
    for row in rows:
        ids, mask = padded([row], len(row), 0)
        whole = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        samples.append({name: whole[name] for name in names})
    return samples


def _plain(encoder: Encoder) -> Encode:
    """Texts as they are, without the model's prompt, as the torch side is asked."""
    return lambda texts: encoder.encode(texts, prompt="")


def _openvino_file() -> Any:
    """The file that needs openvino and nncf, if they are there."""
    return import_module("trundle.export.openvino")

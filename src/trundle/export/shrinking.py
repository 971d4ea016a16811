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
from trundle.export import int4, onnx_file
from trundle.export.loss import (
    NEIGHBOURS,
    Limits,
    keep_in_turn,
    neighbour_agreement,
    passes,
    split_texts,
    spread,
)
from trundle.export.packages import onnx
from trundle.export.parity import FLOAT_COSINE, Parity, compare, torch_vectors
from trundle.export.sensitivity import Inputs, worst_products
from trundle.export.tracing import Tracing
from trundle.model import token_rows
from trundle.progress import Progress
from trundle.runtime.describe import FILE, Description, Graph
from trundle.runtime.encoder import Encoder
from trundle.runtime.tokens import Reader, padded

CALIBRATED_ON = 48
MEASURED_ON = 96
PROBED_WITH = 16
LEARN_INT4 = "trundle align … --rounding int4"
HALF_COSINE = 0.999
"""What a half-precision graph must reach on every probe."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A graph on disk and how near it is."""

    graph: Graph
    parity: Parity


@dataclass(frozen=True, kw_only=True)
class Making:
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

    def tracing(self, texts: Sequence[str], reference: Vectors) -> Tracing:
        """The first part of the work."""
        return Tracing(
            model=self.model,
            path=self.traced,
            reader=Reader(self.folder, self.description),
            pad_id=self.description.pad_id,
            texts=texts,
            reference=reference,
            progress=self.progress,
        )

    def with_facts(self, facts: Mapping[str, Any]) -> Making:
        """The same with more known of the graph."""
        return replace(self, graph=replace(self.graph, facts={**self.graph.facts, **facts}))

    def encoder(self) -> Encoder:
        """The graph as a user will run it."""
        (self.folder / FILE).write_text(self.description.with_graph(self.graph).as_text(), encoding="utf-8")
        return Encoder(self.folder)


def make_float(making: Making, probes: Sequence[str], *, half: bool) -> Made:
    """Full or half precision, compared with torch on the probes."""
    if making.graph.engine == "openvino":
        _openvino_file().write_openvino(making.traced, making.path, half=half)
    elif half:
        onnx_file.write_float16(making.traced, making.path)
    else:
        making.path.parent.rmdir()
        making.traced.parent.rename(making.path.parent)
    parity = compare(_plain(making.encoder())(probes), torch_vectors(making.model, probes), probes)
    least = HALF_COSINE if half else FLOAT_COSINE
    if parity.lowest_cosine < least:
        raise BadModel(
            f"{making.graph.precision} does not agree with torch (cosine {parity.lowest_cosine:.4f} for "
            f"{parity.worst[:60]!r}), so nothing was written; export in full precision"
        )
    return Made(graph=making.with_facts(parity.as_json()).graph, parity=parity)


def make_int8(making: Making, texts: Sequence[str], *, limits: Limits, older_cpus: bool) -> Made:
    """Int8 that stays within `limits`, with as few products kept in float as that takes.

    Where the graph is to be stored in int4 as well, the model had better have learned on that grid.
    """
    small = making.graph.precision == "int4+int8"
    tokens = token_rows(making.model) if small else 0
    read = Reader(making.folder, making.description).read
    usable = [text for text, ids in zip(texts, read(texts), strict=True) if ids]
    calibration, measured = split_texts(usable)
    calibration, measured = spread(calibration, CALIBRATED_ON), spread(measured, MEASURED_ON)
    samples = _samples(making.traced, read(calibration))
    reference = torch_vectors(making.model, measured)
    order = worst_products(making.traced, spread(samples, PROBED_WITH))
    rounds_inputs = making.graph.engine == "onnx" and bool(order)
    making = replace(making, graph=replace(making.graph, one_by_one=rounds_inputs))
    tried = []
    for keep in keep_in_turn(order):
        with making.progress.task(
            f"{making.graph.precision}, {len(keep)} of {len(order)} products in float", None
        ):
            if making.graph.engine == "openvino":
                _openvino_file().write_calibrated(
                    making.traced, making.path, samples, keep=keep, older_cpus=older_cpus
                )
            elif small:
                int4.write_int4_with_int8_products(
                    making.traced, making.path, tokens=tokens, keep=keep, older_cpus=older_cpus
                )
            else:
                onnx_file.write_int8(making.traced, making.path, keep=keep, older_cpus=older_cpus)
            vectors = _plain(making.encoder())(measured)
        parity = compare(vectors, reference, measured)
        agreement = neighbour_agreement(vectors, reference)
        loss = f"cosine {parity.mean_cosine:.4f}, agreement@{NEIGHBOURS} {agreement:.1%}"
        making.progress.say(
            f"{making.graph.precision} with {len(keep)} of {len(order)} products in float: {loss}"
        )
        tried.append(loss)
        if passes(parity, agreement, limits):
            facts = {
                **parity.as_json(),
                f"agreement@{NEIGHBOURS}": round(agreement, 4),
                "products in float": keep,
                "bits of a weight": 7 if older_cpus else 8,
            }
            return Made(graph=making.with_facts(facts).graph, parity=parity)
    mend = f"let the model learn with int4 first ({LEARN_INT4}), use --int4 alone" if small else "use --half"
    raise BadModel(
        f"{making.graph.precision} loses too much on these texts ({tried[0]}; with {len(keep)} of {len(order)} products in float {tried[-1]}), so nothing "
        f"was written; {mend}, or allow more with --max-cosine-loss and --max-agreement-loss"
    )


def make_int4(making: Making, texts: Sequence[str], *, limits: Limits) -> Made:
    """Int4 that stays within `limits`; a model that has learned on the grid loses nothing."""
    read = Reader(making.folder, making.description).read
    _, measured = split_texts([text for text, ids in zip(texts, read(texts), strict=True) if ids])
    measured = spread(measured, MEASURED_ON)
    with making.progress.task("int4", None):
        int4.write_int4(making.traced, making.path, tokens=token_rows(making.model))
        vectors = _plain(making.encoder())(measured)
    reference = torch_vectors(making.model, measured)
    parity, agreement = compare(vectors, reference, measured), neighbour_agreement(vectors, reference)
    if not passes(parity, agreement, limits):
        raise BadModel(
            f"int4 loses too much on these texts (cosine {parity.mean_cosine:.4f}, agreement@{NEIGHBOURS} {agreement:.1%}), "
            f"so nothing was written; let the model learn with it first: {LEARN_INT4}"
        )
    facts = {**parity.as_json(), f"agreement@{NEIGHBOURS}": round(agreement, 4)}
    return Made(graph=making.with_facts(facts).graph, parity=parity)


def _samples(traced: Path, rows: Sequence[Sequence[int]]) -> list[Inputs]:
    """One input per text, without padding, by the names the graph knows."""
    names = [each.name for each in onnx.load(traced, load_external_data=False).graph.input]
    samples: list[Inputs] = []
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
    return import_module("trundle.export.openvino_file")

"""Make the requested graph from the traced one, and measure it with the runtime that will run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from sentence_transformers import SentenceTransformer

from trundle.data.texts import enough_texts
from trundle.embedder import Vectors
from trundle.errors import BadModel
from trundle.export.int4 import _write_int4, _write_int4_with_int8_matmuls, _write_int8_with_int4_tokens
from trundle.export.int8 import _calibrated, _Gains, _Inputs, _write_float16, _write_int8
from trundle.export.tracing import (
    _FLOAT_COSINE,
    _NEIGHBOURS,
    _Closeness,
    _compare,
    _GraphJob,
    _neighbour_agreement,
    _torch_vectors,
    onnx,
)
from trundle.model.matrices import token_rows
from trundle.model.rounding import round_to_int4
from trundle.precision import GraphFormat, graph_format
from trundle.progress import Progress
from trundle.runtime.description import FILE, Graph
from trundle.runtime.encoder import Encoder
from trundle.runtime.engines import _int8_overflows
from trundle.runtime.model import Reader, padded

_CALIBRATED_ON = 48
_MEASURED_ON = 96
_PROBED = slice(0, 12, 3)
"""The samples on which errors are compared."""
_HALF_COSINE = 0.999
"""What a half-precision graph must reach on every probe."""

_COSINE_LOSS = {False: 0.01, True: 0.02}
"""The default limit, and that of int4."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest loss of a quantised graph: of mean cosine to torch, and of nearest neighbours."""

    cosine: float | None = None
    """Default: 0.01, and 0.02 for int4."""
    agreement: float = 0.1

    def allow(self, row: GraphFormat, *, cosine: float, agreement: float) -> bool:
        """Return whether a graph of this format may lose this much."""
        most = _COSINE_LOSS[row.weights == "int4"] if self.cosine is None else self.cosine
        return cosine <= most and agreement <= self.agreement


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a graph is made."""

    calibrate: Sequence[str] = ()
    """Texts for quantised graphs: up to 96 to measure the loss on, the others to calibrate on."""
    limits: Limits = field(default_factory=Limits)
    """A quantised graph with a larger loss is rejected."""
    older_cpus: bool | None = None
    """7-bit weights, whose int8 matmuls can't overflow on processors without VNNI; None: if this has none."""
    try_both: bool = False
    """Trace with both of torch's tracers and keep the faster graph."""
    fit: bool = True
    """Fit int4 weights to the texts, not only round each to the nearest value of its block's scale."""


def _prepared(
    model: SentenceTransformer, row: GraphFormat, reader: Reader, options: ExportOptions, progress: Progress
) -> SentenceTransformer:
    """The model to trace: for int4 with its weights on the grid; rejects texts that are too few."""
    if not row.is_quantised:
        return model
    calibration, _ = _split_texts(reader, options.calibrate)
    if row.weights != "int4" or not options.fit:
        return model
    return round_to_int4(model, calibration, progress=progress)


def _make_float(job: _GraphJob, probes: Sequence[str]) -> tuple[Graph, _Closeness]:
    """Full or half precision, compared with torch on the probes."""
    half = job.graph.precision != "float32"
    if job.graph.engine == "openvino":
        from trundle.export.openvino import _write_openvino

        _write_openvino(job.traced, job.path, half=half)
    elif half:
        _write_float16(job.traced, job.path)
    else:
        job.path.parent.rmdir()
        job.traced.parent.rename(job.path.parent)
    closeness = _compare(_graph_vectors(job, probes), _torch_vectors(job.model, probes), probes)
    if closeness.lowest_cosine < (_HALF_COSINE if half else _FLOAT_COSINE):
        where = f"cosine {closeness.lowest_cosine:.4f} for {closeness.worst[:40]!r}"
        raise BadModel(f"{job.graph.precision} does not agree with torch ({where}); export in full precision")
    return job.with_facts(closeness.as_json()).graph, closeness


def _make_quantised(job: _GraphJob, options: ExportOptions) -> tuple[Graph, _Closeness]:
    """A quantised graph within the limits, with the fewest matmuls in float that this takes."""
    row = graph_format(job.graph.engine, job.graph.precision)
    calibration, measured = _split_texts(job.reader, options.calibrate)
    reference = _torch_vectors(job.exact, measured)
    samples: list[_Inputs] = []
    order: list[str] = []
    gains: _Gains = {}
    older_cpus = options.older_cpus
    if older_cpus is None and row.matmuls == "int8" and (older_cpus := _int8_overflows()):
        job.progress.say("int8 weights get 7 bits: with 8, matmuls can overflow on this processor")
    if row.matmuls == "int8":
        samples = _samples(job.traced, job.reader.read(_spread(calibration, _CALIBRATED_ON)))
        with job.progress.task("measuring the inputs of matmuls", None):
            # The matrices of int4 are scaled on loading, by the same gains, so these must be finite.
            split = row.weights == "int8"
            order, gains = _calibrated(job.traced, samples, samples[_PROBED], split=split)
    # onnxruntime quantises inputs per batch, so a text must not share one.
    alone = job.graph.engine == "onnx" and bool(order)
    job = replace(job, graph=replace(job.graph, one_by_one=alone))
    tried = []
    for keep in _tries(order):
        name = f"{row.precision}, {len(keep)} of {len(order)} matmuls in float" if order else row.precision
        with job.progress.task(name, None):
            _write(job, row, samples, gains, keep=keep, older_cpus=older_cpus)
            vectors = _graph_vectors(job, measured)
        closeness = _compare(vectors, reference, measured)
        agreement = _neighbour_agreement(vectors, reference)
        tried.append(f"cosine {closeness.mean_cosine:.4f}, agreement@{_NEIGHBOURS} {agreement:.1%}")
        job.progress.say(f"{name}: {tried[-1]} with the model it is made from")
        if options.limits.allow(row, cosine=1 - closeness.mean_cosine, agreement=1 - agreement):
            facts: dict[str, Any] = {**closeness.as_json(), f"agreement@{_NEIGHBOURS}": round(agreement, 4)}
            if row.matmuls == "int8":
                facts |= {"matmuls in float": keep, "bits of a weight": 7 if older_cpus else 8}
            return job.with_facts(facts).graph, closeness
    more = f"; with {len(keep)} of {len(order)} matmuls in float {tried[-1]}" if len(tried) > 1 else ""
    fix = "train with int4 first (trundle align … --rounding int4)" if row.weights == "int4" else "use --half"
    instead = ", use --int4 alone" if row.precision == "int4+int8" else ""
    raise BadModel(
        f"{row.precision} loses too much on these texts ({tried[0]}{more}), so nothing was written; "
        f"{fix}{instead}, or allow more with --max-cosine-loss and --max-agreement-loss"
    )


def _write(job: _GraphJob, row: GraphFormat, samples: Sequence[_Inputs], gains: _Gains, **how: Any) -> None:
    if row.engine == "openvino":
        from trundle.export.openvino import _write_openvino_int8

        _write_openvino_int8(job.traced, job.path, samples, **how)
    elif row.tokens == "int4":
        _write_int8_with_int4_tokens(job.traced, job.path, gains, tokens=token_rows(job.model), **how)
    elif row.weights == "int8":
        _write_int8(job.traced, job.path, gains, **how)
    elif row.matmuls == "int8":
        _write_int4_with_int8_matmuls(job.traced, job.path, gains, tokens=token_rows(job.model), **how)
    else:
        _write_int4(job.traced, job.path, tokens=token_rows(job.model))


def _graph_vectors(job: _GraphJob, texts: Sequence[str]) -> Vectors:
    """The vectors of texts without a prompt, by the graph as a user will run it."""
    (job.folder / FILE).write_text(job.description.with_graph(job.graph).as_text(), encoding="utf-8")
    return Encoder(job.folder).encode(texts, prompt="")


def _split_texts(reader: Reader, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The texts to calibrate on, and some of every second one to measure the loss on."""
    distinct = enough_texts(text for text, ids in zip(texts, reader.read(texts), strict=True) if ids)
    measured = _spread(distinct[1::2], _MEASURED_ON)
    taken = set(measured)
    return [text for text in distinct if text not in taken], measured


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` of the items, evenly spaced, so that all sources are among them."""
    return list(items[:: max(1, -(-len(items) // count))])


def _tries(worst: Sequence[str]) -> list[list[str]]:
    """The matmuls to keep in float in each try: none, the worst twentieth, then twice as many, up to half."""
    tries: list[list[str]] = [[]]
    count = max(1, len(worst) // 20)
    while count <= len(worst) // 2:
        tries.append(list(worst[:count]))
        count *= 2
    return tries


def _samples(traced: Path, rows: Sequence[Sequence[int]]) -> list[_Inputs]:
    """One input per text, without padding, by the names of the graph's inputs."""
    names = [each.name for each in onnx.load(traced, load_external_data=False).graph.input]
    samples: list[_Inputs] = []
    for row in rows:
        ids, mask = padded([row], len(row), 0)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        samples.append({name: inputs[name] for name in names})
    return samples

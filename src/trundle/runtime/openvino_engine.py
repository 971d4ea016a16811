"""A graph run by openvino."""

from __future__ import annotations

from pathlib import Path
from queue import LifoQueue

import numpy as np
import openvino

from trundle.embedder import Vectors
from trundle.errors import BadModel
from trundle.runtime.tokens import Ids

OUTPUT = "sentence_embedding"
INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class OpenVinoRun:
    """One compiled graph that can do `streams` runs at once, each on `threads` threads; further callers wait."""

    def __init__(self, path: Path, *, threads: int, streams: int, precision: str) -> None:
        core = openvino.Core()
        try:
            graph = core.read_model(path)
            vectors = graph.output(OUTPUT)
            self._inputs = [each.get_any_name() for each in graph.inputs]
            settings = {
                "INFERENCE_NUM_THREADS": threads * streams,
                "NUM_STREAMS": streams,
                # Without this every graph is silently run in bfloat16 where the processor can. Int8 graphs must
                # not be: openvino 2026.4 then gives wrong vectors (cosine 0.87) for texts padded to 32 tokens.
                "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
            }
            compiled = core.compile_model(openvino.Model([vectors], graph.get_parameters()), "CPU", settings)
        except Exception as error:  # openvino raises RuntimeError for everything
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"{path} is damaged or cut short ({reason}); export the model again") from error
        if not set(self._inputs) <= INPUTS:
            raise BadModel(f"{path} is no graph from texts to {OUTPUT}; export the model again")
        self._free: LifoQueue[openvino.InferRequest] = LifoQueue()
        for _ in range(streams):
            self._free.put(compiled.create_infer_request())

    def __call__(self, ids: Ids, mask: Ids) -> Vectors:
        """The vectors of one padded batch."""
        given = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            given["token_type_ids"] = np.zeros_like(ids)
        request = self._free.get()
        try:
            vectors: Vectors = request.infer(given, share_inputs=True)[0]
        finally:
            self._free.put(request)
        return vectors

"""A graph run by onnxruntime."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime

from trundle.embedder import Vectors
from trundle.errors import BadModel
from trundle.runtime.tokens import Ids

OUTPUT = "sentence_embedding"
INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class OnnxRun:
    """One session. Any number of callers may run it at once; each run uses `threads` threads."""

    def __init__(self, path: Path, *, threads: int, streams: int, precision: str) -> None:  # noqa: ARG002
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if threads > 1 else "0")
        # Matrices stored in int8 but multiplied in float: opened once, and never fused with rounded inputs.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime has a class per failure and no base but Exception
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"{path} is damaged or cut short ({reason}); export the model again") from error
        _give_back_memory()
        self._inputs = {each.name for each in self._session.get_inputs()}
        outputs = {each.name for each in self._session.get_outputs()}
        if OUTPUT not in outputs or not self._inputs <= INPUTS:
            raise BadModel(f"{path} is no graph from texts to {OUTPUT}; export the model again")

    def __call__(self, ids: Ids, mask: Ids) -> Vectors:
        """The vectors of one padded batch."""
        given = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._inputs:
            given["token_type_ids"] = np.zeros_like(ids)
        return cast("Vectors", self._session.run([OUTPUT], given)[0])


def _give_back_memory() -> None:
    """Let the system have what opening took and running does not need: where weights are stored in four bits, most of it.

    Only glibc has to be asked.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

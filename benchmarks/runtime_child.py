"""One contestant of `runtime.py engines` in a process of its own, which imports only what it needs.

    python benchmarks/runtime_child.py NAME FOLDER THREADS

It makes a first vector, then answers requests; the first answer marks the end of its start.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from trundle.bench.child import _latencies, _peak_memory, _until_closed

Encode = Callable[[Sequence[str]], Any]
BATCH = 32


def torch_encode(folder: Path, threads: int, dtype: str) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: model.encode(texts, batch_size=BATCH)


def plain_batches(folder: Path, run: Callable[[dict[str, Any]], Any], names: set[str]) -> Encode:
    """Encode as people write it by hand: sort by length, 32 at a time, padded to the longest."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(json.loads((folder / "encoder.json").read_text())["max_tokens"])

    def encode(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        parts = []
        for start in range(0, len(texts), BATCH):
            rows = tokenizer.encode_batch([texts[place] for place in order[start : start + BATCH]])
            ids = np.array([row.ids for row in rows])
            mask = np.array([row.attention_mask for row in rows])
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            parts.append(np.array(run({name: given[name] for name in names})))
        return np.concatenate(parts)[np.argsort(order)]

    return encode


def plain_onnxruntime(folder: Path, threads: int, _graph: str) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(folder / "plain.onnx"), options)
    names = {each.name for each in session.get_inputs()}
    return plain_batches(folder, lambda given: session.run(["sentence_embedding"], given)[0], names)


def plain_openvino(folder: Path, threads: int, _graph: str) -> Encode:
    import openvino

    compiled = openvino.Core().compile_model(folder / "plain.onnx", "CPU", {"INFERENCE_NUM_THREADS": threads})
    names = {each.get_any_name() for each in compiled.inputs}
    return plain_batches(folder, lambda given: compiled(given)["sentence_embedding"], names)


def fastembed_encode(folder: Path, threads: int, _graph: str) -> Encode:
    import numpy as np
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="plain",
        pooling=PoolingType.DISABLED,
        normalization=False,
        sources=ModelSource(hf="local/plain"),
        dim=json.loads((folder / "encoder.json").read_text())["dimensions"],
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding("plain", specific_model_path=str(folder), threads=threads)
    return lambda texts: np.array(list(model.embed(texts, batch_size=BATCH)))


def trundle_encode(folder: Path, threads: int, graph: str) -> Encode:
    from trundle.runtime.encoder import Encoder

    return Encoder(folder, graph=graph, threads=threads).encode


OPENERS = {
    "sentence-transformers": torch_encode,
    "onnxruntime": plain_onnxruntime,
    "fastembed": fastembed_encode,
    "openvino": plain_openvino,
    "trundle": trundle_encode,
}


def main() -> None:
    (kind, _, graph), folder, threads = sys.argv[1].partition(" "), Path(sys.argv[2]), int(sys.argv[3])
    encode = OPENERS[kind](folder, threads, graph)
    encode(["how do I keep my index?"])
    for line in _until_closed(sys.stdin):
        request = json.loads(line)
        texts, seconds = request["texts"], request["seconds"]
        if request["measure"] == "memory":
            value: float = _peak_memory()
        elif request["measure"].endswith("alone"):
            value = median(_latencies(encode, texts, seconds))
        else:
            done, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds or not done:
                encode(texts)
                done += len(texts)
            value = (time.perf_counter() - began) / done
        print(json.dumps({"value": value}), flush=True)


if __name__ == "__main__":
    main()

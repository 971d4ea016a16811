"""What bf16 brings a training on this machine, and what it costs: `align` of a model with every second layer gone.

    python benchmarks/precision.py MODEL --data texts.parquet [--steps 60] [--rounds 3] [--batch-size 32]

The rest learns the whole model's vectors, from the same start on the same batches, in float32 and in bf16. Rounds
alternate. What is learned is told by the distance on texts that are held out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.data.sampling import sample
from trundle.data.texts import read_texts
from trundle.methods.align.leaf import _make_loss
from trundle.model.encode import embedder, make_tokeniser
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.train.batches import Batches, ByLength
from trundle.train.loop import TrainingTask, TrainSettings, train
from trundle.train.trainer import _Precision

Batch = tuple[dict[str, Any], Tensor]
HELD_OUT = 512
WAYS: tuple[_Precision, ...] = ("fp32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True, nargs="+", help="files of texts")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    teacher = load(options.model)
    layers = layout_of(transformer_of(teacher).model).layers
    student = cut(teacher, Cut(blocks=tuple(range(1, layers, 2))))
    texts = sample(
        (text.text for text in read_texts(options.data)),
        options.steps * options.batch_size + HELD_OUT,
        seed=0,
    )
    targets = torch.from_numpy(embedder(teacher).text(texts))
    held_out = batches_of(teacher, texts[:HELD_OUT], targets[:HELD_OUT], options.batch_size)
    learned = batches_of(teacher, texts[HELD_OUT:], targets[HELD_OUT:], options.batch_size)
    speeds: dict[_Precision, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            speed, distance = trained(student, learned, held_out, way, options.steps)
            speeds[way].append(speed)
            print(f"round {number + 1}  {way} {speed:6.2f} steps/s   distance {distance:.4f}", flush=True)
    ratios = sorted(half / full for half, full in zip(speeds["bf16"], speeds["fp32"], strict=True))
    print(f"bf16: {statistics.median(ratios):.2f} × the steps of fp32  ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def batches_of(model: SentenceTransformer, texts: list[str], targets: Tensor, size: int) -> Batches[Batch]:
    tokenise = make_tokeniser(model)

    def load_batch(places: Any) -> Batch:
        return tokenise([texts[place] for place in places]), targets[places]

    return Batches(order=ByLength([len(text) for text in texts], batch_size=size), load=load_batch)


def trained(
    student: SentenceTransformer,
    learned: Batches[Batch],
    held_out: Batches[Batch],
    way: _Precision,
    steps: int,
) -> tuple[float, float]:
    """Steps a second, and how far the student ended from its teacher."""
    mine = copy.deepcopy(student)
    settings = TrainSettings(
        steps=steps,
        learning_rate=1e-4,
        warmup=steps // 10,
        precision=way,
        dropout=False,
        validate_every=steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            mine,
            TrainingTask(losses=[_make_loss()], batches=learned, validation=held_out),
            settings,
            folder=Path(folder),
        )
    return steps / result.seconds, result.validation or float("nan")


if __name__ == "__main__":
    main()

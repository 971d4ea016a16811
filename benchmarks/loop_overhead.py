"""What the training loop costs beside a bare torch loop.

    python benchmarks/loop_overhead.py MODEL_FOLDER [--steps 40] [--rounds 7] [--batch-size 32] [--precision fp32]

Both train the model on the same batches, with the same forward, loss, backward, clipping and optimizer. The
bare loop finds its batches tokenised and on the device; the loop of trundle tokenises while it trains, records its
losses and writes its metrics. Rounds alternate, the medians are compared: wanted is a ratio of 0.9 or more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.methods.align.leaf import _leaf
from trundle.model.encode import make_tokeniser
from trundle.train.batches import Batches, ByLength
from trundle.train.loop import TrainingTask, TrainSettings, train

Batch = tuple[dict[str, Any], Tensor]
WORDS = ("shrink", "any", "text", "embedding", "model", "and", "keep", "your", "index")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    model = SentenceTransformer(options.model)
    rounds = [one_round(model, options, number) for number in range(options.rounds + 1)][
        1:
    ]  # the first warms up
    speeds = [statistics.median(speed) for speed in zip(*rounds, strict=True)]
    ratios = sorted(ours / theirs for theirs, ours in rounds)
    print(f"bare torch loop  {speeds[0]:8.2f} steps/s")
    print(f"trundle's loop   {speeds[1]:8.2f} steps/s")
    print(f"ratio            {statistics.median(ratios):8.3f}  (rounds: {ratios[0]:.3f} to {ratios[-1]:.3f})")


def one_round(model: SentenceTransformer, options: argparse.Namespace, number: int) -> tuple[float, float]:
    """Steps per second of both on the same batches; they take turns in going first."""
    batches = some_batches(model, options, number)
    if number % 2:
        ours = looped(model, batches, options)
        return bare(model, batches, options), ours
    return bare(model, batches, options), looped(model, batches, options)


def some_batches(model: SentenceTransformer, options: argparse.Namespace, seed: int) -> Batches[Batch]:
    """Texts of 5 to 60 words with random vectors for targets."""
    rng = np.random.default_rng(seed)
    texts = [
        " ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(options.steps * options.batch_size)
    ]
    width = model.get_embedding_dimension() or 0
    targets = torch.from_numpy(rng.normal(size=(len(texts), width)).astype(np.float32))
    tokenise = make_tokeniser(model)
    order = ByLength([len(text) for text in texts], batch_size=options.batch_size)
    return Batches(
        order=order,
        load=lambda indices: (tokenise([texts[index] for index in indices]), targets[indices]),
    )


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return _leaf(model(batch[0])["sentence_embedding"], batch[1])


def bare(model: SentenceTransformer, batches: Batches[Batch], options: argparse.Namespace) -> float:
    """Steps per second of the plainest loop there is."""
    device = model.device
    ready = []
    for step in range(options.steps):
        features, targets = batches.load(batches.order.batch(step))
        moved = {
            name: value.to(device) if torch.is_tensor(value) else value for name, value in features.items()
        }
        ready.append((moved, targets.to(device)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model.train()
    began = time.perf_counter()
    for batch in ready:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bf16"):
            loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    loss.item()
    return float(options.steps / (time.perf_counter() - began))


def looped(model: SentenceTransformer, batches: Batches[Batch], options: argparse.Namespace) -> float:
    """Steps per second of trundle's loop, from its first batch to its result."""
    settings = TrainSettings(steps=options.steps, learning_rate=1e-5, precision=options.precision)
    with tempfile.TemporaryDirectory() as folder:
        result = train(model, TrainingTask(losses=[loss_of], batches=batches), settings, folder=Path(folder))
    return float(options.steps / result.seconds)


if __name__ == "__main__":
    main()

"""What processes that each hold texts of their own make together: none of them could hold all of them.

Every process brings an nth of every batch, out of its own texts. A text comes as often as it would with one process, and
a batch is as large; only which texts meet in a batch is another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from numpy.typing import ArrayLike, NDArray

from trundle.train.batches import Batches, ByLength, Indices, batch_count, epoch_size, even_bounds

B = TypeVar("B")
T = TypeVar("T")


def batches_of_shares(
    lengths: ArrayLike,
    load: Callable[[Indices], B],
    *,
    batch_size: int,
    seed: int,
    kinds: NDArray[Any],
    weights: Sequence[float],
) -> Batches[B]:
    """The batches of this process; all processes must call this together."""
    everyone = of_all_processes([epoch_size(kinds, weights)])
    count = batch_count(sum(everyone), min(batch_size, sum(everyone)))
    order = ByLength(lengths, batch_size=batch_size, seed=seed, kinds=kinds, weights=weights, batches=count)
    bounds = [even_bounds(texts, count) for texts in everyone]

    def size(number: int) -> int:
        place = order.place(number)
        return sum(int(bound[place + 1] - bound[place]) for bound in bounds)

    return Batches(order=order, load=load, size=size)


def of_all_processes(own: list[T]) -> list[T]:
    """What each process has, in the order of processes, the same for all; all processes must call this together."""
    PartialState(cpu=not torch.accelerator.is_available())
    everyone: list[T] = gather_object(own)
    return everyone


def rows_of_all_processes(own: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows of all processes, for what is too small a matter to be computed from one process's texts alone."""
    return np.concatenate(of_all_processes([own]))

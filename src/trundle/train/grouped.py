"""Batches that never mix groups, such as the data files examples come from.

In a batch of one source every other document is a fair rival; in a mixed one a model could tell the right one by its
style alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trundle.errors import BadInput
from trundle.train.batches import Indices, batch_bounds


class ByGroup:
    """Each item once per epoch, in batches of one group each; both are shuffled anew in every epoch."""

    def __init__(self, groups: ArrayLike, *, batch_size: int, seed: int = 0) -> None:
        if batch_size < 1 or seed < 0:
            raise BadInput(f"batch size {batch_size} with seed {seed} can't be used; take at least 1 and 0")
        kinds = np.asarray(groups)
        if not len(kinds):
            raise BadInput("there is nothing to make batches of; give at least one example")
        self._seed = seed
        self._members: list[Indices] = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        self._bounds = [batch_bounds(len(members), batch_size) for members in self._members]
        self._places = [
            (group, place) for group, bounds in enumerate(self._bounds) for place in range(len(bounds) - 1)
        ]
        self._epoch = -1
        self._shuffled: list[Indices] = []

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        return len(self._places)

    def batch(self, number: int) -> Indices:
        """The items of one batch; the shuffle of its epoch is kept until another epoch is asked for."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._shuffled = [rng.permutation(members) for members in self._members]
            self._order = rng.permutation(self.per_epoch)
            self._epoch = epoch
        group, at = self._places[self._order[place]]
        members, bounds = self._shuffled[group], self._bounds[group]
        chosen: Indices = members[bounds[at] : bounds[at + 1]]
        return chosen

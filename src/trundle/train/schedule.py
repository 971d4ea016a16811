"""The learning rate as a pure function of the step.

A shape says what share of the peak rate a step gets, from the step and the number of steps alone. So a run that is
resumed, or refitted to the minutes that are left, asks again and gets the right rate without any state.
"""

from __future__ import annotations

from collections.abc import Callable

Shape = Callable[[int, int], float]
"""(step, steps) → share of the peak learning rate; steps count from 0, the last is steps − 1."""


def constant(step: int, steps: int) -> float:  # noqa: ARG001
    """The peak rate all the way."""
    return 1.0


def linear(*, end: float = 0.0) -> Shape:
    """A straight line from the peak down to `end` of it at the very last step."""

    def shape(step: int, steps: int) -> float:
        return 1.0 + (end - 1.0) * step / max(1, steps - 1)

    return shape


def leaf_cycles(epoch_steps: int, *, epochs: int = 10, cycles: int = 3, end: float = 0.1) -> Shape:
    """LEAF's saw: down to `end` over `epochs` epochs, one stair per epoch, then back up, `cycles` times.

    Another number of steps gets the nearest number of whole cycles, stretched, so that it always ends low. A run
    shorter than one cycle has too few epochs for stairs and goes down a little at every step.
    """
    descent = linear(end=end)

    def shape(step: int, steps: int) -> float:
        cycle_steps = epochs * epoch_steps
        if steps < cycle_steps:
            return descent(step, steps)
        fitting = min(cycles, round(steps / cycle_steps))
        cycle = step * fitting // steps
        first, after = (-(-number * steps // fitting) for number in (cycle, cycle + 1))
        stairs = round((after - first) / epoch_steps)
        return descent((step - first) * stairs // (after - first), stairs)

    return shape


def learning_rate(step: int, steps: int, *, peak: float, warmup: int, shape: Shape) -> float:
    """The rate of one step: up in a straight line during the warm-up, then the shape over the steps that follow.

    A run too short for its warm-up spends half of itself on it.
    """
    warmup = min(warmup, steps // 2)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * shape(step - warmup, steps - warmup)


def steps_that_fit(done: int, *, seconds_left: float, seconds_per_step: float) -> int:
    """How many steps there are in all, if the time that is left is used up at the present speed."""
    return done + max(0, int(seconds_left / max(seconds_per_step, 1e-9)))

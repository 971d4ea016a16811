"""A curve drawn in characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROWS = 13
WIDEST = 3
COLUMNS = 96
THIRDS = len("▔─▁")
"""Each row shows three heights."""


def curve(losses: Sequence[float], marks: Mapping[int, str]) -> list[str]:
    """Losses as short strokes over their layers, 1 to L; the marked ones are bold, and named below the axis."""
    low, high = min(losses), max(losses)
    step = max(1, min(WIDEST, COLUMNS // len(losses)))
    grid = [[" "] * (step * len(losses)) for _ in range(ROWS)]
    for layer, loss in enumerate(losses, start=1):
        share = (high - loss) / (high - low) if high > low else 0.5
        row, third = divmod(round(share * (ROWS * THIRDS - 1)), THIRDS)
        stroke = ("▀■▄" if layer in marks else "▔─▁")[third]
        grid[row][step * (layer - 1) : step * layer] = stroke * max(1, step - 1) + " " * (step > 1)
    names = {0: f"{high:.3f}", ROWS // 2: f"{(low + high) / 2:.3f}", ROWS - 1: f"{low:.3f}"}
    wide = max(map(len, names.values()))
    lines = [f"{names.get(row, ''):>{wide}} ┤ {''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    lines.append(f"{'':>{wide}} └─{'─' * (step * len(losses))}")
    margin = " " * (wide + 3)
    ends = "1" if len(losses) == 1 else f"1{len(losses):>{step * (len(losses) - 1)}}"
    return [*lines, margin + ends, *(margin + line for line in _names(marks, step, len(losses)))]


def _names(marks: Mapping[int, str], step: int, layers: int) -> list[str]:
    """Each mark on a line of its own, with an arrow under its layer."""
    lines = []
    for layer, name in sorted(marks.items()):
        place, words = step * (layer - 1), f"{name}: {layer}"
        fits_before = 2 * layer > layers and len(words) < place
        lines.append(f"{words:>{place - 1}} ↑" if fits_before else f"{' ' * place}↑ {words}")
    return lines

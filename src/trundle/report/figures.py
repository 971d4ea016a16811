"""Numbers as a person reads them: a unit, and no more digits than mean something."""

from __future__ import annotations

NOTHING = "–"


def short(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def megabytes(value: float | None) -> str:
    """Bytes; 1 MB is a million."""
    if value is None:
        return NOTHING
    return (
        f"{short(value / 1e9)} GB"
        if value >= 1e9
        else f"{short(value / 1e6)} MB"
        if value >= 1e5
        else f"{short(value / 1e3)} kB"
    )


def count(value: float | None) -> str:
    """A number of parameters or tokens."""
    if value is None:
        return NOTHING
    if value >= 1e9:
        return f"{short(value / 1e9)}B"
    return f"{short(value / 1e6)}M" if value >= 1e6 else f"{value:,.0f}"


def numbered(number: int, one: str, many: str) -> str:
    """So many of something, in words that fit."""
    return f"{number:,} {one if number == 1 else many}"


def milliseconds(value: float | None) -> str:
    """A short time."""
    return NOTHING if value is None else f"{short(value)} ms"


def percent(share: float | None) -> str:
    """A share of 1."""
    return NOTHING if share is None else f"{100 * share:.1f}%"


def thousandths(value: float | None) -> str:
    """A cosine or a distance."""
    return NOTHING if value is None else f"{value:.3f}"


def rate(value: float | None) -> str:
    """So many a second."""
    return NOTHING if value is None else short(value)


def times(large: float | None, small: float | None) -> str:
    """How many times smaller or faster."""
    if not large or not small:
        return NOTHING
    return f"{short(large / small)}×"


def tick_bytes(value: float) -> str:
    """A round size on an axis."""
    return (
        f"{value / 1e9:g} GB"
        if value >= 1e9
        else f"{value / 1e6:g} MB"
        if value >= 1e5
        else f"{value / 1e3:g} kB"
    )


def tick_milliseconds(value: float) -> str:
    """A round time on an axis."""
    return f"{value:g} ms"


def plain(value: float) -> str:
    """A number on an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def one_line(text: str, longest: int) -> str:
    """The beginning of a text, without its line breaks."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1].rstrip() + "…"

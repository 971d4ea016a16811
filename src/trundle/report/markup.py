"""Pieces of a page. Whatever comes from outside passes through `escape` here or in the drawings, and nowhere is it left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A part of the page: its name in the contents, its heading, and what stands below it."""

    key: str
    heading: str
    body: str


def _table(
    rows: Sequence[Sequence[str]],
    *,
    texts: Sequence[int] = (0,),
    bold: Sequence[int] = (),
    colours: Sequence[str] = (),
) -> str:
    """Plain cells under a heading; a second line of a cell is smaller, and stands beside the first where there is room.

    `texts` are the columns read from the left, `bold` the rows that stand out, `colours` the classes of the headings.
    """

    def cell(text: str, number: int, tag: str) -> str:
        kinds = ["text"] if number in texts else []
        kinds += [colours[number]] if tag == "th" and number < len(colours) and colours[number] else []
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        first, _, second = text.partition("\n")
        below = f"<small>{escape(second)}</small>" if second else ""
        return f"<{tag}{kind}>{escape(first)}{below}</{tag}>"

    def line(row: Sequence[str], tag: str) -> str:
        return "".join(cell(text, number, tag) for number, text in enumerate(row))

    heading, *body = rows
    lines = "".join(
        f"<tr{' class=bold' if number in bold else ''}>{line(row, 'td')}</tr>"
        for number, row in enumerate(body)
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{line(heading, "th")}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figure(picture: str, caption: str = "", *, heading: str = "") -> str:
    """A picture with a line above and a line below it; both are plain text."""
    above = f"<h3>{escape(heading)}</h3>" if heading else ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{above}{picture}{below}</figure>"


def _side_by_side(parts: Sequence[str]) -> str:
    """Figures beside each other where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>'


def _paragraph(text: str, kind: str = "") -> str:
    """A plain sentence or two."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def _code(text: str) -> str:
    """Lines to copy."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def _choice(label: str, blocks: Sequence[tuple[str, str]]) -> str:
    """Blocks of which one is shown at a time, by name; all of them, one below the other, where scripts don't run."""
    if len(blocks) == 1:
        return blocks[0][1]
    inside = "".join(
        f'<div class="option" data-name="{escape(name)}"><h3>{escape(name)}</h3>{body}</div>'
        for name, body in blocks
    )
    return f'<div class="choice" data-label="{escape(label)}">{inside}</div>'


_NOTHING = "–"


def _short(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def _megabytes(value: float | None) -> str:
    """Bytes; 1 MB is a million."""
    if value is None:
        return _NOTHING
    return (
        f"{_short(value / 1e9)} GB"
        if value >= 1e9
        else f"{_short(value / 1e6)} MB"
        if value >= 1e5
        else f"{_short(value / 1e3)} kB"
    )


def _count(value: float | None) -> str:
    """A number of parameters or tokens."""
    if value is None:
        return _NOTHING
    if value >= 1e9:
        return f"{_short(value / 1e9)}B"
    return f"{_short(value / 1e6)}M" if value >= 1e6 else f"{value:,.0f}"


def _numbered(number: int, one: str, many: str) -> str:
    """So many of something, in words that fit."""
    return f"{number:,} {one if number == 1 else many}"


def _milliseconds(value: float | None) -> str:
    """A short time."""
    return _NOTHING if value is None else f"{_short(value)} ms"


def _percent(share: float | None) -> str:
    """A share of 1."""
    return _NOTHING if share is None else f"{100 * share:.1f}%"


def _thousandths(value: float | None) -> str:
    """A cosine or a distance."""
    return _NOTHING if value is None else f"{value:.3f}"


def _rate(value: float | None) -> str:
    """So many a second."""
    return _NOTHING if value is None else _short(value)


def _times(large: float | None, small: float | None) -> str:
    """How many times smaller or faster."""
    if not large or not small:
        return _NOTHING
    return f"{_short(large / small)}×"


def _tick_bytes(value: float) -> str:
    """A round size on an axis."""
    return (
        f"{value / 1e9:g} GB"
        if value >= 1e9
        else f"{value / 1e6:g} MB"
        if value >= 1e5
        else f"{value / 1e3:g} kB"
    )


def _tick_milliseconds(value: float) -> str:
    """A round time on an axis."""
    return f"{value:g} ms"


def _plain(value: float) -> str:
    """A number on an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _one_line(text: str, longest: int) -> str:
    """The beginning of a text, without its line breaks."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1].rstrip() + "…"

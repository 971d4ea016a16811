"""HTML elements and number formats of the page. Every text from outside is escaped here or in a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def _table(
    rows: Sequence[Sequence[str]],
    *,
    texts: Sequence[int] = (0,),
    bold: Sequence[int] = (),
    colours: Sequence[str] = (),
) -> str:
    """Draw a table; the first row is the heading, and the second line of a cell is set smaller.

    `texts` are the left-aligned columns, `bold` the emphasised rows, `colours` the classes of the heading.
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
    head = f"<thead><tr>{line(heading, 'th')}</tr></thead>"
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>{lines}</tbody></table></div>'


def _figure(picture: str, caption: str = "", *, heading: str = "") -> str:
    """Wrap an SVG in a figure with a heading and a caption, both plain text."""
    above = f"<h3>{escape(heading)}</h3>" if heading else ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{above}{picture}{below}</figure>"


def _grid(parts: Sequence[str]) -> str:
    """Place parts in columns if the screen is wide enough."""
    return f'<div class="grid">{"".join(parts)}</div>'


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def _code(text: str) -> str:
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def _choice(label: str, blocks: Sequence[tuple[str, str]]) -> str:
    """Show one of several named blocks at a time; without scripts, all of them."""
    if len(blocks) < 2:
        return "".join(body for _, body in blocks)
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


def _byte_unit(value: float) -> tuple[float, str]:
    return (1e9, "GB") if value >= 1e9 else (1e6, "MB") if value >= 1e5 else (1e3, "kB")


def _megabytes(value: float | None) -> str:
    """A size in bytes; 1 MB is a million bytes."""
    if value is None:
        return _NOTHING
    size, unit = _byte_unit(value)
    return f"{_short(value / size)} {unit}"


def _count(value: float | None) -> str:
    """A number of parameters or tokens."""
    if value is None:
        return _NOTHING
    if value >= 1e9:
        return f"{_short(value / 1e9)}B"
    return f"{_short(value / 1e6)}M" if value >= 1e6 else f"{value:,.0f}"


def _numbered(number: int, one: str, many: str) -> str:
    """A number and its noun in singular or plural."""
    return f"{number:,} {one if number == 1 else many}"


def _milliseconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{_short(value)} ms"


def _percent(share: float | None) -> str:
    """A share of 1."""
    return _NOTHING if share is None else f"{100 * share:.1f}%"


def _thousandths(value: float | None) -> str:
    """A cosine or a distance."""
    return _NOTHING if value is None else f"{value:.3f}"


def _times(large: float | None, small: float | None) -> str:
    """The ratio of two figures."""
    return f"{_short(large / small)}×" if large and small else _NOTHING


def _tick_bytes(value: float) -> str:
    """A round size on an axis."""
    size, unit = _byte_unit(value)
    return f"{value / size:g} {unit}"


def _plain(value: float) -> str:
    """A number on an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _one_line(text: str, longest: int) -> str:
    """The beginning of a text, without its line breaks."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1].rstrip() + "…"

"""Pieces of a page. Whatever comes from outside passes through `escape` here or in the drawings, and nowhere is it left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: its name in the contents, its heading, and what stands below it."""

    key: str
    heading: str
    body: str


def table(
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


def figure(picture: str, caption: str = "", *, heading: str = "") -> str:
    """A picture with a line above and a line below it; both are plain text."""
    above = f"<h3>{escape(heading)}</h3>" if heading else ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{above}{picture}{below}</figure>"


def side_by_side(parts: Sequence[str]) -> str:
    """Figures beside each other where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>'


def paragraph(text: str, kind: str = "") -> str:
    """A plain sentence or two."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def code(text: str) -> str:
    """Lines to copy."""
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'


def choice(label: str, blocks: Sequence[tuple[str, str]]) -> str:
    """Blocks of which one is shown at a time, by name; all of them, one below the other, where scripts don't run."""
    if len(blocks) == 1:
        return blocks[0][1]
    inside = "".join(
        f'<div class="option" data-name="{escape(name)}"><h3>{escape(name)}</h3>{body}</div>'
        for name, body in blocks
    )
    return f'<div class="choice" data-label="{escape(label)}">{inside}</div>'

"""HTML elements, number formats and plots of the page. Every text from outside is escaped here.

A plot is an SVG with two axes, ticks and marks; its classes get their colours from page.css. It is as wide as
a phone can show at a readable size; a large screen shows two of them next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from html import escape

from trundle.report.contents import _Point

_WIDTH, _HEIGHT = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 16, 14, 48
_LABEL = 20
"""Space above for the label of the vertical axis."""
_LETTER = 7.8
"""Approximate width of a bold letter."""
_LINE = 16.0
_TICKS = 5
_FEWEST_TICKS = 3
_COLOURS = 8
_STEPS = (1, 2, 5, 10)
_SIDES = ("right", "left", "above", "below")


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
    size, unit = _byte_unit(value or 0)
    return _NOTHING if value is None else f"{_short(value / size)} {unit}"


def _count(value: float | None) -> str:
    """A number of parameters or tokens."""
    if value is None or value < 1e6:
        return _NOTHING if value is None else f"{value:,.0f}"
    return f"{_short(value / 1e9)}B" if value >= 1e9 else f"{_short(value / 1e6)}M"


def _numbered(number: int, one: str, many: str) -> str:
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
    return f"{_short(large / small)}×" if large and small else _NOTHING


def _tick_bytes(value: float) -> str:
    size, unit = _byte_unit(value)
    return f"{value / size:g} {unit}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _one_line(text: str, longest: int) -> str:
    """The beginning of a text, without its line breaks."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1].rstrip() + "…"


@dataclass(frozen=True)
class _Axis:
    label: str
    low: float
    high: float
    _: KW_ONLY
    write: Callable[[float], str] = _plain
    log: bool = False
    at: tuple[float, ...] | None = None
    """The ticks, if not at round values."""
    whole: bool = False
    """Whether the values are whole numbers, such as steps."""

    def share(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = math.log(value) if self.log else value
        return (place - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[float]:
        if self.at is not None:
            return list(self.at)
        inside: list[float] = []
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [step * 10.0**power for power in powers for step in _STEPS[:3]]
            inside = [value for value in found if self.low <= value <= self.high]
        if len(inside) < _FEWEST_TICKS:
            step = _round_step(self.high - self.low)
            step = max(1.0, step) if self.whole else step
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [number * step for number in range(first, last + 1)]
        whole = [value for value in inside if math.log10(value) == round(math.log10(value))]
        return whole if len(inside) > 8 and len(whole) > 1 else inside


def _round_step(span: float) -> float:
    rough = (span or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * 0.999)


def _around(values: Sequence[float], *, room: float = 0.08, least: float = 0.0) -> tuple[float, float]:
    """Return the ends of an axis, with some space beyond the values."""
    low, high = min(values), max(values)
    span = max(high - low, least) or abs(high) or 1.0
    return low - room * span, high + room * span


def _around_log(values: Sequence[float], room: float = 0.12) -> tuple[float, float]:
    """Do the same for a logarithmic axis; a single value is placed in the middle of a factor of four."""
    low, high = math.log(min(values)), math.log(max(values))
    span = (high - low) or math.log(4)
    return math.exp(low - room * span), math.exp(high + room * span)


@dataclass
class _Plot:
    """A plot; draw the marks first, then their names, then take `svg()`."""

    title: str
    across: _Axis
    up: _Axis
    _: KW_ONLY
    right: int = _RIGHT
    height: int = _HEIGHT
    _marks: list[str] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - self.right) * self.across.share(value)

    def y(self, value: float) -> float:
        return self._top + (self.height - self._top - _BOTTOM) * (1 - self.up.share(value))

    @property
    def _top(self) -> int:
        return _TOP + (_LABEL if self.up.label else 0)

    def line(self, points: Sequence[_Point], kind: str) -> None:
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {kind}" points="{places}"/>')

    def link(self, begin: _Point, end: _Point, kind: str) -> None:
        (x1, y1), (x2, y2) = begin, end
        places = f'x1="{self.x(x1):.1f}" y1="{self.y(y1):.1f}" x2="{self.x(x2):.1f}" y2="{self.y(y2):.1f}"'
        self._marks.append(f'<line class="{kind}" {places}/>')

    def dot(self, point: _Point, kind: str, *, size: float = 5, says: str = "", stop: bool = True) -> None:
        """Draw a dot; `says` is its tooltip, on hover and, with `stop`, on keyboard focus."""
        x, y = self.x(point[0]), self.y(point[1])
        self._taken.append((x - size, y - size, x + size, y + size))
        about = f"<title>{escape(says)}</title>" if says else ""
        kind = f"mark {kind}" if says else kind
        focus = 'tabindex="0" ' if says and stop else ""
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"'
        self._marks.append(f'<circle {focus}class="{kind}" {place}>{about}</circle>')

    def bar(self, low: float, high: float, value: float, kind: str, *, says: str) -> None:
        """Draw a bar on the horizontal axis between two of its values."""
        left, wide = self.x(low) + 0.5, self.x(high) - self.x(low) - 1
        top, base = self.y(value), self.height - _BOTTOM
        box = f'x="{left:.1f}" width="{wide:.1f}" y="{top:.1f}" height="{base - top:.1f}"'
        self._marks.append(f'<rect class="mark bar {kind}" {box}><title>{escape(says)}</title></rect>')

    def limit(self, value: float, says: str) -> None:
        """Draw a vertical line with a name, such as a budget."""
        x = self.x(value)
        self.link((value, self.up.low), (value, self.up.high), "limit")
        left = x > _WIDTH / 2
        wide, tall = _LETTER * len(says), self.height - _BOTTOM - self._top
        edge = x - 5 - wide if left else x + 5
        heights = [self._top + share * tall for share in (0.22, 0.4, 0.6, 0.8)]
        free = [y for y in heights if self._is_free((edge, y - 12, edge + wide, y + 4))]
        top = (free or heights)[0]
        self._taken.append((edge, top - 12, edge + wide, top + 4))
        self._text(x - 5 if left else x + 5, top, says, "limit-name", "end" if left else "start")

    def level(self, value: float, kind: str) -> None:
        self.link((self.across.low, value), (self.across.high, value), kind)

    def name(
        self, point: _Point, says: str, kind: str, *, size: float = 6, where: Sequence[str] = _SIDES
    ) -> None:
        """Write a name next to a mark, at the first of the places `where` that is free."""
        x, y = self.x(point[0]), self.y(point[1])
        wide = _LETTER * len(says)
        gap = size + 4
        above, below = (y - gap - 2, y - gap - 16, y - gap), (y + gap + 11, y + gap - 3, y + gap + 14)
        places = {
            "right": (x + gap, y + 5, "start", (x + gap, y - 9, x + gap + wide, y + 8)),
            "left": (x - gap, y + 5, "end", (x - gap - wide, y - 9, x - gap, y + 8)),
            "above": (x, above[0], "middle", (x - wide / 2, above[1], x + wide / 2, above[2])),
            "below": (x, below[0], "middle", (x - wide / 2, below[1], x + wide / 2, below[2])),
        }
        wanted = [places[place] for place in where]
        edge, anchor = (_WIDTH - 4, "end") if x > _WIDTH / 2 else (_LEFT + 4, "start")
        begin, end = (edge - wide, edge) if anchor == "end" else (edge, edge + wide)
        if begin - 4 <= x <= end + 4:
            for text, top, bottom in (above, below):
                wanted.append((edge, text, anchor, (begin, top, end, bottom)))
        free = [place for place in wanted if self._is_free(place[3])]
        left, top, anchor, box = (free or wanted)[0]
        self._taken.append(box)
        self._text(left, top, says, kind, anchor)

    def names_at_the_end(self, ends: Sequence[tuple[float, str, str]]) -> None:
        """Write names of lines (value, name, class) to the right of their ends, moved apart if they touch."""
        wanted = sorted((self.y(value), says, kind) for value, says, kind in ends)
        for top, (_, says, kind) in zip(_spread([y for y, _, _ in wanted], _LINE), wanted, strict=True):
            self._text(_WIDTH - self.right + 6, top + 5, says, kind, "start")

    def svg(self) -> str:
        wide, base = _WIDTH - self.right, self.height - _BOTTOM
        frame = []

        def label(kind: str, place: str, says: str) -> None:
            frame.append(f'<text class="{kind}" {place}>{escape(says)}</text>')

        for value in self.up.ticks():
            y = self.y(value)
            frame.append(f'<line class="rule" x1="{_LEFT}" x2="{wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
            label("tick", f'text-anchor="end" x="{_LEFT - 8}" y="{y + 5:.1f}"', self.up.write(value))
        last = -math.inf
        for value in self.across.ticks():
            x, says = self.x(value), self.across.write(value)
            half = _LETTER * len(says) / 2
            if x - half > last + 6:
                last = x + half
                frame.append(f'<line class="stub" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
                middle = min(x, _WIDTH - half)
                label("tick", f'text-anchor="middle" x="{middle:.1f}" y="{base + 19}"', says)
        frame.append(f'<line class="base" x1="{_LEFT}" x2="{wide}" y1="{base}" y2="{base}"/>')
        middle = (_LEFT + wide) / 2
        label("axis", f'text-anchor="middle" x="{middle:.0f}" y="{self.height - 8}"', self.across.label)
        if self.up.label:
            label("axis", 'x="4" y="15"', self.up.label)
        return _svg(_WIDTH, self.height, self.title, [*frame, *self._marks, *self._texts])

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        inside = left >= _LEFT - 4 and right <= _WIDTH - 2
        inside = inside and top >= self._top - 8 and bottom <= self.height - _BOTTOM + 4
        return inside and not any(
            left < r and right > x and top < b and bottom > y for x, y, r, b in self._taken
        )

    def _text(self, x: float, y: float, says: str, kind: str, anchor: str) -> None:
        self._texts.append(
            f'<text class="name {kind}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(says)}</text>'
        )


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {size} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending positions as little as needed to be `gap` apart."""
    groups: list[tuple[list[float], float]] = []
    for place in places:
        members, middle = [place], place
        while groups and groups[-1][1] + gap * len(groups[-1][0]) / 2 > middle - gap * len(members) / 2:
            members = groups.pop()[0] + members
            middle = sum(members) / len(members)
        groups.append((members, middle))
    return [
        middle + gap * (number - (len(members) - 1) / 2)
        for members, middle in groups
        for number in range(len(members))
    ]


def _room_for(names: Sequence[str]) -> int:
    return math.ceil(_RIGHT + _LETTER * max(map(len, names), default=0))


def _colour(number: int) -> str:
    """Return the class of the n-th run."""
    return f"c{number % _COLOURS}"

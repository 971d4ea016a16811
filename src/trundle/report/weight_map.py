"""What was pruned, as a picture: the share that is left by layer and matrix, and how far the two sides' gradients agree.

SVGs that stand alone, and a page around them. Light or dark as the reader's screen is.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trundle.report.layer_curve import DARK, LIGHT, page

if TYPE_CHECKING:
    from trundle.measure import WeightMap

ROW, COLUMN = 30, 118
LEFT, TOP, RIGHT = 70, 40, 20
CHART_WIDTH, CHART_HEIGHT, CHART_BOTTOM = 760, 240, 44


def heat_svg(drawn: WeightMap) -> str:
    """One row a layer, one column a matrix: the fuller the colour, the more is left."""
    names = list(dict.fromkeys(one.matrix for one in drawn.matrices))
    layers = sorted({one.layer for one in drawn.matrices})
    width, height = LEFT + COLUMN * len(names) + RIGHT, TOP + ROW * len(layers) + 12
    parts = [f'<rect class="paper" width="{width}" height="{height}"/>']
    for place, name in enumerate(names):
        x = LEFT + COLUMN * (place + 0.5)
        short = name.split(".", 1)[-1] if len(name) > 16 else name
        parts.append(
            f'<text class="faint" text-anchor="middle" x="{x:.0f}" y="{TOP - 14}">{escape(short)}</text>'
        )
    for place, layer in enumerate(layers):
        y = TOP + ROW * (place + 0.5) + 5
        parts.append(
            f'<text class="faint" text-anchor="end" x="{LEFT - 10}" y="{y:.0f}">layer {layer}</text>'
        )
    for one in drawn.matrices:
        x, y = LEFT + COLUMN * names.index(one.matrix), TOP + ROW * layers.index(one.layer)
        share = one.kept / one.weights
        box = f'x="{x + 1}" y="{y + 1}" width="{COLUMN - 2}" height="{ROW - 2}" rx="3"'
        about = f"layer {one.layer}, {escape(one.matrix)}: {one.kept:,} of {one.weights:,} weights are left"
        parts.append(f'<rect class="cell" {box}/>')
        parts.append(f'<rect class="heat" {box} fill-opacity="{share:.3f}"><title>{about}</title></rect>')
        ink = "over" if share > 0.55 else "ink"
        parts.append(
            f'<text class="{ink}" text-anchor="middle" x="{x + COLUMN / 2:.0f}" y="{y + ROW / 2 + 5:.0f}">{share:.1%}</text>'
        )
    return _svg(width, height, "share of the weights that are left, by layer and matrix", parts)


def alignment_svg(drawn: WeightMap) -> str:
    """How many weights lie in rows of each cosine between the two sides' mean gradients."""
    found = drawn.alignment
    if found is None:
        return ""
    wide, tall = CHART_WIDTH - LEFT - RIGHT, CHART_HEIGHT - TOP - CHART_BOTTOM
    bins, most, total = len(found.counts), max(found.counts) or 1, sum(found.counts) or 1
    parts = [f'<rect class="paper" width="{CHART_WIDTH}" height="{CHART_HEIGHT}"/>']
    for place, count in enumerate(found.counts):
        low = -1 + 2 * place / bins
        kind = "shared" if low >= 0.1 else "conflict" if low + 2 / bins <= -0.1 else "specific"
        size = tall * count / most
        box = f'x="{LEFT + wide * place / bins + 1:.1f}" width="{wide / bins - 2:.1f}"'
        about = f"cosine {low:.2f} to {low + 2 / bins:.2f}: {count:,} weights"
        parts.append(
            f'<rect class="{kind}" {box} y="{TOP + tall - size:.1f}" height="{size:.1f}"><title>{about}</title></rect>'
        )
    base = CHART_HEIGHT - CHART_BOTTOM
    parts.append(f'<line class="rule" x1="{LEFT}" x2="{CHART_WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    for mark in (-1.0, -0.5, 0.0, 0.5, 1.0):
        x = LEFT + wide * (mark + 1) / 2
        parts.append(f'<text class="faint" text-anchor="middle" x="{x:.0f}" y="{base + 18}">{mark:g}</text>')
    parts.append(
        f'<text class="faint" text-anchor="middle" x="{LEFT + wide / 2:.0f}" y="{CHART_HEIGHT - 6}">'
        "cosine of the domain's and the general gradient</text>"
    )
    for place, (kind, name, count) in enumerate(
        (
            ("conflict", "conflicting", found.conflicting),
            ("specific", "specific", found.specific),
            ("shared", "shared", found.shared),
        )
    ):
        x = LEFT + place * 200
        parts.append(f'<rect class="{kind}" x="{x}" y="12" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="ink" x="{x + 18}" y="23">{name} {count / total:.1%}</text>')
    return _svg(CHART_WIDTH, CHART_HEIGHT, "alignment of the two sides' gradients", parts)


def map_page(drawn: WeightMap) -> str:
    """One HTML file with both pictures."""
    body = f"<h1>What is left of the weights</h1><p>{escape(drawn.says)}</p>{heat_svg(drawn)}"
    if drawn.alignment is not None:
        body += f"<h2>Do the domain and the rest pull the same way?</h2>{alignment_svg(drawn)}"
    return page("What is left of the weights", body)


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return f"{head}<title>{escape(title)}</title><style>{_style()}</style>{''.join(parts)}</svg>"


def _style() -> str:
    def colours(of: dict[str, str]) -> str:
        return (
            f".paper{{fill:{of['paper']}}}.rule{{stroke:{of['rule']}}}.faint{{fill:{of['faint']}}}.ink{{fill:{of['ink']}}}"
            f".over{{fill:{of['paper']}}}.cell{{fill:none;stroke:{of['rule']}}}.heat,.shared{{fill:{of['line']}}}"
            f".conflict{{fill:{of['mark']}}}.specific{{fill:{of['faint']}}}"
        )

    plain = "text{font:13px system-ui,sans-serif;font-variant-numeric:tabular-nums}"
    return f"{plain}{colours(LIGHT)}@media (prefers-color-scheme: dark){{{colours(DARK)}}}"

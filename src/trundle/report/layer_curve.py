"""The layer-loss curve as a picture: an SVG that stands alone, and a page around it. Light or dark as the reader's screen is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from trundle.report.axes import _round_step

if TYPE_CHECKING:
    from trundle.methods.depth.curve import LayerCurve

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 28, 52
_ABOVE, _BELOW = 0.06, 0.18
"""Free space above and below the curve, as a share of what it spans; the names of low points stand below them."""
_LABELS = 16
"""Layers named along the axis at most."""
_TICKS = 8

_LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#59636e",
    "rule": "#d8dee4",
    "line": "#2f6fb5",
    "mark": "#c2410c",
}
_DARK = {
    "paper": "#14181d",
    "ink": "#e8ecf0",
    "faint": "#a2acb7",
    "rule": "#333b45",
    "line": "#6db1f5",
    "mark": "#ff9d66",
}


def curve_svg(curve: LayerCurve, title: str) -> str:
    """The curve with its low points marked."""
    losses = curve.losses
    span = (max(losses) - min(losses)) or 1.0
    low, high = min(losses) - _BELOW * span, max(losses) + _ABOVE * span
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(layer: int) -> float:
        return _LEFT + wide * ((layer - 1) / (curve.layers - 1) if curve.layers > 1 else 0.5)

    def down(loss: float) -> float:
        return _TOP + tall * (high - loss) / (high - low)

    parts = [f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>']
    step = _round_step(high - low, _TICKS)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        y = down(number * step)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="faint" text-anchor="end" x="{_LEFT - 10}" y="{y + 4:.1f}">{number * step:.4g}</text>'
        )
    every = -(-curve.layers // _LABELS)
    for layer in range(1, curve.layers + 1):
        inside = layer % every == 0 and min(layer - 1, curve.layers - layer) >= every
        if inside or layer in (1, curve.layers):
            y = _HEIGHT - _BOTTOM + 20
            parts.append(
                f'<text class="faint" text-anchor="middle" x="{across(layer):.1f}" y="{y}">{layer}</text>'
            )
    if curve.layers > 1:
        x = across(curve.layers // 2) / 2 + across(curve.layers // 2 + 1) / 2
        parts.append(f'<line class="middle" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    points = " ".join(f"{across(n):.1f},{down(loss):.1f}" for n, loss in enumerate(losses, start=1))
    parts.append(f'<polyline class="curve" points="{points}"/>')
    names = marks(curve)
    for layer, loss in enumerate(losses, start=1):
        x, y = across(layer), down(loss)
        name = names.get(layer)
        shape = f'class="{"mark" if name else "point"}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if name else 3}"'
        parts.append(f"<circle {shape}><title>{layer} layers: {loss:.4f}</title></circle>")
        if name:
            side = "start" if x < _LEFT + 40 else "end" if x > _WIDTH - _RIGHT - 40 else "middle"
            parts.append(
                f'<text class="name" text-anchor="{side}" x="{x:.1f}" y="{y + 23:.1f}">{name}: {layer}</text>'
            )
    parts.append(
        f'<text class="faint" text-anchor="middle" x="{_LEFT + wide / 2:.0f}" y="{_HEIGHT - 10}">layers kept</text>'
    )
    parts.append(f'<text class="faint" x="{_LEFT - 54}" y="16">loss before training</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    return f"{head}<title>{escape(title)}</title><style>{_style()}</style>{''.join(parts)}</svg>"


def marks(curve: LayerCurve) -> dict[int, str]:
    """What to write beside which layer."""
    large = {curve.large: "large"}
    return large if curve.small is None else {curve.small: "small"} | large


def curve_page(curve: LayerCurve, title: str, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """One HTML file with the picture, what each choice would save, and what to do next."""
    heading, *body = rows
    header = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    table = f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{lines}</tbody></table></div>'
    return _page(title, f"<h1>{escape(title)}</h1>{curve_svg(curve, title)}{table}{said}")


def _page(title: str, content: str) -> str:
    """A page that needs nothing but itself."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_page_style()}</style></head><body><main>{content}"
        "</main></body></html>\n"
    )


def _style() -> str:
    def colours(of: dict[str, str]) -> str:
        return (
            f".paper{{fill:{of['paper']}}}.rule{{stroke:{of['rule']}}}.middle{{stroke:{of['faint']}}}"
            f".faint{{fill:{of['faint']}}}.curve{{stroke:{of['line']}}}.point{{fill:{of['line']}}}"
            f".mark{{fill:{of['mark']};stroke:{of['paper']}}}.name{{fill:{of['ink']};stroke:{of['paper']}}}"
        )

    plain = (
        "text{font:13px system-ui,sans-serif}.name{font-weight:600;stroke-width:4;paint-order:stroke}.curve{fill:none;stroke-width:2}"
        ".mark{stroke-width:2}.middle{stroke-dasharray:3 5}"
    )
    return f"{plain}{colours(_LIGHT)}@media (prefers-color-scheme: dark){{{colours(_DARK)}}}"


def _page_style() -> str:
    def colours(of: dict[str, str]) -> str:
        return (
            f"body{{background:{of['paper']};color:{of['ink']}}}th{{color:{of['faint']}}}"
            f"td,th{{border-color:{of['rule']}}}"
        )

    plain = (
        ":root{color-scheme:light dark}body{margin:0;font:16px/1.5 system-ui,sans-serif}"
        "main{max-width:820px;margin:0 auto;padding:24px 20px}h1{font-size:1.25rem;overflow-wrap:anywhere}"
        "svg{width:100%;height:auto}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;margin:16px 0}"
        "td,th{padding:6px 10px;border-bottom:1px solid;text-align:right;white-space:nowrap}"
        "td:first-child,th:first-child{text-align:left}td{font-variant-numeric:tabular-nums}"
    )
    return f"{plain}{colours(_LIGHT)}@media (prefers-color-scheme: dark){{{colours(_DARK)}}}"

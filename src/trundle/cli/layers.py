"""`trundle inspect --layers`: the layer-loss curve on the screen and in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trundle.cli import console
from trundle.cli.console import _curve, _show_table
from trundle.cli.tables import _menu, _Rows
from trundle.errors import BadInput

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.methods.depth.curve import LayerCurve
    from trundle.progress import Progress

_PICTURES = (".html", ".svg")


def _check_flags(*, layers: bool, vocabulary: bool, data: Sequence[str] | None, output: Path | None) -> None:
    """Refuse flags that mean nothing together, before anything heavy."""
    if layers and vocabulary:
        raise BadInput("--layers and --vocabulary are two looks at a model; ask for one at a time")
    if layers and not data:
        raise BadInput("--layers compares the layers on tuples of query and positive; give them with --data")
    if data and not layers and not vocabulary:
        raise BadInput(
            "--data is for a closer look at the layers or the tokens; add --layers or --vocabulary"
        )
    if not layers and output is not None:
        raise BadInput("--output is for the curve of the layers; add --layers")
    if output is None:
        return
    if output.suffix not in _PICTURES:
        raise BadInput(f"{output} is not a kind of picture trundle draws; end it in {' or '.join(_PICTURES)}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"{output} can't be written; give a file in a folder that exists")


def _measured(
    model: SentenceTransformer,
    name: str,
    data: Sequence[str],
    output: Path | None,
    *,
    seed: int,
    progress: Progress,
) -> LayerCurve:
    """Take the curve, and draw it where that is asked for."""
    from trundle.data.corpus import read_corpus
    from trundle.folders import write_whole
    from trundle.methods.depth.curve import measure_curve
    from trundle.report.page import curve_page, curve_svg

    corpus = read_corpus(data, seed=seed, progress=progress)
    curve = measure_curve(model, corpus.examples(), seed=seed, progress=progress)
    if output is not None:
        title = f"{Path(name).name}: the loss of each layer as the last one, {curve.tuples:,} tuples"
        drawn = curve.losses, _marks(curve), title
        page = curve_svg(*drawn) if output.suffix == ".svg" else None
        write_whole(output, page or curve_page(*drawn, _rows(model, curve), _notes(curve)))
    return curve


def _show(model: SentenceTransformer, curve: LayerCurve) -> None:
    """The curve in characters, and what its low points would save."""
    console._show()
    console._show(f"The loss of each layer as the last one, before any training ({curve.tuples:,} tuples)")
    console._show()
    for line in _curve(curve.losses, _marks(curve)):
        console._show(f"  {line}")
    console._show()
    _show_table(_rows(model, curve), texts=(0, 1))
    for note in _notes(curve):
        console._show(note)


def _marks(curve: LayerCurve) -> dict[int, str]:
    """Return the names of the low points by layer."""
    large = {curve.large: "large"}
    return large if curve.small is None else {curve.small: "small"} | large


def _rows(model: SentenceTransformer, curve: LayerCurve) -> _Rows:
    """What each variant leaves, with its loss."""
    from trundle.methods.savings import layer_savings
    from trundle.model.cost import cost

    savings = layer_savings(model, curve)
    heading, *lines = _menu(cost(model), savings)
    shown = [
        (step, says, f"{curve.losses[saving.after.layers - 1]:.3f}", *rest)
        for (step, says, *rest), saving in zip(lines, savings, strict=True)
    ]
    return [("", heading[1], "loss", *heading[2:]), *shown]


def _notes(curve: LayerCurve) -> list[str]:
    """What the curve means for a cut."""
    said = []
    if curve.large == curve.layers:
        said.append("No layer of the upper half does better than the last one: large cuts nothing.")
    if curve.advice is not None:
        said.append(f"{curve.advice[0].upper()}{curve.advice[1:]}.")
    if curve.small is None:
        said.append("A model of one layer has nothing to cut; depth --keep 0 makes it static.")
    else:
        said.append("Cut with: trundle depth MODEL --pick small --data TUPLES -o FOLDER; then heal it.")
    return said

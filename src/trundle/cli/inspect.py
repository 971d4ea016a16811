"""`trundle inspect`: the parts of a model, its layer-loss curve, and the coverage of smaller vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trundle.cli.console import _curve, _show, _show_json, _show_table
from trundle.cli.options import _CommonFlags, _Model, _Seed
from trundle.cli.tables import _described, _parts, _Rows, _savings, _vocabulary
from trundle.errors import BadInput

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.methods.depth.curve import LayerCurve
    from trundle.progress import Progress


def inspect(
    flags: _CommonFlags,
    model: _Model,
    layers: Annotated[
        bool, Option("--layers", help="Plot the loss if the model ended at each layer; needs --data.")
    ] = False,
    vocabulary: Annotated[
        bool, Option("--vocabulary", help="Show how much of your texts smaller vocabularies cover.")
    ] = False,
    data: Annotated[
        list[str] | None,
        Option("--data", "-d", help="Labelled tuples for --layers, texts for --vocabulary; repeatable."),
    ] = None,
    scale: Annotated[
        float | None, Option(min=0.1, help="With --layers: multiplier of cosines in the loss; default: 20.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="With --layers: plot to this .html or .svg file.")
    ] = None,
    seed: _Seed = 0,
) -> None:
    """Show the size of each part and what each method could save."""
    _check_flags(layers=layers, vocabulary=vocabulary, data=data, output=output)
    if scale is not None and not layers:
        raise BadInput("--scale is for the loss of the layers; add --layers")
    progress = flags.progress()
    from trundle.methods.depth.curve import list_savings
    from trundle.model.cost import cost
    from trundle.model.load import load

    if vocabulary:
        _inspect_vocabulary(model, data, flags, seed=seed, progress=progress)
        return
    loaded = load(model, trust_remote_code=flags.trust)
    family, about = _described(loaded)
    now, savings = cost(loaded), list_savings(loaded)
    curve = None
    if layers:
        curve = _layer_curve(loaded, model, data or [], output, scale=scale, seed=seed, progress=progress)
    if flags.as_json:
        rows = [{"step": saving.name, "keeps": saving.keeps, **saving.after.as_json()} for saving in savings]
        shown = {"model": model, "family": family, **now.as_json(), "savings": rows}
        _show_json(shown if curve is None else shown | {"curve": curve.as_json()})
        return
    _show(f"{model}: {about}, vectors of {loaded.get_embedding_dimension()} dimensions")
    _show_table(_parts(now), texts=(0, 2), gap=True)
    if savings:
        title = f"What each method could save (FLOPs at {now.length} tokens per text)"
        _show_table(_savings(now, savings), title=title, texts=(0, 1), gap=True)
    if curve is not None:
        _show_layers(loaded, curve)


def _check_flags(*, layers: bool, vocabulary: bool, data: Sequence[str] | None, output: Path | None) -> None:
    if layers and vocabulary:
        raise BadInput("--layers and --vocabulary exclude each other; pass one at a time")
    if layers and not data:
        raise BadInput("--layers compares the layers on tuples of query and positive; pass them with --data")
    if data and not layers and not vocabulary:
        raise BadInput("--data is for inspecting layers or tokens; add --layers or --vocabulary")
    if not layers and output is not None:
        raise BadInput("--output is for the plot of the layers; add --layers")
    if output is None:
        return
    if output.suffix not in (".html", ".svg"):
        raise BadInput(f"{output} is not a supported file type; use a name that ends in .html or .svg")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"{output} can't be written; pass a file in a folder that exists")


def _inspect_vocabulary(
    model: str, data: list[str] | None, flags: _CommonFlags, *, seed: int, progress: Progress
) -> None:
    from trundle.data.corpus import read_corpus
    from trundle.methods.contract import Context
    from trundle.methods.vocabulary.vocabulary import list_sizes
    from trundle.model.load import load

    corpus = read_corpus(data, seed=seed, progress=progress) if data else None
    loaded = load(model, trust_remote_code=flags.trust)
    sizes = list_sizes(loaded, Context(original=loaded, corpus=corpus, seed=seed, progress=progress))
    if flags.as_json:
        _show_json({"model": model, **sizes.as_json()})
        return
    _show(
        f"{model}: {sizes.rows[0].keep:,} tokens, scored on {sizes.texts:,} texts of {sizes.tokens:,} "
        f"tokens; tokens per text measured on {sizes.held_out:,} others"
    )
    rows = _vocabulary(sizes)
    _show_table(rows, texts=(1, 3, len(rows[0]) - 1), gap=True)


def _layer_curve(
    model: SentenceTransformer,
    name: str,
    data: Sequence[str],
    output: Path | None,
    *,
    scale: float | None,
    seed: int,
    progress: Progress,
) -> LayerCurve:
    from trundle.data.corpus import read_corpus
    from trundle.folders import write_atomic
    from trundle.methods.depth.curve import measure_curve
    from trundle.report.page import curve_page, curve_svg

    corpus = read_corpus(data, seed=seed, progress=progress)
    scaled = {} if scale is None else {"scale": scale}
    curve = measure_curve(model, corpus.examples(), **scaled, seed=seed, progress=progress)
    if output is not None:
        title = f"{Path(name).name}: the loss of each layer as the last one, {curve.tuples:,} tuples"
        drawn = curve.losses, _marks(curve), title
        page = curve_svg(*drawn) if output.suffix == ".svg" else None
        write_atomic(output, page or curve_page(*drawn, _layer_rows(model, curve), _layer_notes(curve)))
    return curve


def _marks(curve: LayerCurve) -> dict[int, str]:
    large = {curve.large: "large"}
    return large if curve.small is None else {curve.small: "small"} | large


def _show_layers(model: SentenceTransformer, curve: LayerCurve) -> None:
    _show(f"\nThe loss of each layer as the last one, before any training ({curve.tuples:,} tuples)\n")
    for line in _curve(curve.losses, _marks(curve)):
        _show(f"  {line}")
    _show_table(_layer_rows(model, curve), texts=(0, 1), gap=True)
    for note in _layer_notes(curve):
        _show(note)


def _layer_rows(model: SentenceTransformer, curve: LayerCurve) -> _Rows:
    from trundle.methods.depth.curve import layer_savings
    from trundle.model.cost import cost

    savings = layer_savings(model, curve)
    heading, *lines = _savings(cost(model), savings)
    shown = [
        (method, keeps, f"{curve.losses[saving.after.layers - 1]:.3f}", *rest)
        for (method, keeps, *rest), saving in zip(lines, savings, strict=True)
    ]
    return [("", heading[1], "loss", *heading[2:]), *shown]


def _layer_notes(curve: LayerCurve) -> list[str]:
    notes = []
    if curve.large == curve.layers:
        notes.append("No layer of the upper half has a lower loss than the last one: large cuts nothing.")
    if curve.advice is not None:
        notes.append(f"{curve.advice[0].upper()}{curve.advice[1:]}.")
    if curve.small is None:
        notes.append("A model of one layer has nothing to cut; depth --keep 0 makes it static.")
    else:
        notes.append("Cut with: trundle depth MODEL --pick small --data TUPLES -o FOLDER; then train it.")
    return notes

"""Models without layers: `depth --keep 0` beside model2vec's distillation, at the same size.

    pip install "model2vec[distill]"
    python benchmarks/static.py TEACHER --texts DIR --tasks DIR -o static/ [--steps 2000]

All have one vector a token of the teacher's own tokens, as wide as the teacher's vectors: model2vec as it comes from its
`distill`, once with its rotation (PCA of the same width) and once without, which leaves it in the teacher's space; ours as
`depth` makes it, by its closed form, and after `align`. Tokens are weighed and models trained by the parquet files in --texts;
the tasks in --tasks are only measured on. Asymmetric search, queries by the static model on the teacher's index, is measured
for all but the rotated one, which can't.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from model2vec.distill import distill
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from rows import ENGLISH_STS, Lines
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import Memory, Result, _mean_score, evaluate, find_tasks
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import compress
from trundle.progress import SILENT
from trundle.recipe import parse_recipe

SEARCHES = ("retrieval/SciFact", "retrieval/CACM", "retrieval/Cranfield")


def by_model2vec(options: argparse.Namespace, folder: Path, *, rotated: bool) -> None:
    """As a user of model2vec would make it, in float32 so that sizes are equal."""
    width = load(options.teacher).get_embedding_dimension()
    model = distill(options.teacher, pca_dims=width if rotated else None, quantize_to="float32")
    model.save_pretrained(folder / "model2vec")
    table = StaticEmbedding.from_model2vec(str(folder / "model2vec"))
    SentenceTransformer(modules=[table], device="cpu").save_pretrained(str(folder / "model"))


def by_depth(options: argparse.Namespace, folder: Path, *, steps: int | None) -> None:
    """As `depth` makes it, or also aligned: by the closed form alone (0), or trained."""
    align = {"steps": steps, "texts": options.sample, "learning_rate": options.learning_rate}
    cuts: list[dict[str, Any]] = [{"depth": {"keep": 0}}]
    recipe = parse_recipe(
        json.dumps({"steps": [*cuts, *([] if steps is None else [{"align": align}])]}), name="static"
    )
    sources = [str(file) for file in sorted(Path(options.texts).glob("*.parquet"))]
    corpus = read_corpus(sources, seed=0)
    compress(options.teacher, recipe, output=folder / "model", corpus=corpus, progress=Lines())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=20_000, help="use at most this many of the texts")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    ways: dict[str, Callable[[argparse.Namespace, Path], None]] = {
        "model2vec": partial(by_model2vec, rotated=True),
        "model2vec, not rotated": partial(by_model2vec, rotated=False),
        "depth --keep 0": partial(by_depth, steps=None),
        "and closed form": partial(by_depth, steps=0),
        f"and {options.steps} steps": partial(by_depth, steps=options.steps),
    }
    tasks = find_tasks([*(f"sts/{name}" for name in ENGLISH_STS), *SEARCHES], options.tasks)
    teacher, memory = embedder(load(options.teacher), name="teacher"), Memory(SILENT)
    whole = evaluate(teacher, tasks, memory=memory)
    print(f"{'':24} {'parameters':>10} {'STS':>7} {'search':>7} {'on the teacher’s index':>23}")
    show("teacher", load(options.teacher), whole, None)
    for name, make in ways.items():
        folder = options.output / name.replace(" ", "-").replace(",", "")
        if not (folder / "model").is_dir():
            make(options, folder)
        model = load(str(folder / "model"))
        in_space = name != "model2vec"
        found = evaluate(
            embedder(model, name=name), tasks, documents=teacher if in_space else None, memory=memory
        )
        show(name, model, found, "asymmetric" if in_space else None)


def show(name: str, model: SentenceTransformer, found: list[Result], both: str | None) -> None:
    of_kind = {
        kind: _mean_score([one for one in found if one.kind == kind and one.mode != "asymmetric"])
        for kind in ("sts", "retrieval")
    }
    asymmetric = [one for one in found if one.mode == "asymmetric"]
    on_index = f"{_mean_score(asymmetric, 'asymmetric'):.4f}" if both else "–"
    parameters = sum(weight.numel() for weight in model.parameters()) / 1e6
    print(
        f"{name:24} {parameters:>9.1f}M {of_kind['sts']:>7.4f} {of_kind['retrieval']:>7.4f} {on_index:>23}",
        flush=True,
    )


if __name__ == "__main__":
    main()

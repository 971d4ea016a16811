"""Cuts with and without healing in closed form, side by side: distance and agreement@10 on held-out texts.

    python benchmarks/heal.py MODEL --data TEXTS [--texts 4000] [--held-out 800] [--length 128] [--cuts CUTS]

TEXTS are files or folders that `--data` of a command takes. CUTS are separated by semicolons, each a method
and its options, such as "depth keep=3; weights structure=neuron method=magnitude sparsity=50%". Columns: the
cut alone, with the linear map of `align --steps 0`, healed, and healed with the map; then the seconds of
healing. A narrower model has no vectors of the original's width without the map.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from harness import make_parser
from trundle.data.corpus import Corpus, read_corpus
from trundle.data.sampling import sample
from trundle.embedder import Embedder
from trundle.evaluate.fidelity import measure_fidelity, queries_and_documents
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.model.encode import embedder
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.surgery import transformer_of
from trundle.recipe import make_options
from trundle.teacher.targets import HeldOutVectors

Asked = tuple[list[str], list[str]]


def default_cuts(layers: int) -> str:
    counts = sorted({layers // 2, 2 * layers // 3, 5 * layers // 6} - {0, layers})
    neurons = "weights structure=neuron method=magnitude sparsity="
    rest = (f"{neurons}25%", f"{neurons}50%", "width extract=1/2", "vocabulary fraction=1/2")
    return "; ".join([*(f"depth keep={count}" for count in counts), *rest])


def applied(model: SentenceTransformer, name: str, options: dict[str, Any], context: Context) -> Any:
    method = METHODS[name]
    return method.apply(model, method.plan(model, make_options(method, options), context), context)


def score(student: SentenceTransformer, teacher: Embedder, asked: Asked, held_out: HeldOutVectors) -> str:
    if student.get_embedding_dimension() != teacher.text(["one"]).shape[1]:
        return "–"
    found = measure_fidelity(embedder(student, name="student"), teacher, *asked, held_out=held_out)
    return f"{found.distance:.3f} {100 * found.agreement_asymmetric:.1f}%"


def run(given: Namespace) -> None:
    model = load(given.model)
    model.max_seq_length = min(model.max_seq_length or given.length, given.length)
    corpus = read_corpus(given.data, seed=given.seed)
    texts = sample(corpus.train(), given.texts, seed=given.seed)
    asked = queries_and_documents(sample(corpus.held_out(), given.held_out, seed=given.seed))
    chosen = Corpus(
        train=lambda: iter(texts),
        validation=lambda: iter(()),
        held_out=lambda: iter(()),
        examples=lambda: iter(()),
        labelled=lambda _: iter(()),
        facts=lambda: (),
    )
    teacher = embedder(model, name="teacher")
    held_out = HeldOutVectors()
    print(f"{len(texts):,} texts, {len(asked[0]):,} queries and {len(asked[1]):,} documents held out")
    print("| cut | cut alone | end map | healed | healed, end map | s |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as cache:
        context = Context(original=model, corpus=chosen, seed=given.seed, cache=Path(cache))
        layers = layout_of(transformer_of(model).model).layers
        for cut in (given.cuts or default_cuts(layers)).split(";"):
            name, *words = cut.split()
            pairs = (word.split("=", 1) for word in words)
            options = {key: int(value) if value.isdigit() else value for key, value in pairs}
            cells, seconds = [], 0.0
            for heal in ("none", "closed-form"):
                began = time.monotonic()
                small = applied(model, name, options | {"heal": heal}, context).model
                seconds = time.monotonic() - began - seconds
                cells.append(score(small, teacher, asked, held_out) if name != "width" else "–")
                mapped = small if name == "width" else applied(small, "align", {"steps": 0}, context).model
                cells.append(score(mapped, teacher, asked, held_out))
            print(f"| {cut.strip()} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=800)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--cuts")
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())

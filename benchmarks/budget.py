"""Whether the planner's forecasts hold: file size and time for a query, told before a cut is made and measured after.

    python benchmarks/budget.py MODEL --data TEXTS [--cuts 5] [--precision int4+int8]

Candidates spread over the whole grid are cut and mapped in closed form (how well they were trained changes neither size
nor speed), exported as they would be shipped, and timed in turns. Wanted: sizes within 1%, times within 20%.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from trundle.bench.workload import workload
from trundle.data.corpus import read_corpus
from trundle.model.load import load
from trundle.pipeline.compress import compress
from trundle.precision import graph_format
from trundle.recipe import parse_recipe
from trundle.search.candidates import _Candidate, _list_candidates
from trundle.search.speed import _ANY_LOSS, _export_graph, _measure_speed, _time_queries


def spread(candidates: list[_Candidate], count: int) -> list[_Candidate]:
    """From the largest to the smallest, evenly; and the smallest without layers, where there are such."""
    ordered = sorted(candidates, key=lambda each: -each.bytes)
    layered = [each for each in ordered if each.layers]
    last = len(layered) - 1
    chosen = [layered[number * last // max(1, count - 1)] for number in range(count)]
    return chosen + [each for each in ordered if not each.layers][-1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--precision", default="int8", choices=("int8", "int4", "int4+int8"))
    options = parser.parse_args()
    model = load(options.model)
    speed = _measure_speed(model, graph_format("onnx", options.precision).matmuls)
    dimensions = model.get_embedding_dimension() or 0
    chosen = spread(
        _list_candidates(model, options.model, dimensions=dimensions, precision=options.precision),
        options.cuts,
    )
    corpus = read_corpus([options.data], seed=0)
    with TemporaryDirectory() as scratch:
        folders, sizes = [], []
        for number, each in enumerate(chosen):
            folder = Path(scratch) / str(number)
            mapped = (
                [] if each.untouched else [{"align": {"steps": 0, "texts": 1000, "teacher": options.model}}]
            )
            steps = [*each.steps(), *mapped]
            recipe = parse_recipe(json.dumps({"steps": steps}), name=each.name)
            compress(options.model, recipe, output=folder, corpus=corpus, compare=False)
            texts = workload().short + workload().long
            sizes.append(_export_graph(folder, options.precision, calibrate=texts, limits=_ANY_LOSS))
            folders.append(folder)
        times = [each.milliseconds for each in _time_queries(folders)]
    print(
        f"{'candidate':62} {'bytes told':>12} {'measured':>12} {'off':>8} {'ms told':>8} {'measured':>9} {'off':>7}"
    )
    for each, size, time in zip(chosen, sizes, times, strict=True):
        told = speed.milliseconds(each.cost)
        print(
            f"{each.name:62} {each.bytes:12,} {size:12,} {each.bytes / size - 1:+8.3%} "
            f"{told:8.2f} {time:9.2f} {told / time - 1:+7.1%}"
        )


if __name__ == "__main__":
    main()

"""Whether the search predicts sizes and times correctly, and what its choice costs.

    python benchmarks/planner.py sizes MODEL [MODEL ...]
    python benchmarks/planner.py forecast MODEL --data TEXTS [--cuts 5] [--precision int4+int8]
    python benchmarks/planner.py regret MODEL --budget 8MB --data TEXTS --minutes 6 --steps 2000 -o results/

sizes     predicted parameters and bytes against those of the built and saved model, as it is and halved:
          every second layer, and half of the width, head dimensions and MLP neurons
forecast  candidates spread over the complete grid are cut, mapped in closed form (training changes neither
          size nor speed), exported as they would be shipped, and timed in turns. Goals: sizes within 1%,
          times within 20%
regret    a search runs as a user would run it. Then every candidate within the budget is trained from the
          start for the same --steps on the same --texts. Regret is the distance of the chosen one to the
          best. The search runs alone; rows may run --at-once. The first candidate is there twice: as `first`
          it asks the model for all vectors. Rows that exist are not made again
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from scipy.stats import spearmanr

import harness
from harness import Json
from trundle.bench.workload import workload
from trundle.data.corpus import Corpus, read_corpus
from trundle.model.cost import cost, predict
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.save import weight_bytes
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.pipeline.run import Request
from trundle.precision import graph_format
from trundle.records import PLANNING_FILE
from trundle.search.candidates import _list_candidates
from trundle.search.prospects import _export_graph, _measure_speed, _time_queries
from trundle.search.search import compress_to_budget
from trundle.search.trials import _CPU_PACE, _GPU_PACE

SEARCH, FIRST = "search", "first"


def sizes(options: argparse.Namespace) -> None:
    for name in options.models:
        model = load(name)
        layout = layout_of(transformer_of(model).model)
        blocks = tuple(range(0, layout.layers, 2))
        kept = {axis: tuple(range(0, layout.sizes[axis], 2)) for axis in ("hidden", "head", "mlp")}
        mlps = (kept["mlp"],) * layout.layers
        small = cut(model, Cut(blocks=blocks, hidden=kept["hidden"], head=kept["head"], mlp=mlps))
        half = predict(
            model, blocks=blocks, hidden=len(kept["hidden"]), head=len(kept["head"]), mlp=len(kept["mlp"])
        )
        for label, planned, built in (("as it is", cost(model), model), ("halved", half, small)):
            with TemporaryDirectory() as folder:
                built.save_pretrained(folder, create_model_card=False)
                size = weight_bytes(folder)
            truth = sum(weight.numel() for weight in built.parameters())
            print(
                f"{name[-28:]:28} {label:8} parameters {planned.parameters:13,} predicted {truth:13,} real   "
                f"bytes {planned.file_bytes:13,} predicted {size:13,} real {planned.file_bytes / size:9.6f}"
            )


def forecast(options: argparse.Namespace, corpus: Corpus) -> None:
    model, texts = load(options.model), workload().short + workload().long
    speed = _measure_speed(model, graph_format("onnx", options.precision).matmuls)
    width = model.get_embedding_dimension() or 0
    listed = _list_candidates(model, options.model, dimensions=width, precisions=[options.precision])
    ordered = sorted(listed, key=lambda each: -each.bytes)
    layered = [each for each in ordered if each.layers]
    last, gaps = len(layered) - 1, max(1, options.cuts - 1)
    chosen = [layered[number * last // gaps] for number in range(options.cuts)]
    chosen += [each for each in ordered if not each.layers][-1:]  # the smallest static model
    with TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(number) for number in range(len(chosen))]
        sizes = []
        for each, folder in zip(chosen, folders, strict=True):
            mapped = {"align": {"steps": 0, "texts": 1000, "teacher": options.model}}
            steps = [*each.steps(), *([] if each.untouched else [mapped])]
            harness.compress_by(options.model, steps, folder, corpus, compare=False)
            sizes.append(_export_graph(folder, options.precision, calibrate=texts, timed_only=True))
        times = [each.milliseconds for each in _time_queries(folders)]
    for each, size, time in zip(chosen, sizes, times, strict=True):
        predicted = speed.milliseconds(each.cost)
        print(
            f"{each.name:62} {each.bytes:12,} bytes predicted {size:12,} measured "
            f"{each.bytes / size - 1:+8.3%} {predicted:8.2f} ms predicted {time:9.2f} measured "
            f"{predicted / time - 1:+7.1%}"
        )


def train(options: argparse.Namespace, row: str, corpus: Corpus) -> None:
    """Train one candidate from the start, as the search trains its winner."""
    candidate = json.loads((options.output / "candidates.json").read_text())[0 if row == FIRST else int(row)]
    align = {"steps": 1 if row == FIRST else options.steps, "texts": options.texts}
    align |= _GPU_PACE if torch.cuda.is_available() else _CPU_PACE
    if candidate["static"]:
        align.pop("learning_rate", None)  # as the search does
    if candidate["grid"]:
        align["rounding"] = "int4"
    if candidate["base"] != options.model or not candidate["steps"]:
        align["teacher"] = options.model
    steps = [*candidate["steps"], {"align": align}]
    run = harness.compress_by(candidate["base"], steps, options.output / f"model-{row}", corpus)
    found = {"name": candidate["name"], "fidelity": run.fidelity.as_json()} | dict(run.steps[-1].facts)
    harness.write_json(options.output / f"result-{row}.json", found)


def search(options: argparse.Namespace, corpus: Corpus, output: Path | None) -> list[Json]:
    """Search within the budget; without an output only list the candidates in the search's order."""
    planned = compress_to_budget(
        Request(
            source=options.model,
            output=output,
            corpus=corpus,
            dry_run=output is None,
            progress=harness.Lines(),
        ),
        [options.budget],
        minutes=options.minutes,
        students=options.student,
    )
    listed = []
    for each in planned.tried:
        texts = options.texts if each.candidate.base == options.model else None
        row = {"steps": each.candidate.steps(texts=texts), "static": not each.candidate.layers}
        listed.append(asdict(each.record()) | row | {"grid": each.candidate.in_int4})
    return listed


def table(output: Path) -> None:
    def key(candidate: Json) -> tuple[str, str]:
        return candidate["base"], candidate["name"]

    planning = json.loads((output / SEARCH / PLANNING_FILE).read_text())["candidates"]
    trials = {key(each): [rung["distance"] for rung in each["rungs"]] for each in planning}
    choice = next(key(each) for each in planning if each["outcome"] == "chosen")
    ends: dict[tuple[str, str], Json] = {}
    for number, each in enumerate(json.loads((output / "candidates.json").read_text())):
        if (file := output / f"result-{number}.json").is_file():
            near = json.loads(file.read_text())["fidelity"]
            row = {
                "guess": number + 1,
                "name": each["name"],
                "bytes": each["bytes"],
                "trials": trials.get(key(each)),
            }
            wanted = ("distance", "cosine", "agreement_asymmetric")
            ends[key(each)] = row | {name: near[name] for name in wanted} | {"chosen": key(each) == choice}
    for row in sorted(ends.values(), key=lambda row: float(row["distance"])):
        harness.show(row)
    if choice not in ends:
        raise SystemExit(f"{choice[1]} was chosen and is not trained yet; see its log in {output}")
    agreements, distances = (
        [row[key] for row in ends.values()] for key in ("agreement_asymmetric", "distance")
    )
    behind = 100 * (max(agreements) - ends[choice]["agreement_asymmetric"])
    far = ends[choice]["distance"] - min(distances)
    print(f"regret among {len(ends)}: {behind:.2f} points of agreement@10, {far:.4f} of distance")
    order = spearmanr([row["guess"] for row in ends.values()], distances).statistic
    print(f"first guess against the final distance: Spearman {order:.2f}")
    first = [(row["trials"][0], row["distance"]) for row in ends.values() if row["trials"]]
    if len(first) > 2:
        order = spearmanr(first).statistic
        print(f"first trial against the final distance, {len(first)} tried: Spearman {order:.2f}")


def regret(options: argparse.Namespace, corpus: Corpus) -> None:
    if options.only == SEARCH:
        search(options, corpus, options.output / SEARCH)
    elif options.only:
        train(options, options.only, corpus)
    elif not options.table:
        listed = search(options, corpus, None)
        harness.write_json(options.output / "candidates.json", listed)
        rows = [FIRST, SEARCH, *(str(number) for number in range(len(listed)))]
        places = {row: options.output / f"result-{row}.json" for row in rows}
        places[SEARCH] = options.output / SEARCH / PLANNING_FILE
        missing = [row for row in rows if not places[row].is_file()]
        for alone in (FIRST, SEARCH):
            harness.run_rows([row for row in missing if row == alone], options.output)
        others = [row for row in missing if row not in (FIRST, SEARCH)]
        harness.run_rows(others, options.output, at_once=options.at_once)
    if not options.only:
        table(options.output)


def main() -> None:
    parser = harness.make_parser(__doc__, "sizes", "forecast", "regret")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--data")
    parser.add_argument("--cuts", type=int, default=5, help="forecast: how many candidates")
    parser.add_argument("--precision", default="int8", choices=("int8", "int4", "int4+int8"), help="forecast")
    parser.add_argument("--budget", help="regret")
    parser.add_argument("--student", action="append", default=[], help="regret")
    parser.add_argument("--minutes", type=float, default=6.0, help="regret: for the search")
    parser.add_argument("--texts", type=int, default=20_000, help="regret")
    parser.add_argument("--steps", type=int, default=500, help="regret")
    parser.add_argument("--at-once", type=int, default=1, help="regret")
    parser.add_argument("--only", help="regret: this row in this process")
    parser.add_argument("--table", action="store_true", help="regret: only print the table")
    parser.add_argument("-o", "--output", type=Path, help="regret")
    options = parser.parse_args()
    if options.what == "regret" and not (options.budget and options.output):
        parser.error("pass --budget and -o")
    options.model = options.models[0]
    if options.what == "sizes":
        sizes(options)
        return
    if not options.data:
        parser.error("pass --data")
    corpus = read_corpus([options.data], seed=0)
    (forecast if options.what == "forecast" else regret)(options, corpus)


if __name__ == "__main__":
    main()

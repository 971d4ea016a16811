"""How long trundle takes against the plainest code for the same work, interleaved in one process.

    python benchmarks/speed.py loop MODEL
    python benchmarks/speed.py lora MODEL
    python benchmarks/speed.py layers DECODER --data TUPLES [-o FILE]
    python benchmarks/speed.py captured MODEL --data TUPLES
    python benchmarks/speed.py precision MODEL --data TEXTS
    python benchmarks/speed.py nested MODEL
    python benchmarks/speed.py neurons MODEL
    python benchmarks/speed.py bench MODEL
    python benchmarks/speed.py evaluate MODEL --data TASKS
    python benchmarks/speed.py imports
    python benchmarks/speed.py texts --data TEXTS

loop       the training loop against a bare torch loop (goal: 0.9 or more)
lora       a LoRA step of `contrast` against a script with peft (goal: 1.1 or less)
layers     a LoRA step of `contrast` on the first layers of a model: time and, on a GPU, peak memory
captured   a LoRA step of `contrast` as CUDA graphs, which keep activations or recompute them, and with
           recomputed blocks, against a plain one (needs a GPU)
precision  steps/s of `align` in bf16 against float32
nested     a step of nested widths against the separate steps (time and memory)
neurons    encoding with half of the MLP neurons, and what the FLOPs predict
bench      texts/s that `trundle bench` reports against a bare loop (goal: 0.9)
evaluate   `evaluate` against a bare encode (goal: 1.10 or less)
imports    importing trundle against sentence-transformers (goal: 1/20, no torch)
texts      opening a corpus, first and again, against the plain reader
Every round runs both ways; ratios are medians over rounds with their range.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from accelerate.utils import send_to_device
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional

import harness
from trundle.bench.rounds import _COMMAND, _Worker
from trundle.bench.workload import workload
from trundle.data.corpus import read_corpus
from trundle.data.examples import Example
from trundle.data.sampling import sample
from trundle.data.texts import read_texts
from trundle.embedder import Embedder, Encode, Vectors
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.methods.align.leaf import _leaf
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters, _frozen_copy
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.methods.weights.pruning import _best_neurons
from trundle.methods.width.narrow import _NarrowModel
from trundle.model.cost import cost, predict
from trundle.model.encode import embedder
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.nested import Selection, default_select, narrow_cut
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.model.tokens import make_tokeniser
from trundle.train.batches import Batches, ByLength
from trundle.train.blocks import changed_blocks
from trundle.train.captured import captured_backbone
from trundle.train.loop import TrainingTask, TrainSettings, train

Batch = tuple[dict[str, Any], Tensor]
_How = Literal["plain", "checkpointed", "captured", "kept"]
WORDS = ("shrink", "any", "text", "embedding", "model", "and", "keep", "your", "index")
SOURCE = "made up"
IMPORTS = {
    "import trundle": "import trundle",
    "trundle --help": (
        "import sys; sys.argv = ['trundle', '--help']; from trundle.cli.app import main; main()"
    ),
    "import sentence_transformers": "import sentence_transformers",
}
# The command line ends with SystemExit, so torch is looked for at exit.
WATCH = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
TASKS = "STSBenchmark,MRPC,TREC,SearchSnippets,Cranfield"
HELD_OUT = 512
LENGTH, TEXTS = 128, 256
"""Tokens of a text and texts of a round in `neurons`."""


def aligned_batches(
    model: SentenceTransformer, texts: Sequence[str], targets: Tensor, size: int
) -> Batches[Batch]:
    """Make batches of texts of similar length with their target vectors."""
    tokenise = make_tokeniser(model)

    def load_batch(places: Any) -> Batch:
        return tokenise([texts[place] for place in places]), targets[places]

    order = ByLength([len(text) for text in texts], batch_size=size)
    return Batches(order=order, load=load_batch)


def distance(model: nn.Module, batch: Batch) -> Tensor:
    return _leaf(model(dict(batch[0]))["sentence_embedding"], batch[1])


def bare_steps(
    model: nn.Module, batches: Sequence[Any], loss_of: Callable[[Any], Tensor], *, bf16: bool
) -> float:
    """Return the seconds per step of the plainest training loop."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    model.train()

    def run() -> None:
        for batch in batches:
            with torch.autocast(weights[0].device.type, dtype=torch.bfloat16, enabled=bf16):
                loss = loss_of(batch)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return harness.timed(run)[0] / len(batches)


def trained(model: Any, task: TrainingTask[Any], settings: TrainSettings) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return train(model, task, settings, folder=Path(folder))


def loop(options: argparse.Namespace) -> None:
    model, rng = load(options.model), np.random.default_rng(0)
    count = options.steps * options.batch_size
    texts = [" ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(count)]
    width = model.get_embedding_dimension() or 0
    targets = torch.from_numpy(rng.normal(size=(len(texts), width)).astype(np.float32))
    batches = aligned_batches(model, texts, targets, options.batch_size)
    loaded = [batches.load(batches.order.batch(step)) for step in range(options.steps)]
    ready = send_to_device(loaded, model.device)
    settings = TrainSettings(steps=options.steps, learning_rate=1e-5, precision=options.precision)
    loss_of = partial(distance, model)
    task = TrainingTask(losses=(distance,), batches=batches)

    def bare() -> float:
        return 1 / bare_steps(model, ready, loss_of, bf16=options.precision == "bf16")

    def ours() -> float:
        return float(options.steps / trained(model, task, settings).seconds)

    harness.compare("steps/s of trundle's loop to a bare loop", ours, bare, options.rounds)


def lora(options: argparse.Namespace) -> None:
    model, rng = load(options.model), np.random.default_rng(0)

    def text(shortest: int, longest: int, number: int) -> str:
        return f"{number} " + " ".join(rng.choice(WORDS, rng.integers(shortest, longest)))

    examples = [
        Example(query=text(4, 16, i), positive=text(20, 80, i), negatives=(text(20, 80, -i),), source=SOURCE)
        for i in range(options.steps * options.batch_size)
    ]

    def by_contrast() -> float:
        student = copy.deepcopy(model)
        _add_adapters(student, seed=0)
        prompts = {SOURCE: Prompts()}
        chosen = ContrastOptions(batch_size=options.batch_size)
        task = make_contrast_task(student, examples, [], chosen, prompts=prompts)
        steps, way = options.steps, options.precision
        settings = TrainSettings(steps=steps, learning_rate=1e-4, precision=way)
        return float(trained(student, task, settings).seconds / steps)

    theirs = partial(by_peft, model, examples, options)
    harness.compare("time of a step of contrast to peft alone", by_contrast, theirs, options.rounds)


def by_peft(model: SentenceTransformer, examples: list[Example], options: argparse.Namespace) -> float:
    """Train the same adapters in a plain script; its batches are tokenised and on the device beforehand."""
    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    backbone = get_peft_model(copy.deepcopy(transformer_of(model).model), config)
    ready = []
    for start in range(0, len(examples), options.batch_size):
        chosen = examples[start : start + options.batch_size]
        columns = ([e.query for e in chosen], [e.positive for e in chosen], [e.negatives[0] for e in chosen])
        tokens = (model.tokenizer(c, padding=True, truncation=True, return_tensors="pt") for c in columns)
        ready.append([column.to(model.device) for column in tokens])

    def vectors(column: Any) -> Tensor:
        states, mask = backbone(**column).last_hidden_state, column["attention_mask"][:, :, None]
        return functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)

    def loss_of(batch: list[Any]) -> Tensor:
        queries, positives, negatives = map(vectors, batch)
        scores = (queries @ torch.cat([positives, negatives]).T / 0.05).float()
        return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    return bare_steps(backbone, ready, loss_of, bf16=options.precision == "bf16")


def layers(options: argparse.Namespace) -> None:
    model, gpu = load(options.model, device="cpu"), torch.cuda.is_available()
    of = layout_of(transformer_of(model).model).layers
    way: Literal["fp32", "bf16"] = "bf16" if gpu else "fp32"
    kept = [of * (100 - dropped) // 100 for dropped in harness.numbers(options.dropped)]
    examples = tuples_for(options)

    def measure(keep: int) -> harness.Json:
        student = _frozen_copy(cut(model, Cut(blocks=tuple(range(keep)))), way)
        return adapter_steps(student, examples, options, way, "checkpointed")

    found = harness.interleave({str(keep): partial(measure, keep) for keep in kept}, options.rounds)
    rows = []
    for keep in kept:
        row = {key: [each[key] for each in found[str(keep)]] for key in ("seconds", "bytes")}
        rows.append(
            {"layers": keep, "parameters": predict(model, blocks=tuple(range(keep))).parameters} | row
        )
        harness.show({"layers": keep} | {key: statistics.median(values) for key, values in row.items()})
    if options.output:
        told = {key: getattr(options, key) for key in ("batch_size", "tokens", "steps", "compile")}
        harness.write_json(options.output, {"of": of, "rows": rows, "conditions": told})


def captured(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("captured compares CUDA graphs; run it on a machine with a GPU")
    model, examples = load(options.model, device="cpu"), tuples_for(options)

    def measure(how: _How) -> harness.Json:
        return adapter_steps(_frozen_copy(model, "bf16"), examples, options, "bf16", how)

    found = harness.interleave({how: partial(measure, how) for how in get_args(_How)}, options.rounds)
    for how in get_args(_How):
        for key in ("seconds", "bytes"):
            ours, plain = ([each[key] for each in found[name]] for name in (how, "plain"))
            print(f"{how}: {statistics.median(ours):.4g} {key} a step, ratio {harness.ratio_of(ours, plain)}")


def tuples_for(options: argparse.Namespace) -> list[Example]:
    """Sample the tuples of all steps."""
    return sample(read_corpus(options.data, seed=0).examples(), options.steps * options.batch_size, seed=0)


def adapter_steps(
    student: SentenceTransformer, examples: list[Example], options: argparse.Namespace, way: Any, how: _How
) -> harness.Json:
    """Train adapters twice on the same batches; return seconds of a step of the second time, and memory.

    Graphs are captured and blocks compiled the first time.
    """
    gpu, captures = torch.cuda.is_available(), how in ("captured", "kept")
    chosen = ContrastOptions(batch_size=options.batch_size, negatives=1, mini_batch=options.mini_batch)
    settings = TrainSettings(steps=options.steps, learning_rate=1e-4, precision=way)
    student = student.to("cuda" if gpu else "cpu")
    student.max_seq_length = options.tokens
    _add_adapters(student, seed=0)
    prompts = {example.source: Prompts() for example in examples}
    task = make_contrast_task(student, examples, [], chosen, prompts=prompts, captured=captures)
    backbone = transformer_of(student).model
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    graphs = captured_backbone(backbone, longest=options.tokens, say=print, keep=how == "kept")
    recomputed = how == "checkpointed"
    with (
        changed_blocks(backbone, compiled=options.compile, recomputed=recomputed),
        graphs if captures else nullcontext(),
    ):
        for _ in range(2):
            seconds = trained(student, task, settings).seconds / options.steps
    return {"seconds": seconds, "bytes": torch.cuda.max_memory_reserved() if gpu else 0}


def precision(options: argparse.Namespace) -> None:
    teacher = load(options.model)
    layers = layout_of(transformer_of(teacher).model).layers
    student = cut(teacher, Cut(blocks=tuple(range(1, layers, 2))))
    count = options.steps * options.batch_size + HELD_OUT
    texts = sample((text.text for text in read_texts(options.data)), count, seed=0)
    targets = torch.from_numpy(embedder(teacher).text(texts))
    held_out, learned = (
        aligned_batches(teacher, texts[part], targets[part], options.batch_size)
        for part in (slice(HELD_OUT), slice(HELD_OUT, None))
    )

    def run(way: Any) -> float:
        mine = copy.deepcopy(student)
        settings = TrainSettings(
            steps=options.steps,
            learning_rate=1e-4,
            warmup=options.steps // 10,
            precision=way,
            dropout=False,
            validate_every=options.steps,
        )
        result = trained(
            mine, TrainingTask(losses=(distance,), batches=learned, validation=held_out), settings
        )
        harness.show({"precision": way, "distance": result.validation})
        return float(options.steps / result.seconds)

    harness.compare("steps/s of bf16 to float32", partial(run, "bf16"), partial(run, "fp32"), options.rounds)


def nested(options: argparse.Namespace) -> None:
    wide = load(options.model).train()
    backbone = transformer_of(wide).model
    layout = layout_of(backbone)
    how = Selection(select=default_select(layout), mlp=options.mlp, hidden_order=())
    cuts = [narrow_cut(layout, backbone.config, Fraction(w), how) for w in harness.names(options.widths)]
    ids = torch.randint(5, layout.sizes["vocab"], (options.batch_size, options.tokens), device=wide.device)
    features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    narrow = [_NarrowModel(wide, what).train() for what in cuts]

    def passes(models: Sequence[nn.Module]) -> None:
        for model in models:
            with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
                vectors = model(dict(features))["sentence_embedding"]
                loss = vectors.float().square().sum(dim=-1).sqrt().mean()
            loss.backward()

    def seconds(models: Sequence[nn.Module]) -> float:
        taken = harness.timed(lambda: passes(models))[0]
        for model in models:
            model.zero_grad()
        return taken

    def peak(models: Sequence[nn.Module]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        optimizer = torch.optim.AdamW(wide.parameters(), fused=True)
        for _ in range(2):
            passes(models)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()

    if torch.cuda.is_available():
        alone, together = peak([wide]), peak([wide, *narrow])
        print(f"peak memory: alone {alone / 1e9:.2f} GB, nested {together / alone:.3f} × that")
    separate = [cut(wide, what).train() for what in cuts]
    ways = (partial(seconds, [wide, *narrow]), partial(seconds, [wide, *separate]))
    harness.compare("time of a nested step to the separate steps", *ways, options.rounds)


def neurons(options: argparse.Namespace) -> None:
    model = load(options.model).eval()
    layout = layout_of(transformer_of(model).model)
    keep = layout.sizes["mlp"] - layout.sizes["mlp"] * options.sparsity // 100
    chosen = tuple(_best_neurons(torch.rand(layout.sizes["mlp"]), keep) for _ in range(layout.layers))
    small = cut(model, Cut(mlp=chosen))
    ids = torch.randint(1000, 2000, (TEXTS, LENGTH), device=model.device)

    @torch.inference_mode()
    def encode(one: SentenceTransformer) -> None:
        for start in range(0, TEXTS, options.batch_size):
            part = ids[start : start + options.batch_size]
            one({"input_ids": part, "attention_mask": torch.ones_like(part)})

    def seconds(one: SentenceTransformer) -> float:
        return harness.timed(lambda: encode(one))[0]

    predicted = cost(model, length=LENGTH).flops_per_token / cost(small, length=LENGTH).flops_per_token
    label = f"speed-up with {keep} of {layout.sizes['mlp']} neurons (FLOPs predict {predicted:.2f})"
    harness.compare(label, partial(seconds, model), partial(seconds, small), options.rounds)


def bench(options: argparse.Namespace) -> None:
    model, work = SentenceTransformer(options.model, device="cpu"), workload()
    threads = torch.get_num_threads()
    with (
        tempfile.TemporaryDirectory() as scratch,
        _Worker("bench", threads=threads, timeout=300, command=_COMMAND) as worker,
    ):
        place = Path(scratch) / "texts.json"
        place.write_text(work.as_json(), encoding="utf-8")
        opening = {"ask": "open", "model": options.model, "engine": "torch", "texts": str(place)}
        worker.ask({**opening, "threads": threads, "batch_size": options.batch_size})

        def ours(kind: str) -> float:
            answer = worker.ask({"ask": "throughput", "kind": kind, "seconds": options.seconds})
            return float(answer["texts"] / answer["seconds"])

        def bare(texts: Sequence[str]) -> float:
            size, done, began = options.batch_size, 0, time.perf_counter()
            for start in itertools.cycle(range(0, len(texts), size)):
                done += len(model.encode(list(texts[start : start + size]), batch_size=size))
                if time.perf_counter() - began >= options.seconds:
                    return done / (time.perf_counter() - began)
            raise AssertionError("there are no texts")

        for kind, texts in (("short", work.short), ("long", work.long)):
            label = f"{kind} texts/s of bench to a bare loop"
            harness.compare(label, partial(ours, kind), partial(bare, texts), options.rounds)


def evaluation(options: argparse.Namespace) -> None:
    library = load(options.model)
    model, tasks = embedder(library), find_tasks(harness.names(options.tasks), options.data[0])
    asked: dict[str, dict[str, None]] = {"encode": {}, "encode_query": {}, "encode_document": {}}
    inside = [0.0]

    def listening(role: str, encode: Encode) -> Encode:
        def listened(texts: Sequence[str]) -> Vectors:
            asked[role].update(dict.fromkeys(texts))
            began = time.perf_counter()
            vectors = encode(texts)
            inside[-1] += time.perf_counter() - began
            return vectors

        return listened

    text, query, document = map(listening, asked, (model.text, model.query, model.document))
    heard = Embedder(name=model.name, text=text, query=query, document=document)

    def whole() -> None:
        inside.append(0.0)
        evaluate(heard, tasks)

    def bare() -> None:
        for role, texts in asked.items():
            if texts:
                getattr(library, role)(list(texts), show_progress_bar=False)

    ways = {"evaluate": lambda: harness.timed(whole), "bare": lambda: harness.timed(bare)}
    found = harness.interleave(ways, options.rounds)
    for place, name in enumerate(("by the clock", "of CPU time")):
        ours, theirs = ([one[place] for one in found[way]] for way in ways)
        print(f"evaluate to a bare encode, {name}: {harness.ratio_of(ours, theirs)}")
    own = harness.ratio_of([one[0] for one in found["evaluate"]], inside[2:])  # without the warm-up
    print(f"evaluate to the encoding inside it: {own}")


def imports(options: argparse.Namespace) -> None:
    torch_loaded = {}

    def seconds(name: str) -> float:
        command = [sys.executable, "-c", WATCH + IMPORTS[name]]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        torch_loaded[name] = done.stderr.split()[-1]
        return time.perf_counter() - began

    found = harness.interleave({name: partial(seconds, name) for name in IMPORTS}, options.rounds)
    for name, taken in found.items():
        ratio = harness.ratio_of(taken, found["import sentence_transformers"])
        print(
            f"{name:30} {statistics.median(taken):8.3f} s, ratio {ratio}, torch loaded: {torch_loaded[name]}"
        )


OPENED = """
import sys, time
from trundle.data.corpus import read_corpus
began = time.perf_counter()
corpus = read_corpus(sys.argv[1:], seed=0)
corpus.facts(), sum(1 for _ in corpus.held_out())
opened = time.perf_counter()
print(opened - began, sum(1 for _ in corpus.train()) / (time.perf_counter() - opened))
"""


def texts(options: argparse.Namespace) -> None:
    taken: dict[str, list[float]] = {"first": [], "again": [], "plain": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name in ("first", "again"):
                command = [sys.executable, "-c", OPENED, *options.data]
                environment = {**os.environ, "TRUNDLE_CACHE": cache}
                printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                seconds, speed = map(float, printed.stdout.split())
                taken[name].append(seconds)
                print(f"opening {name}: {seconds:.2f} s, then {speed:,.0f} training texts/s")
        began = time.perf_counter()
        count = sum(1 for _ in read_texts(options.data))
        taken["plain"].append(time.perf_counter() - began)
        print(f"plain reader: {taken['plain'][-1]:.2f} s for {count:,} texts")
    for name in ("first", "again"):
        print(
            f"opening {name} to one pass of the plain reader: {harness.ratio_of(taken[name], taken['plain'])}"
        )


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], harness.Json]] = {
    "loop": (loop, {"steps": 40, "rounds": 7, "batch_size": 32}),
    "lora": (lora, {"steps": 20, "rounds": 5, "batch_size": 16}),
    "layers": (layers, {"steps": 10, "rounds": 3, "batch_size": 64}),
    "captured": (captured, {"steps": 10, "rounds": 3, "batch_size": 64}),
    "precision": (precision, {"steps": 60, "rounds": 3, "batch_size": 32}),
    "nested": (nested, {"rounds": 20, "batch_size": 64}),
    "neurons": (neurons, {"rounds": 5, "batch_size": 32}),
    "bench": (bench, {"rounds": 7, "batch_size": 32}),
    "evaluate": (evaluation, {"rounds": 3}),
    "imports": (imports, {"rounds": 5}),
    "texts": (texts, {"rounds": 3}),
}


def main() -> None:
    parser = harness.make_parser(__doc__, *COMMANDS)
    parser.add_argument("model", nargs="?")
    parser.add_argument(
        "--data", nargs="+", help="layers, captured: tuples; precision, texts: texts; evaluate: tasks"
    )
    parser.add_argument("--steps", type=int, help="loop, lora, layers, captured, precision")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="loop, lora")
    parser.add_argument("--widths", default="1/2,1/4", help="nested")
    parser.add_argument("--mlp", action="store_true", help="nested: narrow MLPs too")
    parser.add_argument(
        "--tokens", type=int, default=64, help="nested, layers, captured: tokens of a text, at most"
    )
    parser.add_argument("--compile", action="store_true", help="layers, captured: compile them before")
    parser.add_argument("--mini-batch", type=int, help="layers, captured: texts in memory at once")
    parser.add_argument("--dropped", default="0,30,50,80", help="layers: percentages of the layers to drop")
    parser.add_argument("--sparsity", type=int, default=50, help="neurons: percentage removed")
    parser.add_argument("--seconds", type=float, default=2.0, help="bench: of each measurement")
    parser.add_argument("--tasks", default=TASKS, help="evaluate")
    parser.add_argument("-o", "--output", help="layers: write the rows to this file")
    options = parser.parse_args()
    work, defaults = COMMANDS[options.what]
    harness.set_defaults(options, defaults)
    work(options)


if __name__ == "__main__":
    main()

"""What a smaller vocabulary costs and saves: scores after a cut or fine-tuning, token statistics and time.

    python benchmarks/vocabulary.py cuts   MODEL --data DIR -o cuts.json [--align 300]
    python benchmarks/vocabulary.py glue   MODEL --data DIR -o glue/ [--seeds 0,1,2]
    python benchmarks/vocabulary.py tokens MODEL --data DIR -o tokens.json
    python benchmarks/vocabulary.py cost   MODEL --data DIR -o cost.json
    python benchmarks/vocabulary.py shape  --data TEXTS -o FOLDER
    python benchmarks/vocabulary.py speed  --data TEXTS

DIR has the tasks and texts (classification/, pairs/, retrieval/, sts/, triplets/, texts/).

cuts    scores for every score, fate of removed tokens (--oov) and share of parameters removed. Tokens are
        selected, and `align` trains, on training texts of the same domain, for STSBenchmark on general texts
glue    the paper's table 1: a model fine-tuned for each task after each way to remove parameters, on the
        split `train` alone, and scored on `test`, or `dev` for RTE. Cells that exist are not made again.
        With --tokens all but these per cent of the tokens are removed, instead of a share of all parameters;
        `attention` scores tokens in the complete model after it was fine-tuned with the same seed
tokens  table 2: how many tokens a task's texts use, and how unevenly. `top_fifth` is the share of occurrences
        of the most frequent fifth of the tokens that occur in these rows (a fifth of the complete vocabulary
        is more than all tokens of CoLA); `unseen` the share of distinct tokens of the scored rows that do not
        occur in `train`
cost    table 3: parameters, bytes, peak memory of a process, and CPU time per text of the full model and of
        two cut ones
shape   make a model of ModernBERT-base's shape for `cost`: random weights, and a byte-level BPE vocabulary of
        as many tokens that is trained on the texts
speed   how long a byte-level BPE vocabulary of 250,000 tokens takes to cut, and how much of it is tokenising
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast, XLMRobertaConfig

import harness
from harness import Json, names
from trundle.bench.rounds import _Worker
from trundle.bench.workload import _cpu_clock, _other_cores, _Workload, workload
from trundle.data.corpus import Corpus
from trundle.data.examples import LabelledRow
from trundle.data.sampling import fingerprint, sample
from trundle.data.texts import Text, read_texts
from trundle.errors import ImpossibleCut
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.evaluate.tasks import Task
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.methods.finetune.finetune import _measures_of, _trained
from trundle.methods.vocabulary.scores import count_tokens, tokenised
from trundle.model.cost import cost as cost_of
from trundle.model.encode import embedder
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.matrices import prunable
from trundle.model.save import save, weight_bytes
from trundle.model.surgery import transformer_of
from trundle.model.token_map import read_vocabulary
from trundle.model.tokenizer import _backend_of
from trundle.recipe import make_options
from trundle.records import Lineage
from trundle.runtime.description import usable_cores

DOMAINS = "Banking77,SciFact,STSBenchmark,finance"
MEASURES = {"CoLA": "matthews"}
"""What a task is scored by, if it is not accuracy."""
PLACES = (
    "classification/SST2",
    "classification/CoLA",
    "pairs/MRPC",
    "pairs/RTE",
    "pairs/QNLI",
    "pairs/Quora",
)
FILES = {place.split("/")[1]: f"{place}.parquet" for place in PLACES}
VOCABULARIES = {
    "random": {"score": "random", "oov": "unk"},
    "frequency": {"score": "frequency", "oov": "unk"},
    "tfidf": {"score": "tfidf", "oov": "unk"},
    "tfidf+cluster": {"score": "tfidf", "oov": "cluster"},
    "decompose": {"score": "tfidf", "oov": "decompose"},
    "attention": {"score": "attention", "oov": "unk"},
}
TUNED = "attention"
"""The method that scores tokens in a model that was fine-tuned before."""
BASELINES = {"magnitude": 0.0, "low-rank": 1.0, "low-rank+sparse": 0.5}
"""Ways to remove parameters inside the layers; the share of the rest that the low-rank factors get."""
COMPARED = ",".join(("full", *VOCABULARIES, *BASELINES))
TIMES = {"short": 18, "long": 3}
"""Texts of each kind in a round: a multiple of the number of models, so that each is first equally often."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ENCLOSING = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
SIZE, KEPT, READ = 250_000, 30_000, 200_000


def splits(data: Path, task: str) -> dict[str, list[LabelledRow]]:
    """Read the rows of a task by split."""
    found: dict[str, list[LabelledRow]] = {}
    for row in pq.read_table(data / FILES[task]).to_pylist():
        texts = tuple(row[column] for column in ("text", "sentence1", "sentence2") if column in row)
        found.setdefault(row["split"], []).append(LabelledRow(texts=texts, label=row["label"]))
    return found


def texts_of(rows: Sequence[LabelledRow]) -> list[str]:
    return [text for row in rows for text in row.texts]


def cut(
    model: SentenceTransformer, options: Json, removed: int, context: Context, *, tokens: int | None = None
) -> tuple[SentenceTransformer, Any]:
    """Remove a percentage of all parameters by cutting tokens, or keep a percentage of the tokens."""
    share = {"parameters": str(1 - Fraction(removed, 100))} if tokens is None else {"fraction": f"{tokens}%"}
    return harness.apply_step("vocabulary", model, options | share, context)


def read_domain(name: str, data: Path, scratch: Path) -> tuple[Task, list[str]]:
    """Return a task and training texts of its domain."""
    if name == "finance":
        folder, others, measured = harness.held_out_search(name, data, scratch)
        texts = [row[column] for row in others for column in ("query", "positive", "negative")]
        return find_tasks([str(folder)])[0], [text for text in dict.fromkeys(texts) if text not in measured]
    task = find_tasks([name], data)[0]
    if name == "STSBenchmark":
        sources = [str(path) for path in sorted((data / "texts").glob("*.parquet"))]
        return task, sample((text.text for text in read_texts(sources)), 30_000, seed=0)
    if name == "SciFact":
        folder = data / "retrieval" / name
        qrels = pq.read_table(folder / "qrels.parquet", filters=[("split", "=", "train")])
        judged = [("_id", "in", qrels["corpus-id"].to_pylist())]
        documents = pq.read_table(folder / "corpus.parquet", filters=judged).to_pylist()
        texts = [text.text for text in read_texts(str(folder / "queries.parquet"))]
        return task, texts + [f"{row['title']} {row['text']}" for row in documents]
    return task, [text.text for text in read_texts(str(data / "classification" / f"{name}.parquet"))]


def domain_corpus(texts: Sequence[str]) -> Corpus:
    """Train on all texts but a twentieth, which selects the best checkpoint."""
    facts = ({"fingerprint": fingerprint(texts), "texts": len(texts)},)

    def part(validates: bool) -> Iterator[Text]:
        return (Text(text=text) for row, text in enumerate(texts) if (row % 20 == 0) is validates)

    return Corpus(
        train=lambda: part(False),
        validation=lambda: part(True),
        held_out=lambda: iter(()),
        facts=lambda: facts,
    )


def cuts(options: argparse.Namespace) -> None:
    model, rows = load(options.model), []
    shares = harness.numbers(options.removed or "5,10,15,20,25,35")

    def scored(task: Task, encoder: Any) -> float:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.autocast(device, torch.bfloat16, enabled=options.precision == "bf16"):
            return evaluate(encoder, [task])[0].score

    def measure(task: Task, texts: list[str], removed: int, setting: Json, whole: float) -> Iterator[Json]:
        context, began = Context(original=model, corpus=domain_corpus(texts)), time.monotonic()
        small, plan = cut(model, setting | {"characters": options.characters}, removed, context)
        row: Json = {"kept": len(plan.kept), "coverage": plan.coverage}
        row["seconds"] = round(time.monotonic() - began, 1)
        row["removed"] = round(1 - cost_of(small).parameters / cost_of(model).parameters, 4)
        encoders = {0: embedder(small)}
        if options.align:
            align = {"steps": options.align, "start": "keep", "texts": 32 * options.align}
            encoders[options.align] = embedder(harness.apply_step("align", small, align, context)[0])
        for steps, encoder in encoders.items():
            found = scored(task, encoder)
            score = {"value": round(found, 5), "retention": round(found / whole, 5), "align": steps}
            yield {"domain": task.name, "characters": options.characters} | setting | row | score

    with tempfile.TemporaryDirectory() as scratch:
        for name in names(options.domains):
            task, texts = read_domain(name, options.data, Path(scratch))
            whole = scored(task, embedder(model))
            for removed, score, oov in itertools.product(shares, names(options.scores), names(options.oov)):
                try:
                    for row in measure(task, texts, removed, {"score": score, "oov": oov}, whole):
                        rows.append(row)
                        harness.show(row)
                except ImpossibleCut as error:
                    print(f"{name} {score} {oov} {removed}%: {error}", flush=True)
                harness.write_json(options.output, {"model": options.model, "rows": rows})


class Factored(nn.Module):
    """A linear layer as a product of two thin matrices, plus some complete rows of what that misses."""

    places: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, share: float, rank_share: float) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        budget = math.floor(share * outputs * inputs)
        rank = max(1, math.floor(rank_share * budget / (outputs + inputs)))
        left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
        scale = values[:rank].sqrt()
        self.left = nn.Parameter((left[:, :rank] * scale).contiguous())
        self.right = nn.Parameter((scale[:, None] * right[:rank]).contiguous())
        spare = 0 if rank_share == 1 else max(0, budget - rank * (outputs + inputs)) // inputs
        missed = weight.float() - self.left.detach() @ self.right.detach()
        self.register_buffer("places", missed.norm(dim=1).argsort(descending=True)[:spare])
        self.rows = nn.Parameter(missed[self.places]) if spare else None
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer without building the complete matrix."""
        outputs = nn.functional.linear(nn.functional.linear(inputs, self.right), self.left, self.bias)
        if self.rows is None:
            return outputs
        return outputs.index_add(-1, self.places, nn.functional.linear(inputs, self.rows).to(outputs.dtype))


def baseline(model: SentenceTransformer, method: str, remove: int) -> SentenceTransformer:
    """Remove parameters inside the layers: the smallest weights, or by factoring every matrix.

    `low-rank+sparse` has the form of LoSparse, but is computed at once and not gradually during training.
    """
    small = copy_of(model)
    backbone = transformer_of(small).model
    matrices = prunable(layout_of(backbone), attention=True)
    weights = [backbone.get_parameter(matrix.parameter) for matrix in matrices]
    total = sum(weight.numel() for weight in weights)
    if remove >= total:
        raise SystemExit(f"the layers have {total:,} weights in their matrices, {remove:,} cannot be removed")
    if method == "magnitude":
        with torch.no_grad():
            gone = torch.zeros(total, dtype=torch.bool, device=weights[0].device)
            gone[torch.cat([weight.abs().flatten() for weight in weights]).argsort()[:remove]] = True
            parts = torch.split(gone, [weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.masked_fill_(part.view_as(weight), 0.0)
        return small
    for matrix, weight in zip(matrices, weights, strict=True):
        bias = getattr(backbone.get_submodule(matrix.name), "bias", None)
        made = Factored(matrix.oriented(weight.detach()), bias, 1 - remove / total, BASELINES[method])
        backbone.set_submodule(matrix.name, made)
    return small


def parameters(model: SentenceTransformer) -> int:
    return sum(weight.numel() for weight in model.parameters())


def glue_cell(options: argparse.Namespace, task: str, method: str) -> Json:
    """Fine-tune for one task after one method, once per seed."""
    model, tool, found = load(options.model), METHODS["finetune"], splits(options.data, task)
    rows, measured = found["train"], found.get("test") or found["dev"]
    rows = sample(rows, options.rows, seed=0) if options.rows else rows
    corpus = harness.training_corpus(texts_of(rows), rows)
    removed, before = int(options.removed or 20), parameters(model)
    asked = {"epochs": options.epochs, "batch_size": 32, "learning_rate": 5e-5, "precision": "auto"}
    asked |= {"max_length": min(128, model.max_seq_length or 128), "keep_zeros": method == "magnitude"}
    scores, before_cut, lost, began = [], [], 0, time.monotonic()

    def tune(small: SentenceTransformer, context: Context) -> tuple[SentenceTransformer, Json]:
        plan = tool.plan(small, make_options(tool, asked), context)
        student, learned = _trained(small, plan, rows, (), context)
        found = _measures_of(student, plan, measured)
        learned.done()
        return student, found

    for seed in harness.numbers(options.seeds):
        context, small = Context(original=model, corpus=corpus, seed=seed, progress=harness.Lines()), model
        if method in BASELINES:
            small = baseline(model, method, before * removed // 100)
        elif method in VOCABULARIES:
            how = VOCABULARIES[method] | {"characters": options.characters}
            if method == TUNED:
                tuned, found = tune(model, context)
                context, how = replace(context, models={TUNED: tuned}), how | {"scored_by": TUNED}
                before_cut.append(found)
            small, _ = cut(model, how, removed, context, tokens=options.tokens)
        lost = before * removed // 100 if method == "magnitude" else before - parameters(small)
        scores.append(tune(small, context)[1])
    measure = MEASURES.get(task, "accuracy")
    cell = {"task": task, "method": method, "characters": options.characters, "measure": measure}
    cell |= {"tokens": options.tokens, "full_scores": before_cut}
    cell |= {"score": statistics.fmean(score[measure] for score in scores), "removed": lost / before}
    cell |= {"rows": len(rows), "measured_rows": len(measured), "seeds": options.seeds, "scores": scores}
    return cell | {"options": asked, "seconds": round(time.monotonic() - began, 1)}


def glue(options: argparse.Namespace) -> None:
    folder = Path(options.output)
    if options.only:
        harness.write_json(folder / f"{options.only}.json", glue_cell(options, *options.only.split("-", 1)))
        return
    cells = [f"{task}-{method}" for task in names(options.tasks) for method in names(options.methods)]
    missing = [cell for cell in cells if not (folder / f"{cell}.json").is_file()]
    harness.run_rows(missing, folder, at_once=options.at_once)
    for cell in cells:
        found = json.loads((folder / f"{cell}.json").read_text())
        print(f"{cell:30} removed {found['removed']:7.2%}   {found['measure']} {found['score']:.4f}")


def tokens(options: argparse.Namespace) -> None:
    tokenizer, rows = _backend_of(AutoTokenizer.from_pretrained(options.model)), []
    size = tokenizer.get_vocab_size()
    for task in FILES:
        found, seen = splits(options.data, task), None
        measured = "test" if "test" in found else "dev"
        for split in ("train", measured):
            if split not in found:
                continue
            texts = texts_of(found[split])
            counts = count_tokens(tokenised(tokenizer, texts), size).occurrences
            falling = np.sort(counts[counts > 0])[::-1]
            row: Json = {"task": task, "rows": "train" if split == "train" else "measured", "split": split}
            row |= {"vocabulary": size, "texts": len(texts), "tokens": len(falling)}
            row["share"] = round(100 * len(falling) / size, 2)
            row["top_fifth"] = round(float(100 * falling[: round(len(falling) / 5)].sum() / falling.sum()), 2)
            if split == measured:
                new = 0 if seen is None else int(((counts > 0) & (seen == 0)).sum())
                row["unseen"] = None if seen is None else round(100 * new / len(falling), 2)
            seen = counts
            rows.append(row)
            harness.show(row)
    harness.write_json(options.output, {"rows": rows})


def cost(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    whole, found = load(options.model, device="cpu"), splits(options.data, "SST2")
    work, removed = workload(texts_of(found["test"])), int(options.removed or 20)
    context = Context(original=whole, corpus=harness.training_corpus(texts_of(found["train"])))
    made = {"whole": whole}
    for name in ("tfidf+cluster", "decompose"):
        made[name], _ = cut(whole, VOCABULARIES[name], removed, context)
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, model in made.items():
            folder = save(model, Path(scratch) / name, lineage=Lineage(source="benchmark"), card="")
            table: Any = transformer_of(model).model.get_input_embeddings().weight
            row: Json = {"method": name, "parameters": parameters(model)}
            row["embedding_parameters"] = int(table.numel())
            maps = sum(file.stat().st_size for file in folder.rglob("*.npy"))  # of removed tokens
            row |= {"storage_bytes": weight_bytes(folder) + maps, "memory_bytes": peak_memory(folder, work)}
            rows.append(row | {"short": [], "long": []})
    before = _cpu_clock()
    for turn in range(-1, options.rounds):
        for kind, count in TIMES.items():
            texts = getattr(work, kind)
            chosen = [texts[(max(turn, 0) * count + place) % len(texts)] for place in range(count)]
            for row, spent in zip(rows, milliseconds(list(made.values()), chosen), strict=True):
                row[kind] += [spent] if turn >= 0 else []
    others = _other_cores(before, _cpu_clock())
    for row in rows:
        times = {kind: harness.ratio_of(row[kind], rows[0][kind]) for kind in TIMES}
        harness.show(row | times)
    conditions = {"removed": removed, "cores": usable_cores(), "torch": torch.__version__}
    conditions["other_cores"] = None if others is None else round(others, 2)
    conditions["processor"] = {"x86_64": "x86", "aarch64": "ARM"}.get(platform.machine(), platform.machine())
    harness.write_json(options.output, {"model": options.model, "rows": rows, "conditions": conditions})


def peak_memory(folder: Path, work: _Workload) -> int:
    """Return the peak memory of a process that has this model alone."""
    texts = folder / "bench-texts.json"
    texts.write_text(work.as_json(), encoding="utf-8")
    opening = {"ask": "open", "model": str(folder), "engine": "torch", "texts": str(texts)}
    with _Worker(folder.name, threads=1, timeout=500) as worker:
        worker.ask({**opening, "threads": 1, "batch_size": 32})
        worker.ask({"ask": "warm"})
        return int(worker.ask({"ask": "memory"})["peak"])


def milliseconds(made: Sequence[SentenceTransformer], texts: Sequence[str]) -> list[float]:
    """Return the CPU time per text of each model; the model that goes first changes from text to text."""
    spent = [0.0] * len(made)
    for turn, text in enumerate(texts):
        for place in range(len(made)):
            model = (place + turn) % len(made)
            began = time.process_time()
            made[model].encode([text], show_progress_bar=False)
            spent[model] += time.process_time() - began
    return [round(1e3 * seconds / len(texts), 3) for seconds in spent]


def bpe_model(
    texts: Sequence[str], size: int, special: Mapping[str, str], config: Any
) -> SentenceTransformer:
    """Train a byte-level BPE tokenizer of `size` tokens and put it on a body with random weights.

    `special` are the tokens by their names in transformers; texts begin and end with the first two.
    """
    first, last, *_ = found = list(dict.fromkeys(special.values()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=found,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(found)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(first, 0), (last, 1)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **special)  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        config.update({"vocab_size": len(wrapped), "pad_token_id": wrapped.pad_token_id})
        AutoModel.from_config(config).save_pretrained(scratch)  # type: ignore[no-untyped-call]
        wrapped.save_pretrained(scratch)
        body = Transformer(scratch)
    return SentenceTransformer(modules=[body, Pooling(config.hidden_size)], device="cpu")


def shape(options: argparse.Namespace) -> None:
    texts = sample((text.text for text in read_texts(str(options.data))), options.rows or READ, seed=0)
    config = AutoConfig.for_model("modernbert")
    model = bpe_model(texts, config.vocab_size, ENCLOSING, config)
    model.save(str(options.output))
    print(f"{len(model.tokenizer):,} tokens, {parameters(model):,} parameters: {options.output}")


def speed(options: argparse.Namespace) -> None:
    texts = sample((text.text for text in read_texts(str(options.data))), options.rows or READ, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        config = XLMRobertaConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=128)
        config.update({"num_attention_heads": 4})
        model = bpe_model(texts, SIZE, SPECIAL, config)
        context = Context(original=model, corpus=harness.training_corpus(texts))

        def tokenise() -> None:
            sum(len(ids) for ids, _ in tokenised(read_vocabulary(model).backend, texts))

        def cut_and_save() -> None:
            small, _ = harness.apply_step("vocabulary", model, {"keep": KEPT, "score": "tfidf"}, context)
            save(small, Path(scratch) / "small", lineage=Lineage(source="pico"), card="")

        # Tokenising is timed before and after, so that a busy machine shows in the difference.
        first, whole, second = (harness.timed(work)[0] for work in (tokenise, cut_and_save, tokenise))
    print(
        f"{len(model.tokenizer):,} tokens cut to {KEPT:,} by {len(texts):,} texts: {whole:.1f} s; tokenising "
        f"alone {first:.1f} s before and {second:.1f} s after, {(first + second) / 2 / whole:.0%} of it"
    )


COMMANDS = {"cuts": cuts, "glue": glue, "tokens": tokens, "cost": cost, "shape": shape, "speed": speed}


def main() -> None:
    parser = harness.make_parser(__doc__, *COMMANDS)
    parser.add_argument("model", nargs="?")
    parser.add_argument(
        "--data", required=True, type=Path, help="folder of the tasks, or of texts for shape and speed"
    )
    parser.add_argument("--removed", help="percentages of all parameters")
    parser.add_argument("--tokens", type=int, help="glue: percentage of the tokens to keep, instead")
    parser.add_argument("--characters", default="auto", choices=("auto", "all", "seen"), help="cuts, glue")
    parser.add_argument("--domains", default=DOMAINS, help="cuts")
    parser.add_argument("--scores", default="tfidf,frequency,attention,cluster,random", help="cuts")
    parser.add_argument("--oov", default="decompose,cluster,unk", help="cuts: what happens to removed tokens")
    parser.add_argument("--align", type=int, default=0, help="cuts: also score after these steps of align")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="cuts")
    parser.add_argument("--tasks", default="SST2,CoLA,MRPC,RTE", help="glue")
    parser.add_argument("--methods", default=COMPARED, help="glue")
    parser.add_argument("--rows", type=int, help="glue: training rows of a task at most; shape, speed: texts")
    parser.add_argument("--epochs", type=int, default=3, help="glue")
    parser.add_argument("--seeds", default="0", help="glue")
    parser.add_argument("--at-once", type=int, default=1, help="glue: processes")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=20, help="cost")
    parser.add_argument("-o", "--output", help="file, or folder for glue")
    options = parser.parse_args()
    if options.what != "speed" and not options.output:
        parser.error("pass -o")
    if options.what not in ("shape", "speed") and not options.model:
        parser.error("pass MODEL")
    COMMANDS[options.what](options)


if __name__ == "__main__":
    main()

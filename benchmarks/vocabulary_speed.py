"""How long a real-size vocabulary takes to cut: a pico body with 250,000 tokens, and how much of it is tokenising.

    python benchmarks/vocabulary_speed.py --texts DIR
    python benchmarks/vocabulary_speed.py --texts DIR --kind bpe --limit 50000

The vocabulary is made from the texts in DIR (parquet, txt …): all words and parts of words, the most frequent first. The
time of tokenising alone is taken right before and right after the cut of the same texts; a machine that is busy with
something else shows in how far the two are apart.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from rows import to_learn_from
from trundle.data.sampling import sample
from trundle.data.texts import read_texts
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.methods.vocabulary.scores import tokenised
from trundle.model.save import save
from trundle.model.vocabulary import read_vocabulary
from trundle.recipe import _make_options
from trundle.records import Lineage

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
LONGEST_PIECE = 12


def unigram(texts: Sequence[str], size: int) -> Tokenizer:
    """Every part of every word that is long or frequent enough, with its frequency as its likelihood."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(f"▁{word}" for word in text.split())
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(len(word)):
            for end in range(start + 1, min(len(word), start + LONGEST_PIECE) + 1):
                pieces[word[start:end]] += count
    total = sum(pieces.values())
    letters = [piece for piece in pieces if len(piece) == 1]
    longer = [piece for piece, _ in pieces.most_common() if len(piece) > 1]
    chosen = (letters + longer)[: size - len(SPECIAL)]
    vocab = [(token, 0.0) for token in SPECIAL] + [
        (piece, math.log(pieces[piece] / total)) for piece in chosen
    ]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def bpe(texts: Sequence[str], size: int) -> Tokenizer:
    """Byte-level, trained."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


KINDS: dict[str, Callable[[Sequence[str], int], Tokenizer]] = {"unigram": unigram, "bpe": bpe}


def pico_body(tokenizer: Tokenizer, folder: Path) -> SentenceTransformer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)  # type: ignore[no-untyped-call]
    config = XLMRobertaConfig(
        vocab_size=len(wrapped),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    XLMRobertaModel(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    wrapped.save_pretrained(folder)
    transformer = Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, Pooling(64)], device="cpu")


def tokenise_only(model: SentenceTransformer, texts: Sequence[str]) -> tuple[float, int]:
    backend = read_vocabulary(model).backend
    began = time.monotonic()
    tokens = sum(len(ids) for ids, _ in tokenised(backend, texts))
    return time.monotonic() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", required=True, help="a file or folder of texts")
    parser.add_argument("--kind", choices=KINDS, default="unigram")
    parser.add_argument("--size", type=int, default=250_000)
    parser.add_argument("--keep", type=int, default=30_000)
    parser.add_argument("--limit", type=int, default=200_000, help="texts to read")
    parser.add_argument("--score", default="tfidf")
    arguments = parser.parse_args()
    texts = sample((text.text for text in read_texts(arguments.texts)), arguments.limit, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        model = pico_body(KINDS[arguments.kind](texts, arguments.size), Path(scratch) / "body")
        print(f"{arguments.kind}: {len(model.tokenizer):,} tokens, made in {time.monotonic() - began:.1f} s")
        first, tokens = tokenise_only(model, texts)
        tool, context = METHODS["vocabulary"], Context(original=model, corpus=to_learn_from(texts))
        began, worked = time.monotonic(), time.process_time()
        plan = tool.plan(
            model, _make_options(tool, {"keep": arguments.keep, "score": arguments.score}), context
        )
        planned = time.monotonic() - began
        small = tool.apply(model, plan, context).model
        save(small, Path(scratch) / "small", lineage=Lineage(source="pico"), card="")
        whole, worked = time.monotonic() - began, time.process_time() - worked
        second, _ = tokenise_only(model, texts)
        alone = (first + second) / 2
        print(f"{len(texts):,} texts, {tokens:,} tokens; {plan}")
        print(
            f"tokenising alone {first:.1f} s before and {second:.1f} s after: {tokens / alone / 1e6:.2f}M tokens/s"
        )
        print(
            f"plan {planned:.1f} s, cut and save {whole - planned:.1f} s; all {whole:.1f} s ({worked:.1f} s of processor), "
            f"tokenising {alone / whole:.0%} of it"
        )


if __name__ == "__main__":
    main()

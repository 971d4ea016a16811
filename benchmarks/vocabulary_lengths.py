"""Tokens per text after a BPE vocabulary is cut: the step's choice beside simpler ones, on texts none of them saw.

    python benchmarks/vocabulary_lengths.py MODEL --texts DIR

naive     the most frequent tokens, and the merges between them: a token whose halves are gone can never be produced
dropping  the most frequent tokens, all merges as they were: what is lost is read as unknown, here counted
halves    the most frequent tokens, each with the halves it needs
frequency, tfidf  what the step does: scores are passed down to the halves
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from trundle.data.sampling import draw, sample
from trundle.data.texts import read_texts
from trundle.methods.vocabulary.scores import (
    _best_tokens,
    _passed_down,
    _spilling,
    _tfidf_scores,
    count_tokens,
    tokenised,
)
from trundle.model.tokenizer import (
    NO_MERGES,
    MergeTree,
    _backend_of,
    _basic_ids,
    _cut_file,
    _named_ids,
    _tokenizer_content,
)

SHARES = (2, 4, 8, 16)
MEASURED = 4000


def total(tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    return sum(len(ids) for ids, _ in tokenised(tokenizer, texts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--texts", required=True, nargs="+", help="files or folders of texts")
    parser.add_argument("--limit", type=int, default=100_000, help="texts to choose by")
    arguments = parser.parse_args()
    opened = AutoTokenizer.from_pretrained(arguments.model)
    whole, content = _backend_of(opened), _tokenizer_content(opened)
    tree, needed, size = MergeTree(content), _named_ids(content) | _basic_ids(content), whole.get_vocab_size()
    lines = list(dict.fromkeys(text.text for text in read_texts(arguments.texts)))
    measured = sample((text for text in lines if draw(text, 0) < 0.1), MEASURED, seed=0)
    train = sample((text for text in lines if draw(text, 0) >= 0.1), arguments.limit, seed=0)
    with _spilling() as spill:
        counts = count_tokens(spill.through(tokenised(whole, train)), size)
        tfidf = _passed_down(_tfidf_scores(spill.again(), counts), tree)
    final = counts.occurrences.astype(float)
    scores = {"final": final, "frequency": _passed_down(final, tree), "tfidf": tfidf}
    order = {name: np.argsort(-score, kind="stable").tolist() for name, score in scores.items()}
    before = total(whole, measured)
    seen = np.bincount(np.concatenate([ids for ids, _ in tokenised(whole, measured)]), minlength=size)
    print(
        f"{size:,} tokens; {len(train):,} texts to choose by, {len(measured):,} measured, {before / len(measured):.1f} tokens each"
    )
    print(f"{'kept':>8} {'naive':>8} {'halves':>8} {'frequency':>10} {'tfidf':>8}   dropping: unknown")
    for share in SHARES:
        keep = size // share
        naive = _best_tokens(order["final"], needed, keep, NO_MERGES)
        choices = [
            naive,
            *(_best_tokens(order[name], needed, keep, tree) for name in ("final", "frequency", "tfidf")),
        ]
        small = [Tokenizer.from_str(json.dumps(_cut_file(content, kept))) for kept in choices]
        ratios = [f"{total(tokenizer, measured) / before:.3f}×" for tokenizer in small]
        unknown = 1 - seen[naive].sum() / seen.sum()
        widths = (8, 8, 10, 8)
        shown = " ".join(text.rjust(width) for text, width in itertools.zip_longest(ratios, widths))
        print(f"{keep:8,} {shown}   {unknown:.2%}", flush=True)


if __name__ == "__main__":
    main()

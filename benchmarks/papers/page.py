"""docs/results.md, its figure and README's table from what was measured for each paper and for all of them together.

    python benchmarks/papers/page.py [--check]

With `--check` nothing is written; it fails where a file is not what would be written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gaprune_claims
import head_to_head
import l3prune_claims
import leaf_claims
import nml_claims
import vocabulary_claims
from claims import markdown

ROOT = Path(__file__).parents[2]
PAGE, FIGURE, README = ROOT / "docs" / "results.md", ROOT / "docs" / "head-to-head.svg", ROOT / "README.md"
BEGIN, END = "<!-- head to head: written by benchmarks/papers/page.py -->", "<!-- end -->"
COMPUTED = (leaf_claims, gaprune_claims, l3prune_claims, nml_claims, vocabulary_claims)
HEAD = """# Five papers, measured here

All methods head to head, then what each paper claims, in small, with our own implementation, models and data. Verdicts are computed from the figures: see
`benchmarks/papers`. This page is written by `python benchmarks/papers/page.py`."""

DATA = """## Data

The scripts read test sets and texts of public projects as parquet files; the form is that of [evaluate](evaluate.md). Test rows are only measured on, never trained on nor chosen by.

| the 27 English test sets | | measure |
|---|---|---|
| STS | STS12, STS13, STS14, STS15, STS17-en-en, STSBenchmark | Spearman |
| retrieval | ArguAna, CACM, Cranfield, SciFact, msmarco-mini, squadshifts | nDCG@10 |
| classification | BBCNews, Banking77, ChemProt, CoLA, Emotion, FinancialPhraseBank, SST2, TREC | accuracy |
| clustering | 20Newsgroups, SearchSnippets | V-measure |
| pairs | MRPC, QNLI, Quora, RTE, SciTail | average precision |

- *12 sets* are STS and retrieval; the teacher's index is searched in the six of retrieval. The split `test` is scored, or `dev` where there is no test (QNLI, RTE). Collections are small, some are parts of the well-known ones:
  compare rows here with one another, not with figures published elsewhere.
- LEAF, depth and width by `align` learn from unlabelled texts: queries, documents, definitions, and a mix of others, 953,264 distinct ones in all. The backbone saw all of them at the end, depth and width 400,000.
- L³Prune, and sentence-transformers' distillation, learn from tuples of a query, an answer and negatives of several sources, the decoder of the nested models from SNLI alone; nested decoders are scored on STS, the others on retrieval, too.
  Qwen2.5-Coder-0.5B-Instruct stands for Qwen2.5-0.5B: the same layers and widths, trained further on code.
- GAPrune: finance is a search by every tenth of its tuples, and FinancialPhraseBank; chemistry likewise, with ChemProt. Tuples that share no text with these are learned from. Texts of other kinds are STSBenchmark, STS15, SciFact and Cranfield.
- Vocabulary pruning without training: Banking77, SciFact, STSBenchmark and the finance search, tokens chosen by texts of the same domain that are not measured on, for STSBenchmark by 30,000 general ones. With training: the `train` rows of
  SST2, CoLA, MRPC, RTE and STSBenchmark; of the last they are also in other STS sets, so those classifiers are scored on their own task alone."""


def files() -> dict[Path, str]:
    """What each file should hold."""
    together = head_to_head.read_kept()
    sections = [head_to_head.markdown(together), *(markdown(one.evidence()) for one in COMPUTED)]
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join(head_to_head.table(together["contenders"], together["sets"]))
    return {
        PAGE: "\n\n".join([HEAD, *sections, DATA]) + "\n",
        FIGURE: head_to_head.figure(together) + "\n",
        README: f"{before}{BEGIN}\n\n{table}\n\n{END}{after}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for place, content in files().items():
        if not check:
            place.write_text(content, encoding="utf-8")
        elif place.read_text(encoding="utf-8") != content:
            raise SystemExit(
                f"{place} is not what benchmarks/papers/page.py writes; run it and commit what it wrote"
            )


if __name__ == "__main__":
    main()

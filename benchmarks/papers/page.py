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
import nml_claims
import vocabulary_claims
from claims import KEPT, markdown, read

ROOT = Path(__file__).parents[2]
PAGE, FIGURE, README = ROOT / "docs" / "results.md", ROOT / "docs" / "head-to-head.svg", ROOT / "README.md"
BEGIN, END = "<!-- head to head: written by benchmarks/papers/page.py -->", "<!-- end -->"
COMPUTED = (gaprune_claims, l3prune_claims, nml_claims, vocabulary_claims)
HEAD = """# Five papers, measured here

All methods head to head, then what each paper claims, in small, with our own implementation, models and data. Verdicts are computed from the figures: see
`benchmarks/papers`. This page is written by `python benchmarks/papers/page.py`."""


def files() -> dict[Path, str]:
    """What each file should hold."""
    together = head_to_head.read_kept()
    sections = [head_to_head.markdown(together)]
    sections += [markdown(read(KEPT / "leaf.json")), *(markdown(one.evidence()) for one in COMPUTED)]
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join(head_to_head.table(together["contenders"], together["sets"]))
    return {
        PAGE: "\n\n".join([HEAD, *sections]) + "\n",
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

"""Write docs/results.md, its figure and README's table from the kept figures, or add new results to these.

    python benchmarks/papers/page.py [--check]
    python benchmarks/papers/page.py --take SECTION WHAT=PATH … [--model NAME] [--seed N]
        [--hardware TEXT] [--versions PACKAGE=VERSION …]

With `--check` nothing is written; it fails if a file differs from what would be written. What a section takes
is in its module: leaf, gaprune, l3prune, nml, vocabulary (vocabulary_pruning.py) and head_to_head.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gaprune
import head_to_head
import l3prune
import leaf
import nml
import vocabulary_pruning
from evidence import read_figures, render, write_figures

ROOT = Path(__file__).parents[2]
PAGE, FIGURE, README = ROOT / "docs" / "results.md", ROOT / "docs" / "head-to-head.svg", ROOT / "README.md"
BEGIN, END = "<!-- head to head: written by benchmarks/papers/page.py -->", "<!-- end -->"
SECTIONS = {
    "head_to_head": head_to_head,
    "leaf": leaf,
    "gaprune": gaprune,
    "l3prune": l3prune,
    "nml": nml,
    "vocabulary": vocabulary_pruning,
}


def files() -> dict[Path, str]:
    """Return what each file should contain."""
    figures = {name: read_figures(name) for name in SECTIONS}
    sections = [
        render(name, module.values(figures[name]), figures[name]) for name, module in SECTIONS.items()
    ]
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    contenders = head_to_head.contenders(figures["head_to_head"])
    return {
        PAGE: "\n\n".join([render("head", {}), *sections, render("data", {})]) + "\n",
        FIGURE: head_to_head.figure(figures["head_to_head"]) + "\n",
        README: f"{before}{BEGIN}\n\n{contenders}\n\n{END}{rest.partition(END)[2]}",
    }


def take(options: argparse.Namespace) -> None:
    """Add results to the figures of a section."""
    section, *places = options.take
    figures = read_figures(section)
    for place in places:
        what, _, path = place.rpartition("=")
        SECTIONS[section].take(figures, what, path, options)
    figures["hardware"] = options.hardware or figures["hardware"]
    figures["versions"] |= dict(pair.split("=", 1) for pair in options.versions)
    write_figures(section, figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--take", nargs="+", metavar="SECTION WHAT=PATH")
    parser.add_argument("--model", help="the model the results belong to")
    parser.add_argument("--seed", type=int, default=0, help="the seed the results belong to")
    parser.add_argument("--hardware")
    parser.add_argument("--versions", nargs="+", default=[], metavar="PACKAGE=VERSION")
    options = parser.parse_args()
    if options.take:
        take(options)
    for place, content in files().items():
        if not options.check:
            place.write_text(content, encoding="utf-8")
        elif place.read_text(encoding="utf-8") != content:
            raise SystemExit(f"{place} differs from what benchmarks/papers/page.py writes; run it and commit")


if __name__ == "__main__":
    main()

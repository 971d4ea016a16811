"""docs/results.md from what was kept about each paper.

    python benchmarks/papers/page.py [--check]

With `--check` nothing is written; it fails where the page is not what would be written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from claims import KEPT, markdown, read

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
ORDER = ("leaf", "gaprune", "l3prune", "nml", "vocabulary")
MISSING = {
    "l3prune": "L³Prune (depth): the decoders have not been trained yet; the layer-loss curve and cuts of an encoder are in [LOG](../LOG.md)",
    "nml": "Nested models (width): not measured yet",
    "vocabulary": "Vocabulary pruning: only small parts have been measured, see [LOG](../LOG.md)",
}
HEAD = """# Five papers, measured here

What each paper claims, in small, with our own implementation, models and data. Verdicts are computed from the figures: see
`benchmarks/papers`. This page is written by `python benchmarks/papers/page.py`."""


def page() -> str:
    """All sections, and what is missing."""
    kept = [KEPT / f"{name}.json" for name in ORDER]
    sections = [markdown(read(file)) for file in kept if file.is_file()]
    missing = [f"- {MISSING[file.stem]}" for file in kept if not file.is_file()]
    if missing:
        sections.append("\n".join(["## Not yet", "", *missing]))
    return "\n\n".join([HEAD, *sections]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit(f"{PAGE} is not what benchmarks/papers/page.py writes; run it and commit the page")


if __name__ == "__main__":
    main()

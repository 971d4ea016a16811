"""Write docs/results.md, its figures and README's table from the kept figures, or add new results to these.

    python benchmarks/papers/page.py [--check]
    python benchmarks/papers/page.py --take SECTION WHAT=PATH … [--model NAME] [--seed N]
        [--hardware TEXT] [--versions PACKAGE=VERSION …]

With `--check` nothing is written; it fails if a file differs from what would be written. What a section takes
is in its module: leaf, gaprune, l3prune, nml, vocabulary (vocabulary_pruning.py) and head_to_head.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import gaprune
import head_to_head
import l3prune
import leaf
import nml
import vocabulary_pruning
from evidence import Claim, Figures, Verdict, claims_table, pick, read_figures, render, table, write_figures

from trundle.recipe import read_recipe

ROOT = Path(__file__).parents[2]
PAGE, FIGURE, README = ROOT / "docs" / "results.md", ROOT / "docs" / "head-to-head.svg", ROOT / "README.md"
SWEEP = ROOT / "docs" / "vocabulary-sweep.svg"
BEGIN, END = "<!-- head to head: written by benchmarks/papers/page.py -->", "<!-- end -->"
PAPERS: dict[str, Any] = {
    "leaf": leaf,
    "gaprune": gaprune,
    "l3prune": l3prune,
    "nml": nml,
    "vocabulary": vocabulary_pruning,
}
SECTIONS = {"head_to_head": head_to_head, **PAPERS}
NAMES = {"leaf": "LEAF", "gaprune": "GAPrune", "l3prune": "L³Prune", "nml": "NML", "vocabulary": "Vocabulary"}


def files() -> dict[Path, str]:
    """Return what each file should contain."""
    figures = {name: read_figures(name) for name in SECTIONS}
    claims = {name: module.claims(figures[name]) for name, module in PAPERS.items()}
    contenders = head_to_head.contenders(figures["head_to_head"])
    headline = head_to_head.headline(figures["head_to_head"])
    head = {"summary": summary(figures), "verdicts": verdicts(claims), "recipes": recipes()}
    sections = [render("head", head), render("head_to_head", {"table": contenders})]
    for name, module in PAPERS.items():
        more = module.tables(figures[name]) if hasattr(module, "tables") else {}
        sections.append(render(name, {"claims": claims_table(claims[name])} | more))
    sections.append(render("data", {"conditions": conditions(figures)}))
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return {
        PAGE: "\n\n".join(sections) + "\n",
        FIGURE: head_to_head.figure(figures["head_to_head"]) + "\n",
        SWEEP: vocabulary_pruning.drawn(figures["vocabulary"]) + "\n",
        README: f"{before}{BEGIN}\n\n{headline}\n\n{END}{rest.partition(END)[2]}",
    }


def summary(figures: dict[str, Figures]) -> str:
    """Render which method to use for what, with the shares of the table of all methods."""
    rows = figures["head_to_head"]["rows"]

    def kept(name: str) -> str:
        row = pick(rows, name=name)[0]
        return f"{row['smaller']:.1f}× smaller, {100 * row['across']:.1f}% of search"

    changes = gaprune.Changes(figures["gaprune"]["rows"], gaprune.MODEL)
    dense, pruned = (changes.both(name, 50, gaprune.AFTER) for name in (gaprune.DENSE, gaprune.NEURONS))
    decoders = [l3prune.Levels(figures["l3prune"], model) for model in (l3prune.FIRST, l3prune.SECOND)]
    picks = " and ".join(f"{one.change('large')} ({one.short}, {one.kept('large')})" for one in decoders)
    backbone = kept("align (LEAF), the backbone of all-MiniLM-L6-v2")
    shipped = "`compress --budget 12MB --student all-MiniLM-L6-v2 --minutes 20`, as shipped"
    return table(
        "you have | use | what to expect",
        [
            f"an index, and want a small model for its queries | LEAF: `align`, from a small pretrained "
            f"backbone | {backbone}; one seed",
            f"10 – 25 MB | `compress --budget`: a backbone, fewer tokens, four bits, `align` | "
            f"{kept(shipped)}; two runs of 20 minutes on one GPU were half a point apart",
            f"an embedder with too many layers | `depth` + `align` (`--recipe leaf`) | "
            f"{kept('depth (L³Prune), 6 of 12 layers, aligned')}",
            f"a decoder LLM that is to become an embedder | L³Prune: `--recipe l3prune-paper` | "
            f"*large* changes the mean score by {picks} points; the paper's 4 – 8B lose 0.3",
            f"a need for several sizes of a model | NML: `--recipe nml`; `depth` keeps more at equal size | "
            f"{kept('width (NML), half of everything, aligned')}",
            "a large vocabulary, few languages | vocabulary: `--recipe vocabulary` | ends at the share of "
            "the token table; tf-idf is better than chance in deep cuts",
            f"a domain with labels | `contrast` alone; `weights --structure neuron` to be smaller as well | "
            f"after 100 steps dense {dense}, half of the neurons {pruned} (per cent, finance / chemistry)",
        ],
        numbers=False,
    )


def verdicts(claims: dict[str, list[Claim]]) -> str:
    """Count the verdicts of each paper."""
    shown = []
    for name, found in claims.items():
        counted = Counter(claim.verdict for claim in found)
        shown.append(f"{NAMES[name]} {' / '.join(str(counted[verdict]) for verdict in get_args(Verdict))}")
    return f"Verdicts ({' / '.join(get_args(Verdict))}): {', '.join(shown)}."


def conditions(figures: dict[str, Figures]) -> str:
    """Show hardware and versions, once for all sections that share them."""
    found: dict[str, list[str]] = {}
    for name, one in figures.items():
        versions = ", ".join(f"{package} {version}" for package, version in one["versions"].items())
        found.setdefault(f"{one['hardware']}; {versions}", []).append(NAMES.get(name, "Head to head"))
    return "\n".join(f"- {', '.join(names)}: {says}." for says, names in found.items())


def recipes() -> str:
    """Render our recipe and the published settings of each paper."""

    def shown(name: str) -> str:
        steps = read_recipe(name).as_json()["steps"]
        methods = ["`" + next(iter(step)) + "`" for step in steps]
        return f"`{name}`: {' → '.join(methods)}"

    differs = {
        "leaf": "any `--student`, mean pooling, random linear layer, 3 × 10 epochs of 32; ours: half of the "
        "layers, ridge start, pieces of texts",
        "gaprune": "raw F, β 1, γ 0.5, α 0.2, 5,000 samples; ours: F by its mean, β 0",
        "l3prune": "scale 50 in curve and training, instructions, LoRA 16/32/0.05, 300 warm-up, 2e-4, 512 "
        "tokens, `--set depth.pick=small`; ours: aligned, without labels",
        "nml": "consecutive, λ 0.9, labels, 128 batches of 16 a step, 1e-5, then one size further "
        "(`--set width.result=1/4`); ours: by importance, aligned, MLPs too",
        "vocabulary": "23% of the tokens by tf-idf, 50 clusters, then a classifier; ours: 80% of the "
        "parameters, removed tokens split, aligned",
    }
    rows = [f"{NAMES[name]} | {shown(f'{name}-paper')} | {shown(name)} | {differs[name]}" for name in PAPERS]
    return table(
        "paper | as published | ours | published settings, and what ours has instead", rows, numbers=False
    )


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

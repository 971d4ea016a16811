"""The model card: what the folder is, where it came from, and how to use it, in the hub's form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trundle.artifact import Lineage

ENCODE = 'vectors = model.encode(["a text", "another text"])'
ENCODE_BOTH = """documents = model.encode_document(["a text", "another text"])
queries = model.encode_query(["what is asked"])"""


def model_card(name: str, lineage: Lineage, *, similarity: str, needs_trundle: bool = False) -> str:
    """A card that says what the lineage says, for people."""
    return _card(
        name,
        f"Made from `{Path(lineage.source).name}` with trundle{_space(lineage.space)}.",
        _sizes(lineage.before, lineage.after),
        _steps(lineage),
        _scores(lineage.scores),
        _use(name, ENCODE, similarity, needs_trundle=needs_trundle),
    )


def pair_card(name: str, lineage: Lineage, *, similarity: str) -> str:
    """The card of two models in one folder, by the facts of the step that put them together."""
    facts = lineage.steps[-1]["facts"]
    return _card(
        name,
        f"Two models in one vector space of {facts['width']} dimensions, put together with trundle: queries are "
        f"encoded by the small `{Path(lineage.source).name}`, documents by `{Path(str(lineage.space)).name}`.",
        "| | queries | documents |\n|---|---:|---:|\n| parameters | "
        f"{facts['query_parameters'] / 1e6:,.1f}M | {facts['document_parameters'] / 1e6:,.1f}M |",
        _scores((lineage.parent or {}).get("scores", {})),
        _use(name, ENCODE_BOTH, similarity)
        + " Plain `encode` takes the way of the documents. How the small model was made is in `trundle.json`.",
    )


def _card(name: str, *parts: str) -> str:
    front = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "feature-extraction", "sentence-similarity", "trundle"],
    }
    head = (f"---\n{yaml.safe_dump(front, sort_keys=False)}---", f"# {name}")
    return "\n\n".join(part for part in (*head, *parts) if part) + "\n"


def _space(model: str | None) -> str:
    return f", in the vector space of `{Path(model).name}`" if model else ""


def _sizes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    rows = [("parameters", "parameters", 1e6, "M"), ("weights on disk", "bytes", 1e6, " MB")]
    rows += [("FLOPs per token", "flops_per_token", 1e6, "M")]
    lines = ["| | before | after | ratio |", "|---|---:|---:|---:|"]
    for label, key, unit, mark in rows:
        if key in before and key in after:
            ratio = before[key] / max(after[key], 1)
            lines.append(
                f"| {label} | {before[key] / unit:,.1f}{mark} | {after[key] / unit:,.1f}{mark} | {ratio:.2f}× |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def _steps(lineage: Lineage) -> str:
    if not lineage.steps:
        return ""
    lines = [
        f"{number}. **{step['step']}**: {step['says']}" for number, step in enumerate(lineage.steps, start=1)
    ]
    return "## How it was made\n\n" + "\n".join(lines) + "\n\nThe whole lineage is in `trundle.json`."


def _scores(scores: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {value:.4f} |" for name, value in scores.items() if isinstance(value, int | float)]
    if not rows:
        return ""
    return "## Measured on held-out texts\n\n| | |\n|---|---:|\n" + "\n".join(rows)


def how_to_open(name: str, *, needs_trundle: bool) -> str:
    """The call that opens the folder."""
    return f"SentenceTransformer({name!r}{', trust_remote_code=True' if needs_trundle else ''})"


def _use(name: str, lines: str, similarity: str, *, needs_trundle: bool = False) -> str:
    needs = (
        "Where trundle is installed (it has a module of its own in this folder):\n\n" if needs_trundle else ""
    )
    return f"""## Use

{needs}```python
from sentence_transformers import SentenceTransformer

model = {how_to_open(name, needs_trundle=needs_trundle).replace("'", '"')}
{lines}
```

Compare vectors by {similarity} similarity."""

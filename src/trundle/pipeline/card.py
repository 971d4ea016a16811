"""The model card: what the folder is, where it came from, and how to use it, in the hub's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trundle.records import THE_ORIGINAL, Lineage

_TAGS = ("sentence-transformers", "feature-extraction", "sentence-similarity", "trundle", "model-compression")
_TASK = {"type": "sentence-similarity", "name": "Agreement with the teacher"}
_ANSWERS = {"type": "text-classification", "name": "Answers to labelled texts"}

_ENCODE = 'vectors = model.encode(["a text", "another text"])'
_ENCODE_BOTH = """documents = model.encode_document(["a text", "another text"])
queries = model.encode_query(["what is asked"])"""


def _model_card(
    name: str, lineage: Lineage, *, similarity: str, needs_trundle: bool = False, use: str = ""
) -> str:
    """Renders the lineage as a card; `use` is the example call of a model that gives labels, not vectors."""
    scores = _named_scores(lineage.scores, lineage.space)
    front = _front(name, [_first_source(lineage)], "finetune", scores, lineage.data)
    return _card(
        name,
        _of_answers(front) if use else front,
        f"Made from `{Path(lineage.source).name}` with trundle{_space(lineage.space)}.",
        _sizes(lineage.before, lineage.after),
        _steps(lineage),
        _scores(scores, lineage.compared),
        _use(name, use or _ENCODE, "" if use else similarity, needs_trundle=needs_trundle),
    )


def _pair_card(name: str, lineage: Lineage, *, similarity: str) -> str:
    facts = lineage.steps[-1]["facts"]
    student = lineage.parent or {}
    scores = _named_scores(student.get("scores", {}), student.get("space"))
    both = [_first_source(lineage), str(lineage.space)]
    return _card(
        name,
        _front(name, both, "merge", scores, student.get("data", ())),
        f"Two models in one vector space of {facts['width']} dimensions, put together with trundle: queries "
        f"are encoded by the small `{Path(lineage.source).name}`, documents by "
        f"`{Path(str(lineage.space)).name}`.",
        "| | queries | documents |\n|---|---:|---:|\n| parameters | "
        f"{facts['query_parameters'] / 1e6:,.1f}M | {facts['document_parameters'] / 1e6:,.1f}M |",
        _scores(scores, student.get("compared", {})),
        _use(name, _ENCODE_BOTH, similarity)
        + " Plain `encode` encodes documents. How the small model was made is in `trundle.json`.",
    )


def _card(name: str, front: Mapping[str, Any], *parts: str) -> str:
    head = (f"---\n{yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True)}---", f"# {name}")
    return "\n\n".join(part for part in (*head, *parts) if part) + "\n"


def _front(
    name: str,
    bases: Sequence[str],
    relation: str,
    scores: Mapping[str, float],
    data: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    models = list(dict.fromkeys(_hub_name(base) for base in bases))
    front: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "base_model": models[0] if len(models) == 1 else models,
        "base_model_relation": relation,
        "tags": list(_TAGS),
    }
    if scores:
        sources = ", ".join(Path(str(one["source"])).name for one in data)
        dataset = {"type": "custom", "name": f"Held-out texts of {sources}" if sources else "Held-out texts"}
        metrics = [{"type": _metric(label), "name": label, "value": one} for label, one in scores.items()]
        result = {"task": dict(_TASK), "dataset": dataset, "metrics": metrics}
        front["model-index"] = [{"name": name, "results": [result]}]
    return front


def _of_answers(front: Mapping[str, Any]) -> dict[str, Any]:
    results = [
        one | {"results": [result | {"task": dict(_ANSWERS)} for result in one["results"]]}
        for one in front.get("model-index", ())
    ]
    tags = [_TAGS[0], _ANSWERS["type"], *_TAGS[3:]]
    changed = {**front, "pipeline_tag": _ANSWERS["type"], "tags": tags}
    return changed | ({"model-index": results} if results else {})


def _first_source(lineage: Lineage) -> str:
    source, parent = lineage.source, lineage.parent
    while parent:
        source, parent = parent["source"], parent.get("parent")
    return str(source)


def _hub_name(source: str) -> str:
    # Of a folder only the last part: its path is of no use on another machine.
    looks_like_one = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists()
    return source if looks_like_one else Path(source).name


def _named_scores(scores: Mapping[str, Any], space: str | None) -> dict[str, float]:
    numbers = {label: value for label, value in scores.items() if isinstance(value, int | float)}
    return {_without_path(label, space): float(value) for label, value in numbers.items()}


def _without_path(text: str, space: str | None) -> str:
    return text.replace(space, Path(space).name) if space else text


def _metric(label: str) -> str:
    # agreement@10, own index → agreement_at_10_own_index
    return re.sub(r"[^a-z0-9]+", "_", label.lower().replace("@", " at ")).strip("_")


def _space(model: str | None) -> str:
    if model == THE_ORIGINAL:
        return ", in that model's own vector space"
    return f", in the vector space of `{Path(model).name}`" if model else ""


def _sizes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    rows = (("parameters", "parameters", "M"), ("weights on disk", "bytes", " MB"))
    lines = ["| | before | after | ratio |", "|---|---:|---:|---:|"]
    for label, key, unit in (*rows, ("FLOPs per token", "flops_per_token", "M")):
        if key in before and key in after:
            old, new, ratio = before[key] / 1e6, after[key] / 1e6, before[key] / max(after[key], 1)
            lines.append(f"| {label} | {old:,.1f}{unit} | {new:,.1f}{unit} | {ratio:.2f}× |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _steps(lineage: Lineage) -> str:
    if not lineage.steps:
        return ""
    lines = [
        f"{number}. **{step['step']}**: {_without_path(str(step['says']), lineage.space)}"
        for number, step in enumerate(lineage.steps, start=1)
    ]
    return "## How it was made\n\n" + "\n".join(lines) + "\n\nThe whole lineage is in `trundle.json`."


def _scores(scores: Mapping[str, float], compared: Mapping[str, int]) -> str:
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in scores.items())
    on = " and ".join(f"{count:,} {role}" for role, count in compared.items())
    with_teacher = f"\n\nCosine, distance and agreement: {on}." if on else ""
    return f"## Measured on held-out texts\n\n| | |\n|---|---:|\n{rows}{with_teacher}" if rows else ""


def how_to_open(name: str, *, needs_trundle: bool) -> str:
    """Returns the call that loads the folder."""
    trust = ", trust_remote_code=True" if needs_trundle else ""
    return f"SentenceTransformer({json.dumps(name, ensure_ascii=False)}{trust})"


def _use(name: str, lines: str, similarity: str, *, needs_trundle: bool = False) -> str:
    needs = (
        "Where trundle is installed (it has a module of its own in this folder):\n\n" if needs_trundle else ""
    )
    compare = f"\n\nCompare vectors by {similarity} similarity." if similarity else ""
    return f"""## Use

{needs}```python
from sentence_transformers import SentenceTransformer

model = {how_to_open(name, needs_trundle=needs_trundle)}
{lines}
```{compare}"""

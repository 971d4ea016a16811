"""The model card, and a student and its teacher as one model folder.

A card says what the folder is, where it came from and how to use it, in the hub's form. In a pair the student
encodes queries, the teacher documents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from sentence_transformers import SentenceTransformer

from trundle.errors import BadInput
from trundle.evaluate.fidelity import Fidelity
from trundle.evaluate.retrieval import SENTENCES, find_themselves
from trundle.evaluate.shortening import read_ranges
from trundle.folders import check_free, write_atomic
from trundle.model.heads import check_pairable, paired
from trundle.model.load import load
from trundle.model.save import save
from trundle.progress import SILENT, Progress
from trundle.records import CALIBRATION_FILE, THE_ORIGINAL, Lineage, read_lineage
from trundle.teacher import teacher_kind

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
    task = _ANSWERS if use else _TASK
    space = f", in the vector space of `{Path(lineage.space).name}`" if lineage.space else ""
    if lineage.space == THE_ORIGINAL:
        space = ", in that model's own vector space"
    return _card(
        name,
        _front(name, [_first_source(lineage)], "finetune", scores, lineage.data, task),
        f"Made from `{Path(lineage.source).name}` with trundle{space}.",
        _sizes(lineage.before, lineage.after),
        _steps(lineage),
        _scores(scores, lineage.compared),
        _use(name, use or _ENCODE, "" if use else similarity, needs_trundle=needs_trundle),
    )


def _add_graph_to_card(folder: Path, size: int, whole: int | None, fidelity: Fidelity | None) -> None:
    """Adds the exported graph to a card: its size in bytes, its ratio to the `whole` model, its scores."""
    card, graph = folder / "README.md", next(folder.rglob("*.onnx"))
    ratio = "" if whole is None else f", {whole / size:.1f}× smaller than the {whole / 1e6:,.1f} MB before"
    scores = ""
    if fidelity is not None:
        agreement = f"agreement@{fidelity.k} {fidelity.agreement_asymmetric:.4f} on the teacher's index"
        scores = f"\nOn held-out texts: cosine {fidelity.cosine:.4f} to the teacher, {agreement}."
    section = f"""## Use without torch

`{graph.relative_to(folder)}` has {size / 1e6:,.1f} MB{ratio}.
It needs only `encoder.json` and `tokenizer.json` beside it.{scores}

```python
from trundle import Encoder

encoder = Encoder({json.dumps(folder.name, ensure_ascii=False)})
vectors = encoder.encode(["a text", "another text"])
```
"""
    if section not in (text := card.read_text(encoding="utf-8")):
        write_atomic(card, text.replace("## Use\n", f"{section}\n## Use\n", 1))


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
    task: Mapping[str, str] = _TASK,
) -> dict[str, Any]:
    # Of a folder only the last part: its path is of no use on another machine.
    on_hub = {base for base in bases if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists()}
    models = list(dict.fromkeys(base if base in on_hub else Path(base).name for base in bases))
    kinds = ["feature-extraction", task["type"]] if task is _TASK else [task["type"]]
    front: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": task["type"],
        "base_model": models[0] if len(models) == 1 else models,
        "base_model_relation": relation,
        "tags": ["sentence-transformers", *kinds, "trundle", "model-compression"],
    }
    if scores:
        sources = ", ".join(Path(str(one["source"])).name for one in data)
        dataset = {"type": "custom", "name": f"Held-out texts of {sources}" if sources else "Held-out texts"}
        metrics = [{"type": _metric(label), "name": label, "value": one} for label, one in scores.items()]
        result = {"task": dict(task), "dataset": dataset, "metrics": metrics}
        front["model-index"] = [{"name": name, "results": [result]}]
    return front


def _first_source(lineage: Lineage) -> str:
    source, parent = lineage.source, lineage.parent
    while parent:
        source, parent = parent["source"], parent.get("parent")
    return str(source)


def _named_scores(scores: Mapping[str, Any], space: str | None) -> dict[str, float]:
    numbers = ((label, value) for label, value in scores.items() if isinstance(value, int | float))
    return {_without_path(label, space): float(value) for label, value in numbers}


def _without_path(text: str, space: str | None) -> str:
    return text.replace(space, Path(space).name) if space else text


def _metric(label: str) -> str:
    # agreement@10, own index → agreement_at_10_own_index
    return re.sub(r"[^a-z0-9]+", "_", label.lower().replace("@", " at ")).strip("_")


def _sizes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    rows = (("parameters", "parameters", "M"), ("weights on disk", "bytes", " MB"))
    lines = ["| | before | after | ratio |", "|---|---:|---:|---:|"]
    for label, key, unit in (*rows, ("FLOPs per token", "flops_per_token", "M")):
        if key in before and key in after:
            old, new, ratio = before[key] / 1e6, after[key] / 1e6, before[key] / max(after[key], 1)
            lines.append(f"| {label} | {old:,.1f}{unit} | {new:,.1f}{unit} | {ratio:.2f}× |")
    return "\n".join(lines) if len(lines) > 2 and before != after else ""


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


@dataclass(frozen=True, kw_only=True)
class _Pair:
    width: int
    query_parameters: int
    document_parameters: int
    student: str
    teacher: str
    output: Path

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"output": str(self.output)}


def pair_folder(output: str | Path) -> Path:
    """Returns the folder of the pair that is written next to `output`."""
    path = Path(output)
    return path.with_name(f"{path.name}-pair")


def pair(
    student: str,
    teacher: str,
    *,
    output: str | Path,
    replace: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> _Pair:
    """Writes two models that share a vector space as one model folder, and returns what was written."""
    if teacher_kind(teacher) != "model":
        raise BadInput(f"a pair holds both models, and {teacher} is not a model; pass the teacher's folder")
    check_free(output, replace=replace, read=[student, teacher])
    models = [load(name, trust_remote_code=trust_remote_code) for name in (student, teacher)]
    check_pairable(*models)
    if not _share_a_space(*models):
        progress.say(f"{student} is not in the vector space of {teacher}; run trundle align first")
    ranges = read_ranges(student)
    files = {} if ranges is None else {CALIBRATION_FILE: ranges.as_text()}
    return _save_pair(*models, names=(student, teacher), output=output, files=files, replace=replace)


def _share_a_space(student: SentenceTransformer, teacher: SentenceTransformer) -> bool:
    texts = list(SENTENCES)
    return find_themselves(student.encode_query(texts), teacher.encode_document(texts))


def _save_pair(
    student: SentenceTransformer,
    teacher: SentenceTransformer,
    *,
    names: tuple[str, str],
    output: str | Path,
    files: Mapping[str, str | bytes] | None = None,
    replace: bool = False,
) -> _Pair:
    """Writes the pair with the lineage of the student; `names` are what both models are called."""
    both = paired(student, teacher)
    facts = {
        "width": both.get_embedding_dimension() or 0,
        "query_parameters": sum(weight.numel() for weight in student.parameters()),
        "document_parameters": sum(weight.numel() for weight in teacher.parameters()),
    }
    step = {
        "step": "pair",
        "options": {"teacher": names[1]},
        "plan": {},
        "says": f"queries by {Path(names[0]).name}, documents by {Path(names[1]).name}",
        "facts": facts,
    }
    lineage = Lineage(source=names[0], space=names[1], steps=(step,), parent=read_lineage(names[0]))
    card = _pair_card(Path(output).name, lineage, similarity=str(both.similarity_fn_name))
    save(both, output, lineage=lineage, card=card, files=files, replace=replace)
    return _Pair(**facts, student=names[0], teacher=names[1], output=Path(output))

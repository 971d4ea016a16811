"""A student and its teacher as one model folder: the student encodes queries, the teacher documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.errors import BadInput
from trundle.evaluate.retrieval import SENTENCES, find_themselves
from trundle.evaluate.shortening import read_ranges
from trundle.folders import check_free
from trundle.model.heads import check_pairable, paired
from trundle.model.load import load
from trundle.model.save import save
from trundle.pipeline.card import _pair_card
from trundle.progress import SILENT, Progress
from trundle.records import CALIBRATION_FILE, Lineage, read_lineage
from trundle.teacher import teacher_kind


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """The two models of a written pair."""

    width: int
    query_parameters: int
    document_parameters: int
    student: str
    teacher: str
    output: Path

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
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

"""How near a student is to its teacher, without labels: cosine, distance, and whether both find the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.data.texts import Kind, Text
from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput
from trundle.evaluate.encoding import Memory, check_same_width
from trundle.evaluate.metrics import paired_cosines
from trundle.evaluate.ranking import Positions, nearest
from trundle.progress import SILENT, Progress

AGREEMENT_AT = 10
FEWEST_DOCUMENTS = 5 * AGREEMENT_AT
"""With fewer documents to choose from, agreement says little more than chance."""
MEASURED_TEXTS = 2000
QUERY_SHARE = 4
"""Where texts have no kind, one in this many stands in for a query."""


@dataclass(frozen=True, kw_only=True)
class TextError:
    """A text and how far the student's vector of it lies from the teacher's."""

    text: str
    distance: float
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """A student beside its teacher.

    Cosine and distance are means over queries and documents together. Agreement is the share of the teacher's
    top k documents that the student finds as well: `asymmetric` when it searches the teacher's document
    vectors, `standard` when it searches its own.
    """

    student: str
    teacher: str
    queries: int
    documents: int
    cosine: float
    distance: float
    k: int
    agreement_asymmetric: float
    agreement_standard: float
    closest: tuple[TextError, ...]
    farthest: tuple[TextError, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def distances(student: Vectors, teacher: Vectors) -> NDArray[np.float64]:
    """Euclidean distance of each student vector to the teacher's."""
    apart: NDArray[np.float64] = np.linalg.norm(student.astype(np.float64) - teacher, axis=1)
    return apart


def agreement(teacher_top: Positions, student_top: Positions) -> float:
    """Mean share of the teacher's documents that the student has too; both have one row per query."""
    shared = (teacher_top[:, :, None] == student_top[:, None, :]).any(axis=2)
    return float(shared.mean())


def errors_by_text(
    texts: Sequence[str], student: Vectors, teacher: Vectors, count: int
) -> tuple[tuple[TextError, ...], tuple[TextError, ...]]:
    """The texts the student imitates best and worst, each with the most extreme first."""
    apart, cosines = distances(student, teacher), paired_cosines(student, teacher)
    order = np.argsort(apart, kind="stable")
    ranked = [
        TextError(text=texts[place], distance=float(apart[place]), cosine=float(cosines[place]))
        for place in order
    ]
    return tuple(ranked[:count]), tuple(ranked[::-1][:count])


def roles_of(kinds: Sequence[Kind | None]) -> tuple[list[int], list[int]]:
    """Positions of the queries and of the documents; where no kind is known, some texts stand in as queries."""
    queries = [place for place, kind in enumerate(kinds) if kind == "query"]
    documents = [place for place, kind in enumerate(kinds) if kind != "query"]
    if not queries:
        queries, documents = documents[::QUERY_SHARE], [p for i, p in enumerate(documents) if i % QUERY_SHARE]
    elif not documents:
        documents, queries = queries[1::2], queries[::2]
    return queries, documents


def queries_and_documents(texts: Sequence[Text]) -> tuple[list[str], list[str]]:
    """Sort texts by role."""
    queries, documents = roles_of([text.kind for text in texts])
    return [texts[place].text for place in queries], [texts[place].text for place in documents]


def measure_fidelity(
    student: Embedder,
    teacher: Embedder,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    k: int = AGREEMENT_AT,
    examples: int = 10,
    memory: Memory | None = None,
    progress: Progress = SILENT,
) -> Fidelity:
    """Compare two models on queries and documents that need no judgement; repeated texts count once.

    With a `memory` what was encoded before is not encoded again.
    """
    asked, held = list(dict.fromkeys(queries)), list(dict.fromkeys(documents))
    if not asked:
        raise BadInput("there are no queries to compare on; give at least one")
    if not 1 <= k < len(held):
        raise BadInput(
            f"agreement@{k} over {len(held)} documents says nothing; give more documents than k, k from 1"
        )
    memory = memory or Memory(progress)
    pupil = memory.remember(student, f"fidelity, {student.name}")
    master = memory.remember(teacher, f"fidelity, {teacher.name}")
    pupil_queries, pupil_documents = pupil.query(asked), pupil.document(held)
    master_queries, master_documents = master.query(asked), master.document(held)
    check_same_width(pupil_queries, master_documents, f"{student.name} beside {teacher.name}")
    both = np.vstack([pupil_queries, pupil_documents]), np.vstack([master_queries, master_documents])
    closest, farthest = errors_by_text([*asked, *held], *both, examples)
    truth = nearest(master_queries, master_documents, k)
    return Fidelity(
        student=student.name,
        teacher=teacher.name,
        queries=len(asked),
        documents=len(held),
        cosine=float(paired_cosines(*both).mean(dtype=np.float64)),
        distance=float(distances(*both).mean()),
        k=k,
        agreement_asymmetric=agreement(truth, nearest(pupil_queries, master_documents, k)),
        agreement_standard=agreement(truth, nearest(pupil_queries, pupil_documents, k)),
        closest=closest,
        farthest=farthest,
    )

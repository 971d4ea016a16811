"""How near a student is to its teacher, without labels: cosine, distance, and whether both find the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.data.texts import Kind, Text
from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput
from trundle.evaluate.encoding import Memory, _check_same_width
from trundle.evaluate.metrics import _paired_cosines
from trundle.evaluate.retrieval import Positions, nearest, unit
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import encode_by_role

AGREEMENT_AT = 10
FEWEST_DOCUMENTS = 5 * AGREEMENT_AT
"""With fewer documents to choose from, agreement says little more than chance."""
MEASURED_TEXTS = 2000
_QUERY_SHARE = 4
"""Where texts have no kind, one in this many stands in for a query."""


@dataclass(frozen=True, kw_only=True)
class _TextError:
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
    closest: tuple[_TextError, ...]
    farthest: tuple[_TextError, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def _distances(student: Vectors, teacher: Vectors) -> NDArray[np.float64]:
    """Euclidean distance of each student vector to the teacher's."""
    apart: NDArray[np.float64] = np.linalg.norm(student.astype(np.float64) - teacher, axis=1)
    return apart


def _agreement(teacher_top: Positions, student_top: Positions) -> float:
    """Mean share of the teacher's documents that the student has too; both have one row per query."""
    shared = (teacher_top[:, :, None] == student_top[:, None, :]).any(axis=2)
    return float(shared.mean())


def _errors_by_text(
    texts: Sequence[str], student: Vectors, teacher: Vectors, count: int
) -> tuple[tuple[_TextError, ...], tuple[_TextError, ...]]:
    """The texts the student imitates best and worst, each with the most extreme first."""
    apart, cosines = _distances(student, teacher), _paired_cosines(student, teacher)
    order = np.argsort(apart, kind="stable")
    ranked = [
        _TextError(text=texts[place], distance=float(apart[place]), cosine=float(cosines[place]))
        for place in order
    ]
    return tuple(ranked[:count]), tuple(ranked[::-1][:count])


def _roles_of(kinds: Sequence[Kind | None]) -> tuple[list[int], list[int]]:
    """Positions of the queries and of the documents; where no kind is known, some texts stand in as queries."""
    queries = [place for place, kind in enumerate(kinds) if kind == "query"]
    documents = [place for place, kind in enumerate(kinds) if kind != "query"]
    if not queries:
        queries, documents = (
            documents[::_QUERY_SHARE],
            [p for i, p in enumerate(documents) if i % _QUERY_SHARE],
        )
    elif not documents:
        documents, queries = queries[1::2], queries[::2]
    return queries, documents


def queries_and_documents(texts: Sequence[Text]) -> tuple[list[str], list[str]]:
    """Sort texts by role."""
    queries, documents = _roles_of([text.kind for text in texts])
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
    _check_same_width(pupil_queries, master_documents, f"{student.name} beside {teacher.name}")
    both = np.vstack([pupil_queries, pupil_documents]), np.vstack([master_queries, master_documents])
    closest, farthest = _errors_by_text([*asked, *held], *both, examples)
    truth = nearest(master_queries, master_documents, k)
    return Fidelity(
        student=student.name,
        teacher=teacher.name,
        queries=len(asked),
        documents=len(held),
        cosine=float(_paired_cosines(*both).mean(dtype=np.float64)),
        distance=float(_distances(*both).mean()),
        k=k,
        agreement_asymmetric=_agreement(truth, nearest(pupil_queries, master_documents, k)),
        agreement_standard=_agreement(truth, nearest(pupil_queries, pupil_documents, k)),
        closest=closest,
        farthest=farthest,
    )


_Watch = Callable[[int, float], dict[str, float]]


def watch_margin(
    student: Embedder, texts: Sequence[Text], vectors: Vectors, *, k: int = AGREEMENT_AT
) -> _Watch | None:
    """A function for the training loop, given the teacher's vectors of validation texts; None for too few texts.

    Each text is asked for with the prompt of its kind, as the teacher was. The measures are the agreement with the teacher
    in its index and, as the paper plots it, in the student's own.
    """
    queries, documents = (np.asarray(places) for places in _roles_of([text.kind for text in texts]))
    if len(documents) < FEWEST_DOCUMENTS:
        return None
    index = vectors[documents]
    truth = nearest(vectors[queries], index, k)

    def watch(_step: int, _loss: float) -> dict[str, float]:
        found = encode_by_role(student, texts)
        own = found[documents]
        return {
            f"agreement@{k}": _agreement(truth, nearest(found[queries], index, k)),
            f"agreement@{k}, own index": _agreement(truth, nearest(found[queries], own, k)),
        }

    return watch


@dataclass(frozen=True, kw_only=True, eq=False)
class Top:
    """The nearest documents of each query, best first, with their cosines."""

    positions: Positions
    cosines: NDArray[np.float64]


def find_top(queries: Vectors, documents: Vectors, k: int) -> Top:
    """What each query finds first."""
    positions = nearest(queries, documents, k)
    cosines = np.einsum("qd,qkd->qk", unit(queries), unit(documents)[positions])
    return Top(positions=positions, cosines=cosines)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plane:
    """Vectors of both models on the two directions in which the teacher's differ most."""

    teacher: NDArray[np.float64]
    student: NDArray[np.float64]
    shown: float
    """Share of the teacher's variance that lies in the plane."""


def on_a_plane(teacher: Vectors, student: Vectors) -> _Plane:
    """Principal components of the teacher's vectors; the student's are seen from the same side.

    Each direction is turned so that its largest number is positive: the same vectors give the same picture.
    """
    wide = teacher.astype(np.float64)
    centre = wide.mean(axis=0)
    _, sizes, directions = np.linalg.svd(wide - centre, full_matrices=False)
    plane = directions[:2]
    largest = np.abs(plane).argmax(axis=1)
    plane = plane * np.sign(plane[np.arange(len(plane)), largest])[:, None]
    energy = sizes**2
    shown = float(energy[:2].sum() / energy.sum()) if energy.sum() else 1.0
    return _Plane(
        teacher=(wide - centre) @ plane.T,
        student=(student.astype(np.float64) - centre) @ plane.T,
        shown=shown,
    )

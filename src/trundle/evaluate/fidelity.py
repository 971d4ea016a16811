"""How close a student is to its teacher, without labels: cosine, distance, and agreement in retrieval."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trundle.data.sampling import sample
from trundle.data.texts import Kind, Text
from trundle.embedder import Embedder, Vectors, top_agreement
from trundle.errors import BadInput
from trundle.evaluate.retrieval import _check_same_width, _paired_cosines, nearest
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import encode_by_role
from trundle.teacher.targets import HeldOutVectors

_Found = TypeVar("_Found")

AGREEMENT_AT = 10
FEWEST_DOCUMENTS = 5 * AGREEMENT_AT
"""With fewer documents, agreement says little more than chance."""
MEASURED_TEXTS = 2000
_QUERY_SHARE = 4
"""If texts have no kind, one in this many is used as a query."""


@dataclass(frozen=True, kw_only=True)
class TextError:
    """A text, and the distance of the student's vector from the teacher's."""

    text: str
    distance: float
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """A student compared with its teacher.

    Cosine and distance are means over queries and documents together. Agreement is the share of the teacher's
    top k documents that the student also retrieves: `asymmetric` from the teacher's document vectors,
    `standard` from its own.
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
    closest: tuple[TextError, ...] = field(repr=False)
    farthest: tuple[TextError, ...] = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def _distances(student: Vectors, teacher: Vectors) -> NDArray[np.float64]:
    distances: NDArray[np.float64] = np.linalg.norm(student.astype(np.float64) - teacher, axis=1)
    return distances


def _roles_of(kinds: Sequence[Kind | None]) -> tuple[list[int], list[int]]:
    """Positions of the queries and of the documents; if there are none, other texts take their role."""
    queries = [place for place, kind in enumerate(kinds) if kind == "query"]
    documents = [place for place, kind in enumerate(kinds) if kind != "query"]
    if not queries:
        rest = [place for number, place in enumerate(documents) if number % _QUERY_SHARE]
        return documents[::_QUERY_SHARE], rest
    if not documents:
        return queries[::2], queries[1::2]
    return queries, documents


def queries_and_documents(texts: Sequence[Text]) -> tuple[list[str], list[str]]:
    """Texts divided by role."""
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
    held_out: HeldOutVectors | None = None,
    progress: Progress = SILENT,
) -> Fidelity:
    """Compare two models on queries and documents without judgements; duplicates count once.

    `examples` is the number of closest and farthest texts to list. Texts in `held_out` are not encoded again.
    """
    asked, held = list(dict.fromkeys(queries)), list(dict.fromkeys(documents))
    if not asked:
        raise BadInput("there are no queries to compare on; pass at least one")
    if not 1 <= k < len(held):
        raise BadInput(f"agreement@{k} needs k from 1 and more than k documents; pass more than {len(held)}")
    held_out = held_out or HeldOutVectors(progress)
    ours = held_out.remember(student, f"fidelity, {student.name}")
    theirs = held_out.remember(teacher, f"fidelity, {teacher.name}")
    our_queries, our_documents = ours.query(asked), ours.document(held)
    their_queries, their_documents = theirs.query(asked), theirs.document(held)
    _check_same_width(our_queries, their_documents, f"{student.name} compared with {teacher.name}")
    both = np.vstack([our_queries, our_documents]), np.vstack([their_queries, their_documents])
    distances, cosines, texts = _distances(*both), _paired_cosines(*both), [*asked, *held]
    ranked = [
        TextError(text=texts[place], distance=float(distances[place]), cosine=float(cosines[place]))
        for place in np.argsort(distances, kind="stable")
    ]
    by = teacher.similarity
    truth = nearest(their_queries, their_documents, k, similarity=by)
    return Fidelity(
        student=student.name,
        teacher=teacher.name,
        queries=len(asked),
        documents=len(held),
        cosine=float(cosines.mean(dtype=np.float64)),
        distance=float(distances.mean()),
        k=k,
        agreement_asymmetric=top_agreement(truth, nearest(our_queries, their_documents, k, similarity=by)),
        agreement_standard=top_agreement(truth, nearest(our_queries, our_documents, k, similarity=by)),
        closest=tuple(ranked[:examples]),
        farthest=tuple(ranked[::-1][:examples]),
    )


def measure_within(
    seconds: float,
    student: Embedder,
    teacher: Embedder,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    seed: int,
) -> Fidelity:
    """Compare two models on as many of the texts as take about `seconds`.

    Starts with the fewest that say something, however long they take, and doubles the sample while it fits.
    """
    total, held_out = len(queries) + len(documents), HeldOutVectors()

    def measure(count: int) -> Fidelity:
        held = max(FEWEST_DOCUMENTS, -(-count * len(documents) // total))
        chosen = sample(queries, max(1, count - held), seed), sample(documents, held, seed)
        return measure_fidelity(student, teacher, *chosen, held_out=held_out)

    fewest = min(2 * FEWEST_DOCUMENTS, -(-FEWEST_DOCUMENTS * total // len(documents)))
    return _doubled_while_quick(measure, fewest, total, seconds)[1]


def _doubled_while_quick(
    measure: Callable[[int], _Found], fewest: int, most: int, seconds: float
) -> tuple[int, _Found]:
    """Measure on a few samples, then on twice as many while that fits; the number, and what was found."""
    began, count = time.monotonic(), fewest
    while True:
        found, more = measure(count), min(2 * count, most)
        if more <= count or (time.monotonic() - began) * more / count > seconds:
            return count, found
        count = more


def watch_margin(
    student: Embedder, texts: Sequence[Text], vectors: Vectors
) -> Callable[[int, float], dict[str, float]] | None:
    """A validation function for the training loop; None if there are too few texts.

    `vectors` are the teacher's, of the validation texts. Each text is encoded with the prompt of its kind, as
    the teacher did. The metrics are the agreement with the teacher in its index and, as the paper plots it,
    in the student's own.
    """
    queries, documents = (np.asarray(places) for places in _roles_of([text.kind for text in texts]))
    if len(documents) < FEWEST_DOCUMENTS:
        return None
    index = vectors[documents]
    truth = nearest(vectors[queries], index, AGREEMENT_AT)

    def watch(_step: int, _loss: float) -> dict[str, float]:
        found = encode_by_role(student, texts)
        in_theirs = nearest(found[queries], index, AGREEMENT_AT)
        in_own = nearest(found[queries], found[documents], AGREEMENT_AT)
        return {
            f"agreement@{AGREEMENT_AT}": top_agreement(truth, in_theirs),
            f"agreement@{AGREEMENT_AT}, own index": top_agreement(truth, in_own),
        }

    return watch

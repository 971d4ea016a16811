"""The robustness margin: how much error a search absorbs, watched while a student is trained.

At each validation the student's error stands beside the share of the teacher's nearest documents that it still finds.
Plotted against each other over a training, the points show where less error buys no better search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trundle.data.texts import Text
from trundle.embedder import Embedder, Vectors
from trundle.evaluate.fidelity import AGREEMENT_AT, FEWEST_DOCUMENTS, agreement, roles_of
from trundle.evaluate.ranking import nearest

Watch = Callable[[int, float], dict[str, float]]


def watch_margin(
    student: Embedder, texts: Sequence[Text], vectors: Vectors, *, k: int = AGREEMENT_AT
) -> Watch | None:
    """A function for the training loop, given the teacher's vectors of validation texts; None for too few texts.

    Its measures are the agreement with the teacher in its index and, as the paper plots it, in the student's own.
    """
    queries, documents = (np.asarray(places) for places in roles_of([text.kind for text in texts]))
    if len(documents) < FEWEST_DOCUMENTS:
        return None
    asked, held = [texts[place].text for place in queries], [texts[place].text for place in documents]
    index = vectors[documents]
    truth = nearest(vectors[queries], index, k)

    def watch(_step: int, _loss: float) -> dict[str, float]:
        found = student.query(asked)
        return {
            f"agreement@{k}": agreement(truth, nearest(found, index, k)),
            f"agreement@{k}, own index": agreement(truth, nearest(found, student.document(held), k)),
        }

    return watch

"""The robustness margin: how much error a search absorbs, watched while a student is trained.

At each validation the student's error stands beside the share of the teacher's nearest documents that it still finds.
Plotted against each other over a training, the points show where less error buys no better search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trundle.data.labelling import encode_by_role
from trundle.data.texts import Text
from trundle.embedder import Embedder, Vectors
from trundle.evaluate.fidelity import AGREEMENT_AT, FEWEST_DOCUMENTS, agreement, roles_of
from trundle.evaluate.ranking import nearest

Watch = Callable[[int, float], dict[str, float]]


def watch_margin(
    student: Embedder, texts: Sequence[Text], vectors: Vectors, *, k: int = AGREEMENT_AT
) -> Watch | None:
    """A function for the training loop, given the teacher's vectors of validation texts; None for too few texts.

    Each text is asked for with the prompt of its kind, as the teacher was. The measures are the agreement with the teacher
    in its index and, as the paper plots it, in the student's own.
    """
    queries, documents = (np.asarray(places) for places in roles_of([text.kind for text in texts]))
    if len(documents) < FEWEST_DOCUMENTS:
        return None
    index = vectors[documents]
    truth = nearest(vectors[queries], index, k)

    def watch(_step: int, _loss: float) -> dict[str, float]:
        found = encode_by_role(student, texts)
        own = found[documents]
        return {
            f"agreement@{k}": agreement(truth, nearest(found[queries], index, k)),
            f"agreement@{k}, own index": agreement(truth, nearest(found[queries], own, k)),
        }

    return watch

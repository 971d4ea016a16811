"""How good a model is, seen only as texts in and vectors out.

    catalogue   names → tasks                      tasks      a record per kind of task, with its run
    files       parquet → columns, splits          search     queries, documents, judgements → scores
    encoding    each distinct text encoded once    ranking    nearest documents, nDCG, recall, MRR
    answers     accuracy, F1, correlation of a classifier's own answers
    scoring     tasks × model → results            metrics    Spearman, accuracy, V-measure, average precision
    fidelity    how near a student is to a teacher, without labels
    shortening  vectors cut to their first dimensions, kept as bytes or bits
    inheritance teacher and student side by side with such vectors
    margin      a student watched in training: its error beside its agreement with the teacher
    comparison  students beside their teacher: all of the above in one call
    mteb        any mteb task through the same call (extra `eval`)

What this is not: nothing here loads a model, and nothing but `mteb` imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trundle.lazy import lazy

if TYPE_CHECKING:
    from trundle.evaluate.answers import class_measures as class_measures
    from trundle.evaluate.answers import number_measures as number_measures
    from trundle.evaluate.catalogue import find_tasks as find_tasks
    from trundle.evaluate.comparison import Comparison as Comparison
    from trundle.evaluate.comparison import Shorten as Shorten
    from trundle.evaluate.comparison import compare as compare
    from trundle.evaluate.fidelity import Fidelity as Fidelity
    from trundle.evaluate.fidelity import measure_fidelity as measure_fidelity
    from trundle.evaluate.margin import watch_margin as watch_margin
    from trundle.evaluate.mteb import MtebTask as MtebTask
    from trundle.evaluate.scoring import Result as Result
    from trundle.evaluate.scoring import evaluate as evaluate
    from trundle.evaluate.scoring import mean_score as mean_score
    from trundle.evaluate.scoring import share_of_teacher as share_of_teacher
    from trundle.evaluate.shortening import CALIBRATION_FILE as CALIBRATION_FILE
    from trundle.evaluate.shortening import measure_ranges as measure_ranges
    from trundle.evaluate.shortening import read_ranges as read_ranges
    from trundle.evaluate.tasks import KnownItemTask as KnownItemTask
    from trundle.evaluate.tasks import Scores as Scores
    from trundle.evaluate.tasks import Task as Task

__getattr__ = lazy(
    __name__,
    {
        "CALIBRATION_FILE": "shortening",
        "Comparison": "comparison",
        "Fidelity": "fidelity",
        "KnownItemTask": "tasks",
        "MtebTask": "mteb",
        "Result": "scoring",
        "Scores": "tasks",
        "Shorten": "comparison",
        "Task": "tasks",
        "class_measures": "answers",
        "compare": "comparison",
        "evaluate": "scoring",
        "find_tasks": "catalogue",
        "mean_score": "scoring",
        "measure_fidelity": "fidelity",
        "measure_ranges": "shortening",
        "number_measures": "answers",
        "read_ranges": "shortening",
        "share_of_teacher": "scoring",
        "watch_margin": "margin",
    },
)

"""The vocabulary paper's own figures, from its tables, in points and per cent.

Table 2 has shares of a vocabulary, and they are those of 30,522 tokens (5,416 are 17.74%): BERT's uncased tokenizer, which
is all-MiniLM-L6-v2's, too, and not ModernBERT's of 50,368. So its counts can be compared with ours.
"""

from __future__ import annotations

from dataclasses import dataclass

GLUE_TASKS = ("SST2", "CoLA", "MRPC", "STSBenchmark", "QQP", "MNLI", "QNLI", "RTE")


@dataclass(frozen=True)
class GlueRow:
    """A line of table 1: the score of each task, and the mean as printed."""

    scores: tuple[float, ...]
    mean: float

    def of(self, task: str) -> float:
        """One task's score."""
        return self.scores[GLUE_TASKS.index(task)]

    def mean_of(self, tasks: tuple[str, ...]) -> float:
        """Over some of the tasks, to compare with where only these were measured."""
        return sum(map(self.of, tasks)) / len(tasks)


GLUE = {
    "full": GlueRow((95.1, 63.2, 89.0, 91.7, 91.7, 88.1, 93.9, 64.3), 84.6),
    "train tokens only": GlueRow((95.0, 63.0, 86.1, 91.7, 91.7, 88.3, 91.5, 63.9), 83.9),
    "random": GlueRow((91.1, 47.0, 79.8, 84.5, 78.0, 50.4, 66.9, 56.6), 69.3),
    "cluster": GlueRow((89.9, 5.1, 71.4, 78.6, 77.4, 50.1, 51.0, 56.6), 60.0),
    "attention": GlueRow((94.7, 58.9, 86.4, 88.5, 76.3, 68.3, 79.1, 57.8), 76.3),
    "frequency": GlueRow((94.3, 46.7, 81.2, 90.5, 90.4, 85.8, 90.2, 54.6), 79.2),
    "tfidf": GlueRow((93.3, 52.0, 80.7, 90.1, 89.8, 86.0, 90.9, 61.0), 80.5),
    "frequency+cluster": GlueRow((93.8, 54.0, 82.8, 90.6, 91.5, 85.8, 90.7, 61.5), 81.3),
    "tfidf+cluster": GlueRow((93.4, 61.5, 83.4, 90.3, 91.2, 85.8, 91.0, 63.5), 82.5),
    "low-rank+sparse": GlueRow((93.5, 52.5, 85.6, 88.7, 91.5, 87.1, 90.6, 61.4), 81.4),
}
"""Table 1. All but `full` and `train tokens only` (4.8 to 22.6%) lost a fifth of all parameters."""


@dataclass(frozen=True)
class TokenRow:
    """A line of table 2, of the rows of train and of test."""

    tokens: tuple[int, int]
    share: tuple[float, float]
    top_fifth: tuple[float, float]
    unseen: float


TOKENS = {
    "CoLA": TokenRow((5_416, 1_934), (17.74, 6.34), (85.12, 74.68), 8.74),
    "MNLI": TokenRow((25_793, 22_664), (84.51, 74.25), (90.69, 89.64), 0.14),
    "MRPC": TokenRow((11_096, 3_567), (36.35, 11.69), (83.17, 71.80), 13.04),
    "QNLI": TokenRow((26_176, 20_360), (85.76, 66.71), (88.31, 85.79), 0.41),
    "Quora": TokenRow((25_486, 18_534), (83.50, 60.72), (94.02, 91.79), 1.03),
    "RTE": TokenRow((13_354, 4_198), (43.75, 13.75), (81.77, 70.75), 12.12),
    "SST2": TokenRow((11_536, 8_084), (37.80, 26.49), (84.23, 80.53), 0.42),
    "STSBenchmark": TokenRow((10_346, 3_271), (33.90, 10.72), (82.66, 71.30), 13.70),
}

COST = {
    "parameters": (149.61, 119.69),
    "embedding_parameters": (38.68, 8.76),
    "storage_bytes": (570.72, 456.59),
    "memory_bytes": (823.06, 700.99),
    "milliseconds": (18.73, 18.98),
}
"""Table 3: base and pruned, in millions, MiB (printed as MB, but 149.61 million float32 are 570.7 MiB; memory is a GPU's) and milliseconds."""

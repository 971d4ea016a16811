"""A teacher with known vectors, and stores of its vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from trundle.data.texts import Kind, Text
from trundle.embedder import Embedder, Vectors
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest
from trundle.teacher.targets import Targets

WIDTH = 8
ROLE_OF = {"query": "query", "document": "document", "definition": "text", None: "text"}


def vector(role: str, text: str) -> Vectors:
    """A unit vector that depends on role and text alone."""
    raw = np.frombuffer(blake2b(f"{role} {text}".encode(), digest_size=WIDTH).digest(), dtype=np.uint8)
    row = raw.astype(np.float32) - 127.5
    return (row / np.linalg.norm(row)).astype(np.float32)


class Teacher:
    """Records the texts it encodes, and gives one bad vector on request."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.calls: list[list[str]] = []
        self.answers = answers or {}
        self.embedder = Embedder(
            name="fake", text=self.role("text"), query=self.role("query"), document=self.role("document")
        )

    @property
    def asked(self) -> int:
        return sum(map(len, self.calls))

    def role(self, role: str) -> Callable[[Sequence[str]], Vectors]:
        def encode(texts: Sequence[str]) -> Vectors:
            self.calls.append(list(texts))
            return np.stack([np.asarray(self.answers.get(text, vector(role, text))) for text in texts])

        return encode


def build(
    folder: Path,
    texts: Any,
    teacher: Teacher | None = None,
    *,
    teacher_id: str = "fake 1",
    progress: Progress = SILENT,
    **options: Any,
) -> Targets:
    wanted = Manifest(teacher=teacher_id, **{"shard_size": 4, **options})
    return build_targets(texts, (teacher or Teacher()).embedder, wanted, folder, progress=progress)


def make_texts(count: int) -> list[Text]:
    kinds: tuple[Kind | None, ...] = ("query", "document", "definition", None)
    return [Text(text=f"text {'x' * (i * 7 % 11)} {i}", kind=kinds[i % 4]) for i in range(count)]


def assert_holds(targets: Targets, texts: Sequence[Text], tolerance: float = 5e-4) -> None:
    everything = range(len(texts))
    assert len(targets) == len(texts)
    assert targets.texts(everything) == [text.text for text in texts]
    assert targets.kinds(everything) == [text.kind for text in texts]
    expected = np.stack([vector(ROLE_OF[text.kind], text.text) for text in texts])
    np.testing.assert_allclose(targets.vectors(everything), expected, atol=tolerance)

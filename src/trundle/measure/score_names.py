"""What a token can be scored by. Apart from the scores themselves, so that naming one loads nothing heavy."""

from __future__ import annotations

from typing import Literal

Score = Literal["tfidf", "frequency", "seen", "attention", "cluster", "random"]

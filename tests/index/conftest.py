"""Texts to store."""

from __future__ import annotations

import pytest


@pytest.fixture
def texts() -> list[str]:
    return [f"text number {number}" for number in range(600)]

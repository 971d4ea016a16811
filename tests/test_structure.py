"""The size and structure of the source; `python tests/structure.py` prints the counts."""

from __future__ import annotations

from structure import count


def test_the_source_keeps_its_structure() -> None:
    found = count()
    assert found.files <= 160
    assert found.lines <= 36_540
    assert 100 <= found.median <= 250
    assert found.public_names <= 450
    assert found.long_functions == []
    assert found.cycle == []
    assert found.repeated_classes == []
    assert found.repeated_files == []

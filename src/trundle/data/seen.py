"""Which texts were met before, in a few bytes each."""

from __future__ import annotations

KEY_BYTES = 16
FIRST_SLOTS = 1 << 12
EMPTY = bytes(KEY_BYTES)


class Seen:
    """A set of 16-byte hashes in one flat table: 24 to 48 bytes a key, where a Python set takes about 100.

    A key's first bytes say where it stands; if another key is there, it goes to the next free slot. The table
    doubles when two thirds are taken. Keys must be hashes: evenly spread, and never all zero.
    """

    def __init__(self) -> None:
        self._slots = FIRST_SLOTS
        self._table = bytearray(KEY_BYTES * FIRST_SLOTS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> bool:
        """Remember `key`; whether it is new."""
        at = self._place(key)
        if self._table[at : at + KEY_BYTES] == key:
            return False
        self._table[at : at + KEY_BYTES] = key
        self._count += 1
        if 3 * self._count > 2 * self._slots:
            self._grow()
        return True

    def _place(self, key: bytes) -> int:
        """Where `key` stands, or the free slot it should take."""
        table, size = self._table, len(self._table)
        at = (int.from_bytes(key[:8], "little") & (self._slots - 1)) * KEY_BYTES
        while (there := table[at : at + KEY_BYTES]) != key and there != EMPTY:
            at = (at + KEY_BYTES) % size
        return at

    def _grow(self) -> None:
        old = self._table
        self._slots *= 2
        self._table = bytearray(KEY_BYTES * self._slots)
        for start in range(0, len(old), KEY_BYTES):
            key = bytes(old[start : start + KEY_BYTES])
            if key != EMPTY:
                at = self._place(key)
                self._table[at : at + KEY_BYTES] = key

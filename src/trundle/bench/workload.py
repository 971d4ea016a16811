"""The texts of a benchmark (short ones like queries, long ones like documents), and the machine it runs on.

All texts of a kind have about the same number of words, so that a faster model does not get easier or harder
texts. With a BERT-like tokenizer a short text is about 10 tokens and a long one about 200.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from trundle.errors import BadInput
from trundle.runtime.description import usable_cores

_SHORT_WORDS = range(6, 10)
_LONG_WORDS = range(165, 196, 5)
_SHORT_TEXTS = 256
_LONG_TEXTS = 64
_LONGEST_WORD = 30
_PIECE = 2
"""Longer words are a script without spaces or no language: they are divided into pieces of this length."""

_PATTERNS = (
    "The {adjective} {noun} {verb} the {noun} {where}.",
    "When a {noun} {verb} the {adjective} {noun}, the {noun} {verb} it {where}.",
    "Most people think that the {noun} {verb} some {adjective} {noun}.",
    "How often does one {noun} change what the {adjective} {noun} costs {where}?",
    "In that year the {noun} with the {noun} {verb} every {adjective} {noun} {where}.",
)
_WORDS = {
    "noun": (
        "bank book bridge child city company country doctor engine family farmer field garden house "
        "island language law letter market model morning music paper patient plan price problem river "
        "road room school science season story student system teacher team train village war water "
        "window winter worker world"
    ),
    "verb": (
        "becomes brings builds buys carries changes contains explains finds follows helps holds joins "
        "keeps leads makes moves needs opens pays reaches sees sells serves shows supports takes teaches "
        "tests uses visits wants"
    ),
    "adjective": (
        "bright common early empty famous free full great heavy important large late little local long "
        "modern new old open poor public quiet real rich short simple small strong warm young"
    ),
    "where": (
        "again|at night|by the sea|during the summer|for many years|from the north|in the old town|"
        "near the station|on the other side|over time|under the new rules|without much help"
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Workload:
    """The texts of one benchmark."""

    short: tuple[str, ...]
    long: tuple[str, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.as_json().encode()).hexdigest()


def workload(texts: Iterable[str] | None = None) -> _Workload:
    """Short and long texts made of the words of `texts`, or of generated English; deterministic."""
    words = _invented_words() if texts is None else _given_words(texts)
    return _Workload(
        short=_cut(words, islice(cycle(_SHORT_WORDS), _SHORT_TEXTS)),
        long=_cut(words, islice(cycle(_LONG_WORDS), _LONG_TEXTS)),
    )


def _mean_words(texts: tuple[str, ...]) -> float:
    return sum(len(text.split()) for text in texts) / len(texts)


def _cut(words: Iterator[str], counts: Iterable[int]) -> tuple[str, ...]:
    return tuple(" ".join(islice(words, count)) for count in counts)


def _given_words(texts: Iterable[str]) -> Iterator[str]:
    """The words of the user's texts, repeated without end."""
    enough = _SHORT_TEXTS * max(_SHORT_WORDS) + _LONG_TEXTS * max(_LONG_WORDS)
    words = list(islice((word for text in texts for word in _split(text)), enough))
    if not words:
        raise BadInput("the texts hold no words; pass at least one sentence, or no texts at all")
    return cycle(words)


def _split(text: object) -> Iterator[str]:
    if not isinstance(text, str):
        raise BadInput(f"a text is a {type(text).__name__}, not a string; convert it first")
    for word in text.split():
        if len(word) <= _LONGEST_WORD:
            yield word
        else:
            yield from (word[start : start + _PIECE] for start in range(0, len(word), _PIECE))


def _invented_words() -> Iterator[str]:
    """An endless stream of English sentences, word by word."""
    choices = {kind: words.split("|" if "|" in words else None) for kind, words in _WORDS.items()}
    rng = random.Random(0)
    while True:
        sentence = re.sub(r"{(\w+)}", lambda gap: rng.choice(choices[gap[1]]), rng.choice(_PATTERNS))
        yield from sentence.split()


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """The facts about a machine that decide its speed."""

    cpu: str
    cores: int
    usable_cores: int
    memory_bytes: int
    system: str


def this_machine() -> _Machine:
    """The machine this process runs on."""
    return _Machine(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=platform.platform(),
    )


_CpuClock = tuple[float, float, float | None]
"""Wall time, CPU seconds of this process, and CPU seconds of the full machine if it reports them."""


def _cpu_clock() -> _CpuClock:
    stat, busy = Path("/proc/stat"), None
    if stat.is_file():
        user, nice, system, _idle, _waiting, *rest = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.process_time(), busy


def _other_cores(before: _CpuClock, after: _CpuClock) -> float | None:
    """Cores that other programs kept busy between two readings."""
    (wall, own, machine), (later, later_own, later_machine) = before, after
    if machine is None or later_machine is None:
        return None
    return max(0.0, ((later_machine - machine) - (later_own - own)) / (later - wall))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()

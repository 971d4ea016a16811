"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as far as it decides about speed."""

    cpu: str
    cores: int
    usable_cores: int
    memory_bytes: int
    system: str


def this_machine() -> Machine:
    """The machine this process runs on."""
    return Machine(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=platform.platform(),
    )


def usable_cores() -> int:
    """The cores this process may run on, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class CpuClock:
    """How much work was done so far, by this process and by the whole machine (None where it does not tell)."""

    wall: float
    own: float
    machine: float | None


def cpu_clock() -> CpuClock:
    """Read the clocks; two readings tell who worked in between."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return CpuClock(wall=time.perf_counter(), own=time.process_time(), machine=None)
    user, nice, system, _idle, _waiting, *rest = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return CpuClock(wall=time.perf_counter(), own=time.process_time(), machine=busy)


def other_cores(before: CpuClock, after: CpuClock) -> float | None:
    """How many cores others kept busy between two readings."""
    if before.machine is None or after.machine is None:
        return None
    others = (after.machine - before.machine) - (after.own - before.own)
    return max(0.0, others / (after.wall - before.wall))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()

"""What else the machine is doing: timings of a busy one compare badly."""

from __future__ import annotations

import os
import time
from pathlib import Path


def busy_share(seconds: float = 1.0) -> float:
    """The share of the processors' time that was used while this waited."""
    before = _ticks(Path("/proc/stat").read_text())
    time.sleep(seconds)
    used, total = (
        after - earlier
        for after, earlier in zip(_ticks(Path("/proc/stat").read_text()), before, strict=True)
    )
    return used / total if total else 0.0


def describe() -> str:
    return f"{os.cpu_count()} processors, {busy_share():.0%} busy before this starts"


def _ticks(stat: str) -> tuple[int, int]:
    """Ticks used and in all, of all processors, from the text of ``/proc/stat``."""
    user, nice, system, idle, iowait, *rest = map(int, stat.splitlines()[0].split()[1:9])
    used = user + nice + system + sum(rest)
    return used, used + idle + iowait

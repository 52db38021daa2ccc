"""Processor time that a server's processes have used."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds(pid: int, *, with_children: bool = True) -> float:
    """Seconds that the threads of ``pid``, and of its descendants, have run so far.

    Threads and processes that have ended do not count.
    """
    pids = descendants(pid) if with_children else [pid]
    total = 0
    for each in pids:
        for task in (PROC / str(each) / "task").glob("*/schedstat"):
            with suppress(OSError):
                total += int(task.read_text().split()[0])
    return total / 1e9


def descendants(pid: int) -> list[int]:
    """``pid`` and all processes below it."""
    found = [pid]
    for parent in found:
        for children in (PROC / str(parent) / "task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found

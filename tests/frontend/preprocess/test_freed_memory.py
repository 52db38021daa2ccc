"""Large pieces of memory are used again without new pages from the kernel."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from frontend.preprocess import freed_memory

PROGRAM = """
import resource, sys
from frontend.preprocess.freed_memory import MIB, keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory(64 * MIB)
def use():
    pieces = [bytes(b"x") * (2 * MIB) for _ in range(4)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
before = faults()
for _ in range(10):
    use()
print(faults() - before)
"""
PAGES = 10 * 4 * (2 << 20) // 4096
"""Of all the pieces that the program uses after the first time."""


def faults(how: str) -> int:
    """Page faults of the program above, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def test_freed_memory_is_used_again() -> None:
    assert faults("keep") < PAGES / 10
    assert faults("return") > PAGES / 2, "it makes no difference any more: drop it"


def test_another_malloc_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not freed_memory.keep_freed_memory(1 << 20)

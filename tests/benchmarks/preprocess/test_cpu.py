from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.preprocess.cpu import cpu_seconds, descendants

BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
"""


def test_time_of_this_process_grows_as_it_works() -> None:
    before, until = cpu_seconds(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert cpu_seconds(os.getpid()) - before >= 0.09


def test_processes_below_are_found_and_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert descendants(parent.pid) == [parent.pid, child]
        alone = cpu_seconds(parent.pid, with_children=False)
        assert 0.2 <= alone <= cpu_seconds(parent.pid)
        parent.communicate("\n")

from __future__ import annotations

import os
import subprocess
import sys

from frontend.preprocess.template import NICENESS

GIVE_WAY = """
import os
from frontend.preprocess.template import give_way
{refuse}
give_way({priority!r})
print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))
"""
REFUSE = """
def refuse(*_):
    raise PermissionError
os.sched_setscheduler = refuse
"""


def _priority_after(priority: str, refuse: str = "") -> tuple[int, int]:
    """Scheduling policy and niceness of a process that has given way."""
    script = GIVE_WAY.format(priority=priority, refuse=refuse)
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    policy, niceness = done.stdout.split()
    return int(policy), int(niceness)


def _lower() -> int:
    return min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)


def test_idle_is_for_when_nobody_else_wants_a_processor() -> None:
    assert _priority_after("idle")[0] == os.SCHED_IDLE


def test_low_is_a_matter_of_niceness() -> None:
    assert _priority_after("low") == (os.SCHED_OTHER, _lower())


def test_where_idle_is_refused_it_is_low() -> None:
    assert _priority_after("idle", REFUSE) == (os.SCHED_OTHER, _lower())

"""Several processes: started again when they crash, and gone when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0

SUPERVISOR = """
import asyncio, sys
from frontend import supervisor
supervisor.FIRST_PAUSE_SECONDS = float(sys.argv[2])
supervisor.STOP_SECONDS = 2.0
command = [sys.executable, "-c", sys.argv[1], sys.argv[3]]
sys.exit(asyncio.run(supervisor.supervise(command, 2, 0.0)))
"""

# Writes its process id into the directory, and waits to be told to end.
WAITS = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
while True:
    signal.pause()
"""
CRASHES = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
sys.exit(3)
"""
STUBBORN = WAITS.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


class Supervised:
    """A supervisor with its two processes, each of which leaves a file named by its id."""

    def __init__(self, program: str, directory: Path, pause: float = 0.05) -> None:
        self._directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, program, str(pause), str(directory)], cwd=ROOT
        )

    def started(self) -> set[int]:
        return {int(path.name) for path in self._directory.iterdir()}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.started():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(program: str, pause: float = 0.05) -> Supervised:
        started.append(Supervised(program, tmp_path, pause))
        return started[-1]

    yield start
    for each in started:
        each.end()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_end_when_the_supervisor_is_told_to(supervised, number) -> None:
    group = supervised(WAITS)
    wait_for(lambda: len(group.started()) == 2)
    group.process.send_signal(number)
    assert group.process.wait(PATIENCE) == 0
    assert not any(map(is_running, group.started()))


def test_one_that_does_not_end_is_killed(supervised) -> None:
    group = supervised(STUBBORN)
    wait_for(lambda: len(group.started()) == 2)
    group.process.terminate()
    assert group.process.wait(PATIENCE) == 0
    assert not any(map(is_running, group.started()))


def test_one_that_is_killed_is_started_again(supervised) -> None:
    group = supervised(WAITS)
    wait_for(lambda: len(group.started()) == 2)
    killed = group.started().pop()
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(group.started()) == 3)
    wait_for(lambda: sum(map(is_running, group.started())) == 2)
    assert not is_running(killed)


def test_what_crashes_again_and_again_is_started_more_and_more_slowly(supervised) -> None:
    group = supervised(CRASHES, pause=0.1)
    wait_for(lambda: len(group.started()) >= 6)
    # Two processes, three starts each: after 0, 0.1 and 0.3 s. Without the pauses there
    # would be hundreds by the time the fourth are due, at 0.7 s.
    assert group.process.poll() is None
    assert len(group.started()) <= 8


def test_a_bad_setting_ends_all_with_its_status(supervised) -> None:
    group = supervised("import sys; sys.exit(2)")
    assert group.process.wait(PATIENCE) == 2


def test_a_killed_supervisor_takes_all_along(supervised) -> None:
    group = supervised(WAITS)
    wait_for(lambda: len(group.started()) == 2)
    group.process.kill()
    group.process.wait()
    wait_for(lambda: not any(map(is_running, group.started())))

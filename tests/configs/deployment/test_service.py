"""A process that is kept running, by a clock of the test's own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.deployment.commands import Command
from configs.deployment.service import LONGEST_PAUSE_SECONDS, Service, ServiceFailed

LIVES = "import time; print('alive', flush=True); time.sleep(600)"
FAILS = "import sys; print('no such model', flush=True); sys.exit(7)"
BAD = "import sys; print('--x: no', flush=True); sys.exit(2)"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Kept:
    def __init__(self, log: Path, program: str) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        command = Command("w", [], {}, program=[sys.executable, "-c", program])
        self.service = Service(command, log, {}, self.said.append, self.clock)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.said
            self.service.look_after()
            time.sleep(0.01)

    def until_ended(self) -> None:
        count = len(self.said)
        self.until(lambda: len(self.said) > count)


def test_what_crashes_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "log", LIVES)
    service = kept.service
    service.start()
    assert service.child is not None
    first = service.child.pid
    os.kill(first, signal.SIGKILL)
    kept.until_ended()
    assert kept.said[-1].startswith("w ended (killed by SIGKILL); starts again in 1 s; see")
    service.look_after()
    assert not service.running
    kept.clock.now += 1.0
    service.look_after()
    assert service.running and service.child.pid != first
    assert service.past == [first]
    assert kept.said[-1] == f"Started w again, process {service.child.pid}"
    service.child.kill_group()


def pauses(kept: Kept, count: int, lives_for: float = 0.0) -> list[float]:
    found = []
    kept.service.start()
    for _ in range(count):
        kept.clock.now += lives_for
        kept.until_ended()
        found.append(float(kept.said[-1].partition("again in ")[2].partition(" s")[0]))
        kept.clock.now += LONGEST_PAUSE_SECONDS
        kept.service.look_after()
    assert kept.service.child is not None
    kept.service.child.kill_group()
    return found


def test_pauses_grow_to_a_bound(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "log", FAILS)
    assert pauses(kept, 7) == [1, 2, 4, 8, 16, 30, 30]
    assert (tmp_path / "log").read_text().count("no such model") >= 7


def test_what_ran_for_long_starts_soon(tmp_path: Path) -> None:
    assert pauses(Kept(tmp_path / "log", FAILS), 3, lives_for=60.0) == [1, 1, 1]


def test_bad_settings_are_not_tried_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "log", BAD)
    kept.service.start()
    with pytest.raises(ServiceFailed, match=r"exit status 2(.|\n)*\| --x: no"):
        kept.until(lambda: False)


def test_at_the_start_every_end_is_a_failure(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "log", FAILS)
    kept.service.start()
    assert kept.service.child is not None
    while kept.service.child.running:
        time.sleep(0.01)
    with pytest.raises(ServiceFailed, match=r"exit status 7(.|\n)*\| no such model"):
        kept.service.must_run()

"""Several frontend processes behind one port route as one, and are ended as one."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cases import CHAT, chat_body, shown, user
from tests.e2e.conftest import SessionFleet
from tests.e2e.fleet import ANSWER_SECONDS, READY_SECONDS, Frontend
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until

PROCESSES = 2


@pytest.fixture(scope="module")
def several(session_fleet: SessionFleet) -> Iterator[Frontend]:
    """Two processes on one port, in front of the session's workers."""
    frontend = session_fleet.deployment.start_frontend(
        "--frontends", str(PROCESSES), name="several"
    )
    session_fleet.deployment.await_ready([frontend], workers=2)
    wait_until(lambda: len(serving(frontend)) == PROCESSES, READY_SECONDS, "both processes")
    yield frontend
    frontend.end()


def segments(frontend: Frontend) -> list[str]:
    """The arenas of its processes, by the names of the files."""
    return [
        path.name
        for path in Path("/dev/shm").glob("foveal-*")
        if int(path.name.split("-")[1]) in frontend.process.family()
    ]


def serving(frontend: Frontend) -> set[int]:
    """Processes that answer with both workers ready, as connections happen to meet them."""
    met: Counter[str] = Counter()
    for _ in range(16):
        with httpx.Client(base_url=frontend.url, timeout=ANSWER_SECONDS) as client:
            fleet = client.get("/v1/fleet").json()
        if sum(worker["ready"] for worker in fleet["workers"]) == 2:
            met[str(fleet["process"])] += 1
    return {int(pid) for pid in met}


def ask_anew(frontend: Frontend, body: object) -> str:
    """Ask over a connection of its own, so that chance chooses the process."""
    with httpx.Client(base_url=frontend.url, timeout=ANSWER_SECONDS) as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.headers["x-foveal-worker"]


def test_each_has_an_arena_of_its_own(several: Frontend) -> None:
    assert len(segments(several)) == PROCESSES


def test_one_picture_goes_to_one_worker_whichever_process_is_asked(several: Frontend) -> None:
    for seed in (7001, 7002):
        body = chat_body(user(shown(pattern(420, 336, seed)), "What is it?"), max_tokens=1)
        first = ask_anew(several, body)
        several.settle()
        workers = [ask_anew(several, body) for _ in range(20)]
        assert workers.count(first) >= 19


def test_a_process_that_is_killed_is_replaced(several: Frontend) -> None:
    before = serving(several)
    killed = before.pop()
    os.kill(killed, signal.SIGKILL)

    def replaced() -> bool:
        try:
            now = serving(several)
        except httpx.TransportError:
            return False  # connections that were waiting for the one that is gone
        return len(now) == PROCESSES and killed not in now

    wait_until(replaced, READY_SECONDS, "another process")
    assert len(segments(several)) == PROCESSES


def test_all_end_together_and_leave_nothing(several: Frontend) -> None:
    family = several.process.family()
    assert len(family) > PROCESSES
    several.process.signal(signal.SIGTERM)
    assert several.process.wait(60.0) == 0
    assert not several.process.family()
    left = [p.name for p in Path("/dev/shm").glob("foveal-*")]
    assert not [name for name in left if int(name.split("-")[1]) in family]

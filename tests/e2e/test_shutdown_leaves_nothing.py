"""Processes that end, well or badly, leave nothing running and nothing lying about.

Takes the session's fleet apart, test by test in the order of this file: a worker is
killed, then the frontend, then what is left is stopped. Runs last but one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CASES, CHAT, Case, chat_body, shown, user
from tests.e2e.conftest import SessionFleet
from tests.e2e.fleet import Frontend, Server
from tests.e2e.pictures import pattern
from tests.e2e.processes import Process, wait_until
from transfer.embeddings.home import home_of

SHM = Path("/dev/shm")
PICTURE_CASES = [case for case in CASES if case.name.startswith("picture_")][:6]


class State:
    """What is left of the fleet."""

    def __init__(self, fleet: SessionFleet) -> None:
        self.frontend = fleet.frontend
        self.survivor, self.victim = fleet.workers


@pytest.fixture(scope="module")
def state(session_fleet: SessionFleet) -> State:
    return State(session_fleet)


def segments_of(process: Process) -> set[str]:
    """What a process and its children have mapped of /dev/shm."""
    found: set[str] = set()
    for pid in process.family():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.update(re.findall(r"/dev/shm/([^/\s]+)", maps))
    return found


def worker_named_for(process: Process, frontend: Frontend) -> str:
    (name,) = (w for w in frontend.workers() if w.startswith(f"worker-{process.pid}-"))
    return name


LONG_ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 900},
    "drawn_with_a_seed": {"max_tokens": 500, "temperature": 0.9, "seed": 11},
    "structured": {"max_tokens": 500, "structured_outputs": {"regex": "[a-f ]+"}},
}
"""Answers that take a while, and how the next token of each is found."""


def long_body(number: int, options: dict[str, Any]) -> dict[str, Any]:
    return chat_body(
        user(shown(pattern(140, 140, 7000 + number)), "Tell me all."),
        ignore_eos=True, **options,
    )


def told(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """What a client is told of an answer, streamed or not."""
    return {
        "tokens": choice["token_ids"],
        "end": choice["finish_reason"],
        "prompt": answer["usage"]["prompt_tokens"],
        "completion": answer["usage"]["completion_tokens"],
        "logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
    }


def long_stream_on(
    worker: str, frontend: Frontend, options: dict[str, Any], open_streams: ExitStack
) -> tuple[dict[str, Any], httpx.Response]:
    """A request whose answer ``worker`` has begun, and the answer; others go elsewhere."""
    for number in range(6):
        body = long_body(number, options)
        stream = open_streams.enter_context(
            frontend.http.stream(
                "POST", CHAT,
                json={**body, "stream": True, "stream_options": {"include_usage": True}},
            )
        )
        if stream.headers["x-foveal-worker"] == worker:
            return body, stream
    raise AssertionError(f"no request went to {worker}")


def test_a_killed_worker_takes_its_engine_along_and_its_requests_move(
    state: State, expected: Callable[[Case], Any], vllm: Server
) -> None:
    frontend, victim = state.frontend, state.victim
    name = worker_named_for(victim, frontend)
    wanted = [expected(case) for case in PICTURE_CASES]
    with ExitStack() as open_streams, ThreadPoolExecutor(len(PICTURE_CASES)) as pool:
        begun = [
            long_stream_on(name, frontend, options, open_streams)
            for options in LONG_ANSWERS.values()
        ]
        # Stopped, it takes requests in but answers none.
        victim.signal(signal.SIGSTOP)
        answers = [pool.submit(frontend.ask, c.path, c.body) for c in PICTURE_CASES]
        wait_until(
            lambda: (
                name not in frontend.workers()  # missed already
                or frontend.workers()[name]["requests"] > len(begun)
            ),
            15.0, f"requests waiting at {name}",
        )
        victim.signal(signal.SIGKILL)
        victim.wait(5.0)
        wait_until(lambda: victim.family() == [], 5.0, "its engine gone with it")
        for answer, theirs in zip(answers, wanted, strict=True):
            assert differences(answer_of(answer.result()), theirs) == []
        # What had begun went on as if nothing had happened.
        for body, stream in begun:
            stream.read()
            ours = answer_of(stream)
            theirs = vllm.ask(CHAT, body).json()
            assert differences(
                told(ours, ours["choices"][0]), told(theirs, theirs["choices"][0])
            ) == []
    assert frontend.count("requests_moved") >= len(LONG_ANSWERS)
    wait_until(lambda: frontend.has_workers(1), 20.0, "the dead worker off the list")
    assert name not in frontend.workers()


def test_the_surviving_worker_answers_on(
    state: State, expected: Callable[[Case], Any]
) -> None:
    name = worker_named_for(state.survivor, state.frontend)
    for case in PICTURE_CASES[:3]:
        response = state.frontend.ask(case.path, case.body)
        assert response.headers["x-foveal-worker"] == name
        assert differences(answer_of(response), expected(case)) == []


def test_a_killed_frontend_is_swept_up_after(
    state: State, session_fleet: SessionFleet, expected: Callable[[Case], Any]
) -> None:
    killed = state.frontend.process
    (arena,) = (s for s in segments_of(killed) if s.startswith(f"foveal-{killed.pid}-"))
    assert arena in segments_of(state.survivor)
    killed.signal(signal.SIGKILL)
    killed.wait(5.0)
    assert (SHM / arena).exists()
    state.frontend = session_fleet.deployment.start_frontend()
    session_fleet.deployment.await_ready([state.frontend], workers=1)
    assert not (SHM / arena).exists()
    wait_until(
        lambda: arena not in segments_of(state.survivor), 20.0, "the dead arena unmapped"
    )
    for case in PICTURE_CASES:
        ours = answer_of(state.frontend.ask(case.path, case.body))
        assert differences(ours, expected(case)) == []


def test_what_is_stopped_ends_in_good_order_and_leaves_nothing(
    state: State, session_fleet: SessionFleet
) -> None:
    deployment = session_fleet.deployment
    frontend, worker = state.frontend.process, state.survivor
    segments = segments_of(frontend) | segments_of(worker)
    assert segments
    seed = (deployment.registry / deployment.namespace / "identity-seed").read_bytes()
    outputs = home_of(seed, deployment.namespace)
    assert list(outputs.glob("*/image-*"))  # those of the killed worker too
    frontend.signal(signal.SIGINT)
    worker.signal(signal.SIGTERM)
    assert frontend.wait(30.0) in (0, 130)
    assert worker.wait(30.0) == 0
    wait_until(lambda: frontend.family() + worker.family() == [], 5.0, "no child left")
    assert [name for name in segments if (SHM / name).exists()] == []
    assert not outputs.exists()
    assert deployment.announced() == []
    assert deployment.left_by(frontend) == []


def test_a_stopped_worker_leaves_no_temporary_files(
    state: State, session_fleet: SessionFleet
) -> None:
    assert state.survivor.exit_status == 0
    assert session_fleet.deployment.left_by(state.survivor) == []

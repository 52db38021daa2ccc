"""A frontend before mock workers: the protocols, the routing and the reuse are real."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cases import CHAT, says, shown, user
from tests.e2e.fleet import MODEL, Deployment, Frontend
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until
from tests.e2e.reuse import ask_and_settle, reuse_of

WORKERS = 3


def chat(*messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), **options}


@pytest.fixture(scope="module")
def mock_frontend(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Frontend]:
    deployment = Deployment(checkpoint, tmp_path_factory.mktemp("mock-logs"), "mock")
    try:
        deployment.start_worker(
            "--engine", "mock", "--mock-workers", str(WORKERS), "--mock-speed", "20",
            "--num-gpu-blocks-override", "200", name="mock-worker",
        )
        frontend = deployment.start_frontend(before=["env", "VLLM_SERVER_DEV_MODE=1"])
        deployment.await_ready([frontend], workers=WORKERS)
        yield frontend
    except BaseException:
        print(deployment.last_lines())
        raise
    finally:
        deployment.end()


def test_mock_workers_are_called_mocks(mock_frontend: Frontend) -> None:
    workers = mock_frontend.workers()
    assert len(workers) == WORKERS
    for name, worker in workers.items():
        assert name.startswith("mock-worker-")
        assert worker["facts"]["engine"] == "mock"


def test_an_answer_has_max_tokens_and_is_the_same_each_time(mock_frontend: Frontend) -> None:
    body = chat(says("user", "Tell me something."), max_tokens=12)
    first, second = (mock_frontend.ask(CHAT, body) for _ in range(2))
    assert first.json()["usage"]["completion_tokens"] == 12
    assert first.json()["choices"][0]["finish_reason"] == "length"
    answers = [reply.json()["choices"][0]["message"]["content"] for reply in (first, second)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


def test_a_stream_brings_every_token(mock_frontend: Frontend) -> None:
    body = chat(says("user", "Count."), max_tokens=6, stream=True)
    with mock_frontend.http.stream("POST", CHAT, json=body) as response:
        assert response.headers["x-foveal-worker"].startswith("mock-worker-")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert len("".join(delta.get("content") or "" for delta in deltas)) == 6


def test_the_overlap_foreseen_is_what_a_mock_reuses(mock_frontend: Frontend) -> None:
    chance = random.Random(4)
    pictures = [shown(pattern(280, 224, 7000 + number)) for number in range(8)]
    reused = 0
    workers = set()
    for number in range(40):
        body = chat(
            user(*chance.choices(pictures, k=chance.randint(0, 2)), f"Number {number % 5}?"),
            cache_salt=chance.choice("abcd"),
        )
        reuse = ask_and_settle(mock_frontend, body)
        assert reuse.overlap_tokens == reuse.cached_tokens
        reused += reuse.cached_tokens > 0
        workers.add(reuse.worker)
    assert reused > 10
    assert len(workers) == WORKERS


def test_a_reset_cache_is_forgotten_at_once(mock_frontend: Frontend) -> None:
    body = chat(says("user", "Remember this, for it is long enough to be a block. " * 3))
    ask_and_settle(mock_frontend, body)
    assert ask_and_settle(mock_frontend, body).cached_tokens > 0
    mock_frontend.http.post("/reset_prefix_cache").raise_for_status()
    reuse = reuse_of(mock_frontend.ask(CHAT, {**body, "max_tokens": 1}))
    assert (reuse.overlap_tokens, reuse.cached_tokens) == (0, 0)


def test_a_request_that_is_aborted_leaves_nothing_in_flight(mock_frontend: Frontend) -> None:
    body = chat(says("user", "Go on."), max_tokens=4000, stream=True)
    with mock_frontend.http.stream("POST", CHAT, json=body) as response:
        lines = (line for line in response.iter_lines() if '"content"' in line)
        assert "error" not in next(lines)
        assert mock_frontend.fleet()["requests"] == 1
    wait_until(lambda: mock_frontend.fleet()["requests"] == 0, 10.0, "the abort confirmed")

"""A client that goes away leaves nothing behind: no request, no load, no cache block."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CASES, CHAT, SAMPLED, Case, chat_body, shown, user
from tests.e2e.fleet import Frontend
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until

RELEASE_SECONDS = 20.0
ENDLESS = {"stream": True, "max_tokens": 4000, "ignore_eos": True, "logprobs": None,
           "top_logprobs": None}


def endless(number: int, **options: Any) -> dict[str, Any]:
    picture = shown(pattern(400, 300, 6000 + number), "JPEG")
    return chat_body(user(picture, "Tell me all."), **{**ENDLESS, **options})


def is_idle(frontend: Frontend) -> bool:
    fleet = frontend.fleet()
    loads = [worker["requests"] for worker in fleet["workers"]]
    return fleet["requests"] == 0 and not any(loads)


def gauge(frontend: Frontend, name: str) -> float:
    """A gauge of ``/metrics``, summed over its labels."""
    text = frontend.http.get("/metrics").text
    return sum(float(v) for v in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


@pytest.fixture(autouse=True)
def _idle_before_and_after(frontend: Frontend) -> Any:
    wait_until(lambda: is_idle(frontend), RELEASE_SECONDS, "the fleet before the test idle")
    yield
    wait_until(lambda: is_idle(frontend), RELEASE_SECONDS, "the fleet after the test idle")


@pytest.mark.parametrize("options", [{}, {"n": 3, **SAMPLED}], ids=["one", "three_answers"])
def test_a_stream_left_in_its_middle_is_aborted(
    frontend: Frontend, options: dict[str, Any]
) -> None:
    with frontend.http.stream("POST", CHAT, json=endless(0, **options)) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
        assert frontend.fleet()["requests"] > 0
    wait_until(lambda: is_idle(frontend), RELEASE_SECONDS, "an aborted stream released")


def test_requests_left_before_their_first_token_are_aborted(frontend: Frontend) -> None:
    for number in range(1, 9):
        body = endless(number, stream=False)
        with pytest.raises(httpx.ReadTimeout):
            frontend.http.post(CHAT, json=body, timeout=httpx.Timeout(60, read=0.15))


def test_the_engines_are_idle_after_aborts(
    frontend: Frontend, expected: Callable[[Case], Any]
) -> None:
    wait_until(lambda: is_idle(frontend), RELEASE_SECONDS, "the fleet idle")
    # Engines report with their steps, so let each of them take one.
    for case in (case for case in CASES if case.name.startswith("picture_")):
        ours = answer_of(frontend.ask(case.path, case.body))
        assert differences(ours, expected(case)) == []
    wait_until(
        lambda: gauge(frontend, "vllm:num_requests_running") == 0,
        RELEASE_SECONDS, "no request running",
    )
    assert gauge(frontend, "vllm:num_requests_waiting") == 0
    assert gauge(frontend, "vllm:kv_cache_usage_perc") == 0

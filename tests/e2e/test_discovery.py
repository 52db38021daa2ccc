"""Frontends without workers wait, find those that come, and notice those that leave.

Has one engine of its own, so the session's fleet is ended first. Runs last.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.cases import CHAT, QUESTION, chat_body
from tests.e2e.fleet import READY_SECONDS, Deployment, Frontend
from tests.e2e.processes import free_port, wait_until

WAIT_SECONDS = 2.0


@dataclass
class Alone:
    """Frontends that were started before there was any worker."""

    deployment: Deployment
    patient: Frontend
    """In the registry of the worker to come; lets requests wait for it."""
    by_hand: Frontend
    """In another registry; told where the worker will listen."""
    other_dtype: Frontend
    """In the registry too, but for another precision."""
    port: int
    seed: tuple[str, str]


@pytest.fixture(scope="module")
def alone(
    no_session_fleet: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Alone]:
    deployment = Deployment(checkpoint, tmp_path_factory.mktemp("discovery"), "here")
    port = free_port()
    seed = ("--mm-identity-seed-file", str(deployment.directory / "seed"))
    start = deployment.start_frontend
    frontends = Alone(
        deployment,
        patient=start(
            *seed, "--worker-wait-timeout", str(READY_SECONDS), name="patient"
        ),
        by_hand=start(
            *seed, "--namespace", "elsewhere", "--worker", f"tcp://127.0.0.1:{port}",
            "--worker-wait-timeout", str(WAIT_SECONDS), name="by-hand",
        ),
        other_dtype=start(*seed, "--dtype", "bfloat16", name="other-dtype"),
        port=port,
        seed=seed,
    )
    try:
        deployment.await_ready(
            [frontends.patient, frontends.by_hand, frontends.other_dtype], workers=0
        )
        yield frontends
    finally:
        deployment.end()


@pytest.fixture(scope="module")
def waiting(alone: Alone) -> Iterator[Future[httpx.Response]]:
    """A request that waits for a worker."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(alone.patient.http.post, CHAT, json=chat_body(QUESTION),
                          timeout=READY_SECONDS)


def test_without_workers_a_frontend_is_not_healthy(alone: Alone) -> None:
    for frontend in (alone.patient, alone.by_hand, alone.other_dtype):
        assert frontend.http.get("/health").status_code == 503
        assert frontend.http.get("/v1/models").status_code == 200


def test_a_request_waits_so_long_and_is_told_why_it_failed(alone: Alone) -> None:
    began = time.monotonic()
    response = alone.by_hand.http.post(CHAT, json=chat_body(QUESTION))
    assert time.monotonic() - began >= WAIT_SECONDS
    assert response.status_code == 503
    assert "No worker became ready within 2 seconds" in response.text


def test_a_streaming_request_that_waits_in_vain_is_told_so(alone: Alone) -> None:
    response = alone.by_hand.http.post(CHAT, json=chat_body(QUESTION, stream=True))
    assert "No worker became ready within 2 seconds" in response.text


def test_a_worker_that_comes_is_found_and_answers_who_waited(
    alone: Alone, waiting: Future[httpx.Response]
) -> None:
    worker = alone.deployment.start_worker(*alone.seed, "--port", str(alone.port))
    alone.deployment.await_ready([alone.patient, alone.by_hand], workers=1)
    answer = waiting.result(timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-foveal-worker"].startswith(f"worker-{worker.pid}-")
    assert alone.patient.http.get("/health").status_code == 200


def test_a_worker_named_by_hand_needs_no_common_registry(alone: Alone) -> None:
    ours, theirs = (
        frontend.ask(CHAT, chat_body(QUESTION)).json()["choices"][0]["token_ids"]
        for frontend in (alone.by_hand, alone.patient)
    )
    assert ours == theirs


def test_a_worker_of_another_precision_is_refused_by_name(alone: Alone) -> None:
    (worker,) = alone.other_dtype.fleet()["workers"]
    assert not worker["ready"]
    assert worker["refused"] == (
        "its dtype is 'float32', this frontend's is 'bfloat16'"
    )
    assert alone.other_dtype.http.get("/health").status_code == 503


def test_a_worker_that_leaves_is_missed_and_leaves_nothing(alone: Alone) -> None:
    worker = alone.deployment.processes[-1]
    worker.signal(signal.SIGINT)
    for frontend in (alone.patient, alone.by_hand):
        wait_until(lambda f=frontend: f.workers() == {}, 10.0, "the fleet shrunk")
        assert frontend.http.get("/health").status_code == 503
    assert worker.wait(30.0) == 0
    wait_until(lambda: worker.family() == [], 5.0, "no child left")
    assert alone.deployment.announced() == []

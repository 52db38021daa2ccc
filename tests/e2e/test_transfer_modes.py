"""Frontends that reach the same workers in other ways answer the same, as exactly."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.answers import answer_of, differences
from tests.e2e.cases import CASES, CHAT, Case, chat_body, shown, user
from tests.e2e.conftest import SessionFleet
from tests.e2e.fleet import Frontend, Server
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until
from tests.e2e.reuse import ask_and_settle, reuse_of

MOUNT = ("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
WITH_SHM_OF_ITS_OWN = ("unshare", "-m", "sh", "-c", f'{" ".join(MOUNT)} && exec "$@"', "sh")

SOME_CASES = [
    case
    for case in CASES
    if case.name
    in (
        "picture_too_large_to_keep", "picture_astronaut", "four_pictures", "streamed",
        "pictures_over_several_turns", "frames_of_a_video", "two_answers", "json_schema",
    )
]


@pytest.fixture(scope="module")
def may_mount() -> bool:
    probe = subprocess.run(["unshare", "-m", *MOUNT], capture_output=True, check=False)
    return probe.returncode == 0


@pytest.fixture(scope="module")
def others(session_fleet: SessionFleet, may_mount: bool) -> Iterator[dict[str, Frontend]]:
    """More frontends of the session's workers, by what is special about them."""
    # What is computed before they start they can know from snapshots only.
    ask_and_settle(session_fleet.frontend, BEFORE_THEY_STARTED)
    start = session_fleet.deployment.start_frontend
    frontends = {"inline": start("--mm-transfer", "inline", name="inline")}
    if may_mount:
        frontends["other_shm"] = start(before=WITH_SHM_OF_ITS_OWN, name="other-shm")
    try:
        session_fleet.deployment.await_ready(list(frontends.values()), workers=2)
        yield frontends
    finally:
        for frontend in frontends.values():
            frontend.end()


BEFORE_THEY_STARTED = chat_body(user(shown(pattern(270, 270, 5000)), "What was it?"))


TRANSFERS = {"inline": "inline", "other_shm": "nixl"}
"""How tensors reach the workers from each."""

REASONS = {"inline": "asked for", "other_shm": "the worker reads the arena by NIXL"}


@pytest.fixture(params=["inline", "other_shm"])
def other(request: pytest.FixtureRequest, others: dict[str, Frontend]) -> Frontend:
    if request.param not in others:
        pytest.skip("this user may not mount a /dev/shm of its own, so NOT TESTED")
    return others[request.param]


def test_its_first_request_reuses_what_the_workers_held_before(other: Frontend) -> None:
    other.settle()
    reuse = reuse_of(other.ask(CHAT, BEFORE_THEY_STARTED))
    assert reuse.overlap_tokens == reuse.cached_tokens == reuse.reusable_tokens > 0


@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.name)
def test_its_answers_are_those_of_vllm(
    others: dict[str, Frontend],
    other: Frontend,
    case: Case,
    expected: Callable[[Case], Any],
) -> None:
    transfer = next(TRANSFERS[name] for name in others if others[name] is other)
    response = other.ask(case.path, case.body)
    assert set(response.headers["x-foveal-transfer"].split(",")) == {transfer}
    assert differences(answer_of(response), expected(case)) == []


def test_a_picture_that_the_host_has_encoded_needs_no_pixels(
    frontend: Frontend, vllm: Server, other: Frontend
) -> None:
    port = int(other.url.rpartition(":")[2])
    picture = shown(pattern(300, 200, port))
    before = other.shared_embeddings()
    frontend.ask(CHAT, chat_body(user(picture, f"Once, for {other.url}")))
    wait_until(lambda: other.shared_embeddings() > before, 10.0, "news of the output")
    moved = [other.metric(name) for name in PIXELS_MOVED]
    body = chat_body(user(picture, f"Twice, for {other.url}"), cache_salt=str(port))
    response = other.ask(CHAT, body)
    assert response.headers["x-foveal-embeddings"] == "1/1"
    assert differences(answer_of(response), answer_of(vllm.ask(CHAT, body))) == []
    assert [other.metric(name) for name in PIXELS_MOVED] == moved


PIXELS_MOVED = ("foveal_tensors_missing_total", "foveal_nixl_pulls_total")


def test_the_fleet_says_how_tensors_go_and_why(others: dict[str, Frontend]) -> None:
    for name, frontend in others.items():
        for worker in frontend.workers().values():
            assert worker["transfer"] == TRANSFERS[name]
            assert worker["transfer_reason"].startswith(REASONS[name])


def test_each_frontend_learns_what_the_other_has_computed(
    frontend: Frontend, other: Frontend
) -> None:
    body = chat_body(user(shown(pattern(260, 260, len(other.url))), f"From {other.url}"))
    first = ask_and_settle(frontend, body)
    other.settle()
    reuse = ask_and_settle(other, body)
    assert reuse.worker == first.worker
    assert reuse.overlap_tokens == reuse.cached_tokens == reuse.reusable_tokens > 0

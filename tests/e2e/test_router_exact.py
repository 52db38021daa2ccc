"""What the frontend promises of reuse is what engines do, while blocks are evicted."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.cases import chat_body, shown, user
from tests.e2e.fleet import BLOCK_SIZE, Frontend
from tests.e2e.pictures import pattern
from tests.e2e.processes import wait_until
from tests.e2e.reuse import Reuse, ask_and_settle, reuse_of

REQUESTS = 200
OPENINGS = ("", "Be honest. ", "Consider the following with great care. " * 6)
QUESTIONS = ("What?", "How many are there of them, and why? ", "Tell me more. " * 12)


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Few popular pictures, many rare ones, texts alone, turns that build on each other."""
    chance = random.Random(41)
    popular = [shown(pattern(280, 224, 5000 + n)) for n in range(6)]
    bodies = []
    for number in range(REQUESTS):
        parts: list[Any] = [chance.choice(OPENINGS)]
        kind = chance.random()
        if kind < 0.5:
            weights = (12, 6, 4, 3, 2, 2)
            parts += chance.choices(popular, weights, k=chance.randint(1, 2))
        elif kind < 0.8:
            parts.append(shown(pattern(420, 336, 6000 + number)))
        parts.append(chance.choice(QUESTIONS))
        bodies.append(chat_body(user(*parts), max_tokens=1))
    return bodies


def small_worker(frontend: Frontend) -> str:
    """The one that holds so little that it must evict."""
    return min(
        frontend.workers().values(), key=lambda worker: worker["facts"]["num_kv_blocks"]
    )["id"]


@pytest.fixture(scope="module")
def computed() -> Counter[str]:
    """Full prompt blocks that each worker has computed."""
    return Counter()


def count(answers: list[Reuse], computed: Counter[str]) -> None:
    for reuse in answers:
        computed[reuse.worker] += (reuse.reusable_tokens - reuse.cached_tokens) // BLOCK_SIZE


# First, because eight at a time reach both workers: one at a time, the blocks that these
# short prompts share may draw all to one.


def test_with_eight_at_a_time_promises_and_reuse_differ_little(
    frontend: Frontend,
    bodies: list[dict[str, Any]],
    computed: Counter[str],
    record_property: Any,
) -> None:
    """A promise is made when a request is routed, and kept or not when it is scheduled.

    In between, blocks that earlier requests were computing become resident: more is reused
    than was promised. Blocks that were promised may be evicted: less is.
    """
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda body: reuse_of(frontend.ask("/v1/chat/completions", body)), bodies)
        )
    count(answers, computed)
    promised = sum(reuse.overlap_tokens for reuse in answers)
    reused = sum(reuse.cached_tokens for reuse in answers)
    more = sum(reuse.cached_tokens > reuse.overlap_tokens for reuse in answers)
    less = sum(reuse.cached_tokens < reuse.overlap_tokens for reuse in answers)
    figures = {"promised": promised, "reused": reused, "more": more, "less": less}
    for name, figure in figures.items():
        record_property(name, figure)
    print(f"tokens and requests, of {len(answers)}: {figures}")
    assert promised > 0
    assert less <= len(answers) / 10


def test_promised_overlap_is_what_the_engine_reuses(
    frontend: Frontend, bodies: list[dict[str, Any]], computed: Counter[str]
) -> None:
    frontend.settle()
    answered: list[Reuse] = []
    wrong = []
    for body in bodies:
        reuse = ask_and_settle(frontend, body)
        answered.append(reuse)
        if reuse.overlap_tokens != reuse.cached_tokens:
            wrong.append(reuse)
    assert not wrong
    assert sum(reuse.cached_tokens > 0 for reuse in answered) > REQUESTS / 4
    # The small one computed more, here and before, than it can hold.
    count(answered, computed)
    small = small_worker(frontend)
    room = frontend.workers()[small]["facts"]["num_kv_blocks"]
    assert computed[small] > room, "nothing was evicted"


def test_the_index_holds_what_the_workers_hold(frontend: Frontend) -> None:
    frontend.settle()
    fleet = frontend.http.get("/v1/fleet", params={"check": "true"}).raise_for_status().json()
    checks = [worker["index"] for worker in fleet["workers"] if worker["ready"]]
    assert len(checks) == 2
    for check in checks:
        assert check["equal"] is True, check
        assert check["held"] > 0


def test_load_reports_come_and_end_at_nothing(frontend: Frontend) -> None:
    def is_idle() -> bool:
        loads = [worker["load"] for worker in frontend.workers().values()]
        return len(loads) == 2 and not any(sum(load.values()) for load in loads)

    wait_until(is_idle, 10.0, "an idle fleet that is known to be idle")

from __future__ import annotations

import pytest

from benchmarks.replay.policies import Oracle, RouterPolicy
from benchmarks.replay.prepare import Prepared, prepare
from benchmarks.replay.simulation import LIMITS
from benchmarks.replay.trace import Part, TraceRequest
from transfer.messages import KvDelta
from workers.mock.engine import MockEngine

WORKERS = ("a", "b", "c")


def asking(name: str, picture: str, tokens: int = 1600) -> Prepared:
    request = TraceRequest(
        id=name, at=0.0, answer_tokens=1, prompt=[Part(image=picture, tokens=tokens)]
    )
    return prepare([request], LIMITS.block_size)[0]


def compute(engine: MockEngine, prepared: Prepared) -> None:
    engine.add(prepared.for_engine())
    now = 0.0
    while (ends := engine.begin(now)) is not None:
        engine.finish(now := ends)


@pytest.fixture
def engines() -> dict[str, MockEngine]:
    return {name: MockEngine(LIMITS) for name in WORKERS}


def test_an_oracle_goes_where_the_picture_is(engines: dict[str, MockEngine]) -> None:
    compute(engines["b"], asking("before", "cat"))
    assert Oracle(engines).route(asking("now", "cat")) == "b"


def test_an_oracle_goes_where_the_picture_is_on_its_way(
    engines: dict[str, MockEngine],
) -> None:
    oracle = Oracle(engines)
    first = oracle.route(asking("1", "cat"))
    engines[first].add(asking("1", "cat").for_engine())
    # 1,600 tokens wait there, and 16 elsewhere are sooner than that: it is not a herd.
    assert oracle.route(asking("2", "dog", 16)) != first


def test_an_oracle_spreads_what_is_new(engines: dict[str, MockEngine]) -> None:
    oracle = Oracle(engines)
    assert {oracle.route(asking(name, name)) for name in "xyz"} == set(WORKERS)


def test_an_oracle_forgets_a_prompt_that_has_been_computed(
    engines: dict[str, MockEngine],
) -> None:
    oracle = Oracle(engines)
    oracle.route(asking("1", "cat"))
    oracle.first_token("1")
    assert not any(oracle._queued.values())
    assert not any(oracle._coming.values())


def test_a_router_that_would_need_a_snapshot_is_an_error() -> None:
    policy = RouterPolicy("kv", {"a": "epoch"}, lambda: 0.0, seed=1)
    policy.on_delta("a", KvDelta("epoch", 1, {"GPU": [b"x" * 32]}))
    with pytest.raises(RuntimeError, match="not the next"):
        policy.on_delta("a", KvDelta("epoch", 3, {"GPU": [b"y" * 32]}))

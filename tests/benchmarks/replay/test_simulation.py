from __future__ import annotations

import pytest

from benchmarks.replay.policies import POLICIES, RouterPolicy
from benchmarks.replay.prepare import prepare
from benchmarks.replay.results import boundless_hit_ratio
from benchmarks.replay.simulation import HOP_SECONDS, LIMITS, Replay, Simulation
from benchmarks.replay.trace import Part, TraceRequest
from benchmarks.replay.workloads import WORKLOADS
from workers.mock.cost_model import step_seconds

BLOCK = LIMITS.block_size


def ask(name: str, at: float, picture: str, tokens: int = 160) -> TraceRequest:
    return TraceRequest(
        id=name,
        at=at,
        answer_tokens=2,
        prompt=[Part(image=picture, tokens=tokens), Part(text=f"about {name}", tokens=10)],
    )


def replay(trace: list[TraceRequest], policy: str, workers: int = 2) -> Replay:
    return Simulation(prepare(trace, BLOCK), policy, workers).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_first_token_takes_what_the_cost_model_says(policy: str) -> None:
    outcome = replay([ask("a", 1.0, "cat")], policy).outcomes["a"]
    assert outcome.arrived == 1.0
    assert outcome.ttft == pytest.approx(2 * HOP_SECONDS + step_seconds(170, 160, 0, 0))
    assert outcome.finished - outcome.first_token == pytest.approx(step_seconds(0, 0, 1, 171))


@pytest.mark.parametrize("policy", ["kv", "oracle"])
def test_a_picture_is_asked_about_where_it_is(policy: str) -> None:
    trace = [ask("a", 0.0, "cat"), ask("b", 1.0, "dog"), ask("c", 2.0, "cat")]
    outcomes = replay(trace, policy).outcomes
    assert outcomes["c"].worker == outcomes["a"].worker
    assert outcomes["c"].cached_tokens == 160
    assert outcomes["c"].ttft == pytest.approx(2 * HOP_SECONDS + step_seconds(10, 0, 0, 0))


def test_in_turns_it_goes_to_the_other_one() -> None:
    outcomes = replay([ask("a", 0.0, "cat"), ask("c", 1.0, "cat")], "round-robin").outcomes
    assert outcomes["c"].worker != outcomes["a"].worker
    assert outcomes["c"].cached_tokens == 0


def test_one_that_comes_while_others_are_answered_joins_them_at_the_next_step() -> None:
    first = TraceRequest(
        id="a", at=0.0, answer_tokens=50, prompt=[Part(text="a", tokens=100)]
    )
    outcomes = replay([first, ask("b", 0.1, "cat")], "kv", workers=1).outcomes
    alone = step_seconds(170, 160, 1, 100)
    wait = outcomes["b"].ttft - 2 * HOP_SECONDS - alone
    assert 0 <= wait < step_seconds(0, 0, 1, 150) + 1e-4


def test_a_turn_comes_after_the_answer_before_it() -> None:
    first = ask("a", 0.0, "cat")
    second = TraceRequest(
        id="b", after="a", delay=3.0, answer_tokens=2,
        prompt=[*first.prompt, Part(answer="a", tokens=2), Part(text="more", tokens=20)],
    )
    outcomes = replay([first, second], "kv").outcomes
    assert outcomes["b"].arrived == pytest.approx(outcomes["a"].finished + 3.0)
    assert outcomes["b"].cached_tokens == 160


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_replay_answers_everything_and_repeats_itself(policy: str, workload: str) -> None:
    trace = prepare(WORKLOADS[workload](2, 1), BLOCK)
    first, second = (Simulation(trace, policy, 2, seed=3).run() for _ in range(2))
    assert first.outcomes == second.outcomes
    assert len(first.outcomes) == len(trace)
    for outcome in first.outcomes.values():
        assert outcome.arrived < outcome.first_token < outcome.finished + 1e-9
        assert 0 <= outcome.cached_tokens < outcome.prompt_tokens


def test_nothing_is_left_charged_when_all_is_answered() -> None:
    simulation = Simulation(prepare(WORKLOADS["bursts"](4, 1), BLOCK), "kv", 4)
    simulation.run()
    policy = simulation._policy
    assert isinstance(policy, RouterPolicy)
    assert len(policy.router.load) == 0
    for worker in simulation._workers.values():
        assert policy.router.index.resident(worker.name) == set(worker.engine.pool._cached)


def test_no_router_hits_more_than_one_boundless_cache() -> None:
    trace = prepare(WORKLOADS["photos"](2, 1), BLOCK)
    run = Simulation(trace, "kv", 2).run()
    counted = list(run.outcomes.values())[len(trace) // 5 :]
    hits = sum(outcome.cached_tokens for outcome in counted)
    ratio = hits / sum(outcome.prompt_tokens for outcome in counted)
    assert 0.3 < ratio <= boundless_hit_ratio(trace, run)

"""Answers that are awaited whole cost few messages, and lose no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from tests.fakes import FakeWorker, make_request, within
from tests.workers.lines import Line
from transfer.messages import AbortRequests, Outputs, Released
from transfer.payload import decode_outputs
from workers import held_tokens
from workers.held_tokens import HeldTokens, hold, is_awaited_whole, let_go, may_be_held

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_tokens, "MOST_SECONDS", 3600.0)


@pytest.fixture
def worker(worker: FakeWorker) -> FakeWorker:
    worker.engine.stalled = True
    return worker


@pytest.fixture
async def line(line: Line) -> Line:
    await line.greet()
    return line


def request(request_id: str = "r", **params: Any) -> EngineCoreRequest:
    made = make_request(request_id)
    params.setdefault("output_kind", RequestOutputKind.FINAL_ONLY)
    made.sampling_params = SamplingParams(max_tokens=100, **params)
    return made


async def running(worker: FakeWorker, line: Line, *request_ids: str) -> None:
    for request_id in request_ids:
        line.add(request(request_id))
        await within(worker.engine.added.get())


def test_what_streams_or_stops_at_a_text_is_looked_at() -> None:
    assert is_awaited_whole(request())
    assert not is_awaited_whole(request(output_kind=RequestOutputKind.DELTA))
    assert not is_awaited_whole(request(output_kind=RequestOutputKind.CUMULATIVE))
    assert not is_awaited_whole(request(stop=["."]))
    parts = request()
    parts.resumable = True
    assert not is_awaited_whole(parts)
    parts.sampling_params = None
    assert not is_awaited_whole(parts)


async def test_the_first_goes_at_once_and_the_rest_with_the_end(
    worker: FakeWorker, line: Line
) -> None:
    await running(worker, line, "r")
    worker.engine.say("r", 1)
    assert (await line.hear_output()).new_token_ids == [1]
    for token in (2, 3, 4):
        worker.engine.say("r", token)
    worker.engine.say("r", 5, finished=True)
    last = await line.hear_output()
    assert (last.new_token_ids, last.finished) == ([2, 3, 4, 5], True)
    frontend = worker.frontends.get(line.name)
    assert frontend is not None and not frontend.held


async def test_others_in_the_batch_are_not_kept_waiting(
    worker: FakeWorker, line: Line
) -> None:
    await running(worker, line, "whole")
    line.add(request("streamed", output_kind=RequestOutputKind.DELTA))
    await within(worker.engine.added.get())
    for token in (1, 2):
        worker.engine.put(EngineCoreOutputs(outputs=[
            EngineCoreOutput("whole", [token]), EngineCoreOutput("streamed", [10 + token]),
        ]))
    _, payload = await line.hear(Outputs)
    first = [(o.request_id, o.new_token_ids) for o in decode_outputs(payload).outputs]
    assert first == [("whole", [1]), ("streamed", [11])]
    assert (await line.hear_output()).new_token_ids == [12]


def test_tokens_are_held_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_tokens, "MOST_SECONDS", 1.0)
    held = HeldTokens()
    seen = ((5.0, [1]), (5.9, None), (6.0, [2, 3]), (6.9, None), (7.1, [4, 5]))
    for token, (now, expected) in enumerate(seen, 1):
        output = EngineCoreOutput("r", [token])
        if hold(held, output, now):
            assert expected is None
        else:
            let_go(held, output, now)
            assert output.new_token_ids == expected


def _logprobs() -> LogprobsLists:
    return LogprobsLists(np.array([[1]]), np.array([[0.5]]), np.array([0]))


@pytest.mark.parametrize(
    "news", [{"new_logprobs": _logprobs()}, {"stop_reason": 3}, {"num_nans_in_logits": 1}]
)
def test_what_says_more_than_tokens_goes_at_once(news: dict[str, Any]) -> None:
    held = HeldTokens(0.0)
    assert hold(held, EngineCoreOutput("r", [1]), 0.0)
    output = EngineCoreOutput("r", [2], **news)
    assert not hold(held, output, 0.0)
    let_go(held, output, 0.0)
    assert output.new_token_ids == [1, 2]


def test_statistics_that_are_summed_up_are_not_dropped() -> None:
    assert may_be_held(None)
    assert may_be_held(SchedulerStats(num_running_reqs=3, kv_cache_usage=0.5, step_counter=7))
    assert may_be_held(SchedulerStats(connector_prefix_cache_stats=PrefixCacheStats()))
    assert not may_be_held(SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1)))
    assert not may_be_held(SchedulerStats(kv_connector_stats={"bytes": 1}))
    gauges = held_tokens.GAUGES
    assert gauges <= set(vars(SchedulerStats())), "vLLM has renamed a statistic"


async def test_such_a_step_takes_along_what_was_held(worker: FakeWorker, line: Line) -> None:
    await running(worker, line, "r")
    worker.engine.say("r", 1)
    worker.engine.say("r", 2)
    stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1, queries=9))
    worker.engine.put(
        EngineCoreOutputs(outputs=[EngineCoreOutput("r", [3])], scheduler_stats=stats)
    )
    assert (await line.hear_output()).new_token_ids == [1]
    _, payload = await line.hear(Outputs)
    outputs = decode_outputs(payload)
    assert outputs.outputs[0].new_token_ids == [2, 3]
    assert outputs.scheduler_stats == stats


async def test_tokens_keep_the_version_of_the_weights_that_made_them(
    worker: FakeWorker, line: Line
) -> None:
    await running(worker, line, "r")
    for token, version in ((1, "old"), (2, "old"), (3, "new"), (4, "new")):
        worker.engine.put(EngineCoreOutputs(
            outputs=[EngineCoreOutput("r", [token])], weight_version=version
        ))
    worker.engine.put(EngineCoreOutputs(outputs=[], weight_version="newer"))
    heard = []
    for _ in range(3):
        _, payload = await line.hear(Outputs)
        outputs = decode_outputs(payload)
        heard.append((outputs.weight_version, outputs.outputs[0].new_token_ids))
    assert heard == [("old", [1]), ("old", [2]), ("new", [3, 4])]


async def test_what_was_held_ends_with_its_request(worker: FakeWorker, line: Line) -> None:
    await running(worker, line, "r", "s")
    frontend = worker.frontends.get(line.name)
    assert frontend is not None and set(frontend.held) == {"r", "s"}
    worker.engine.say("r", 1)
    await line.hear_output()
    worker.engine.say("r", 2)
    line.say(AbortRequests(["r"]))
    await line.hear(Released)
    assert set(frontend.held) == {"s"}
    worker.frontends.disconnect(line.name)
    assert not frontend.held

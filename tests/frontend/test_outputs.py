"""Many workers' outputs as one engine's."""

from __future__ import annotations

import asyncio

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from frontend.outputs import OutputStream
from tests.fakes import within

pytestmark = pytest.mark.anyio


def outputs_of(request_id: str, **fields: object) -> EngineCoreOutputs:
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [1])])
    for name, value in fields.items():
        setattr(outputs, name, value)
    return outputs


async def test_outputs_come_out_in_the_order_they_came_in() -> None:
    stream = OutputStream()
    for number in range(5):
        stream.put(f"worker-{number % 2}", outputs_of(str(number)))
    seen = [(await within(stream.get())).outputs[0].request_id for _ in range(5)]
    assert seen == ["0", "1", "2", "3", "4"]


async def test_all_outputs_bear_the_index_of_one_engine() -> None:
    stream = OutputStream()
    stream.put("worker-1", outputs_of("r", engine_index=7))
    assert (await within(stream.get())).engine_index == 0


async def test_statistics_are_of_the_fleet() -> None:
    stream = OutputStream()
    one = SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.2)
    two = SchedulerStats(num_running_reqs=3, num_skipped_waiting_reqs=4, kv_cache_usage=0.6)
    stream.put("worker-1", outputs_of("r", scheduler_stats=one))
    stream.put("worker-2", outputs_of("r", scheduler_stats=two))
    stream.put("worker-1", outputs_of("r"))
    first, second, third = [(await within(stream.get())).scheduler_stats for _ in range(3)]
    assert first == one
    assert second is not None and third is None
    assert second.num_running_reqs == 5
    assert second.num_waiting_reqs == 1
    assert second.num_skipped_waiting_reqs == 4
    assert second.kv_cache_usage == pytest.approx(0.4)


async def test_a_workers_latest_statistics_replace_its_earlier_ones() -> None:
    stream = OutputStream()
    for running in (5, 1):
        stats = SchedulerStats(num_running_reqs=running)
        stream.put("worker-1", outputs_of("r", scheduler_stats=stats))
    await within(stream.get())
    latest = (await within(stream.get())).scheduler_stats
    assert latest is not None and latest.num_running_reqs == 1


async def test_a_lost_workers_statistics_count_no_more() -> None:
    stream = OutputStream()
    stats = SchedulerStats(num_running_reqs=5)
    stream.put("lost", outputs_of("r", scheduler_stats=stats))
    stream.drop_worker("lost")
    stream.drop_worker("never there")
    stats = SchedulerStats(num_running_reqs=1)
    stream.put("left", outputs_of("r", scheduler_stats=stats))
    await within(stream.get())
    now = (await within(stream.get())).scheduler_stats
    assert now is not None and now.num_running_reqs == 1


async def test_a_failed_request_ends_in_an_error() -> None:
    stream = OutputStream()
    stream.fail("a", RuntimeError("its worker is gone"))
    (output,) = (await within(stream.get())).outputs
    assert (output.request_id, output.new_token_ids) == ("a", [])
    assert output.finish_reason is FinishReason.ERROR


async def test_the_reason_of_a_failure_is_told_behind_what_came_before_it() -> None:
    stream = OutputStream()
    told: list[tuple[str, str]] = []
    stream.end_request = lambda request_id, error: told.append((request_id, str(error)))
    stream.put("worker", outputs_of("a"))
    stream.fail("a", RuntimeError("its worker is gone"))
    stream.put("worker", outputs_of("b"))
    assert (await within(stream.get())).outputs[0].request_id == "a"
    assert not told
    assert (await within(stream.get())).outputs[0].request_id == "b"
    assert told == [("a", "its worker is gone")]


async def test_closing_ends_the_wait_with_the_error_given() -> None:
    stream = OutputStream()
    waiting = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    stream.close(RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        await within(waiting)


async def test_what_came_before_the_close_is_still_read() -> None:
    stream = OutputStream()
    stream.put("worker-1", outputs_of("r"))
    stream.close(RuntimeError("over"))
    assert (await within(stream.get())).outputs[0].request_id == "r"
    with pytest.raises(RuntimeError, match="over"):
        await within(stream.get())

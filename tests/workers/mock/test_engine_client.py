from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from tests.fakes import BLOCK_SIZE, make_request, within
from workers.mock.block_pool import BlockEvent
from workers.mock.engine import EngineLimits, MockEngine
from workers.mock.engine_client import MockEngineClient
from workers.mock.requests import RequestReader

pytestmark = pytest.mark.anyio


class Running:
    """A mock engine client at work, much faster than it says, and what it says."""

    def __init__(self, speed: float = 1000.0) -> None:
        self.engine = MockEngine(EngineLimits(50, BLOCK_SIZE, 8, 64, 64))
        reader = RequestReader(BLOCK_SIZE, "sha256_cbor", 1000)
        self.client = MockEngineClient(self.engine, reader, speed)
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.events: list[BlockEvent] = []

    async def hear(self, count: int) -> list[EngineCoreOutput]:
        heard: list[EngineCoreOutput] = []
        while len(heard) < count:
            heard += (await within(self.outputs.get())).outputs
        return heard


@asynccontextmanager
async def running(speed: float = 1000.0) -> AsyncIterator[Running]:
    it = Running(speed)
    task = asyncio.create_task(it.client.run(it.outputs.put_nowait, it.events.extend))
    try:
        yield it
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_request_is_answered_token_by_token() -> None:
    async with running() as it:
        it.client.add_request(make_request("r", max_tokens=3))
        first, second, third = await it.hear(3)
        assert [len(o.new_token_ids) for o in (first, second, third)] == [1, 1, 1]
        assert (first.finish_reason, third.finish_reason) == (None, FinishReason.LENGTH)
        assert first.prefill_stats is not None
        assert first.prefill_stats.num_cached_tokens == 0
        assert [event.stored for event in it.events] == [True]


async def test_the_same_prompt_is_answered_alike_and_found_in_the_cache() -> None:
    async with running() as it:
        answers = []
        for name in ("r", "s"):
            it.client.add_request(make_request(name, max_tokens=3))
            outputs = await it.hear(3)
            answers.append([token for o in outputs for token in o.new_token_ids])
        assert answers[0] == answers[1]
        stats = outputs[0].prefill_stats
        assert stats is not None
        assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (40, 32)


async def test_what_cannot_be_computed_ends_with_an_error() -> None:
    async with running() as it:
        it.client.add_request(make_request("r", tokens=range(2000)))
        (output,) = await it.hear(1)
        assert (output.request_id, output.finish_reason) == ("r", FinishReason.ERROR)


async def test_an_aborted_request_is_heard_of_no_more() -> None:
    async with running(speed=10.0) as it:
        it.client.add_request(make_request("r", max_tokens=500))
        await it.hear(1)
        it.client.abort(["r", "unknown"])
        assert await within(it.client.collective_rpc_async("synchronize_device")) == [None]
        it.client.add_request(make_request("s", max_tokens=1))
        while (heard := await it.hear(1))[0].request_id == "r":
            assert heard[0].finish_reason is None  # said before the abort
        assert heard[0].request_id == "s"
        assert it.engine.idle


async def test_a_model_runner_is_asked_between_steps() -> None:
    async with running(speed=1.0) as it:
        it.client.add_request(make_request("r", max_tokens=1))
        while not it.engine.in_step:
            await asyncio.sleep(0)
        await within(it.client.collective_rpc_async("synchronize_device"))
        assert not it.engine.in_step
        assert await it.client.collective_rpc_async("attach_arena", args=("a", b"n")) == [""]
        with pytest.raises(ValueError):
            await it.client.collective_rpc_async("save_model")


async def test_caches_are_reset_unless_they_are_in_use() -> None:
    async with running(speed=10.0) as it:
        it.client.add_request(make_request("r", max_tokens=500))
        await it.hear(1)
        assert await within(it.client.call_utility_async("reset_prefix_cache")) is False
        it.client.abort(["r"])
        assert await within(it.client.call_utility_async("reset_prefix_cache", False)) is True
        assert await within(it.client.call_utility_async("reset_encoder_cache")) is None


async def test_it_says_what_it_cannot_do() -> None:
    async with running() as it:
        assert await it.client.call_utility_async("is_sleeping") is False
        with pytest.raises(ValueError, match="mock engine cannot sleep"):
            await it.client.call_utility_async("sleep", 1)


async def test_its_load_is_stated_with_its_outputs() -> None:
    async with running(speed=100.0) as it:
        it.client.add_request(make_request("r", max_tokens=5))
        stats = (await within(it.outputs.get())).scheduler_stats
        assert stats is not None
        assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 0)
        assert stats.kv_cache_usage == pytest.approx(3 / 50)

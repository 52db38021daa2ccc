"""A worker that is told to leave finishes what it has."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import eventually, make_request, within
from tests.frontend.fleets import Fleet
from transfer.registry import Registry
from workers.draining import drain

pytestmark = pytest.mark.anyio


async def test_what_has_begun_is_finished_and_nothing_new_comes(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        leaving = await fleet.start("leaving")
        leaving.engine.stalled = True
        await fleet.client.add_request_async(make_request("old"))
        await within(leaving.engine.added.get())
        staying = await fleet.start("staying")
        parts = [(leaving.inbox, leaving.frontends)]
        draining = asyncio.ensure_future(drain(parts, 60.0, asyncio.Event(), []))
        await fleet.until_gone("leaving")
        for number in range(4):
            await fleet.client.add_request_async(make_request(f"new-{number}"))
            await fleet.answer(f"new-{number}")
        assert len(staying.engine.pixels) == 4
        assert not draining.done()
        leaving.engine.say("old", 3, finished=True)
        assert (await fleet.answer("old"))[-1].new_token_ids == [3]
        assert await within(draining) == set()
        await leaving.leave()
        await eventually(fleet.at_rest)
        assert fleet.count("requests_moved") == 0


async def test_what_is_not_done_in_time_goes_on_elsewhere(registry: Registry) -> None:
    async with Fleet(registry, migration_limit=0) as fleet:
        leaving = await fleet.start("leaving")
        leaving.engine.stalled = True
        await fleet.client.add_request_async(make_request("r", tokens=[5, 6], max_tokens=4))
        await within(leaving.engine.added.get())
        leaving.engine.say("r", 7)
        assert (await within(fleet.client.get_output_async())).outputs
        await fleet.start("staying")
        parts = [(leaving.inbox, leaving.frontends)]
        await within(drain(parts, 0.05, asyncio.Event(), []))
        await leaving.leave()
        # It had said that it would leave: that is no loss that counts against a limit.
        answer = await fleet.answer("r")
        assert [token for output in answer for token in output.new_token_ids] == [5, 6, 7]
        await eventually(fleet.at_rest)


async def test_a_request_that_is_aborted_is_not_waited_for(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        parts = [(worker.inbox, worker.frontends)]
        draining = asyncio.ensure_future(drain(parts, 60.0, asyncio.Event(), []))
        await fleet.until_gone("worker-1")
        # It can still be reached by those whose requests it has.
        await fleet.client.abort_requests_async(["r"])
        await within(draining)
        await eventually(fleet.at_rest)


async def test_a_second_signal_ends_it(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        hurry = asyncio.Event()
        parts = [(worker.inbox, worker.frontends)]
        draining = asyncio.ensure_future(drain(parts, 60.0, hurry, []))
        await fleet.until_gone("worker-1")
        hurry.set()
        await within(draining)


async def test_the_end_of_the_engine_ends_it(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        engine = asyncio.ensure_future(asyncio.Event().wait())
        parts = [(worker.inbox, worker.frontends)]
        draining = asyncio.ensure_future(drain(parts, 60.0, asyncio.Event(), [engine]))
        await fleet.until_gone("worker-1")
        engine.cancel()
        assert await within(draining) == {engine}


async def test_a_frontend_that_comes_meanwhile_is_refused(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        worker.inbox.begin_draining(60.0)
        async with Fleet(registry, frontend="late") as late:
            await eventually(lambda: [w.refused for w in late.pool.workers if w.refused])
            assert "about to leave" in late.pool.workers[0].refused


async def test_without_another_worker_new_requests_wait(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        worker.inbox.begin_draining(60.0)
        await fleet.until_gone("worker-1")
        adding = asyncio.ensure_future(fleet.client.add_request_async(make_request("r")))
        await asyncio.sleep(0)
        assert not adding.done()
        await fleet.start("next")
        await within(adding)
        assert len(await fleet.answer("r")) == 3


async def test_input_that_streams_in_is_followed_to_the_end(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        leaving = await fleet.start("leaving")
        leaving.engine.stalled = True

        async def add_part() -> None:
            part = make_request("r")
            part.resumable = True
            await fleet.client.add_request_async(part)
            await within(leaving.engine.added.get())

        await add_part()
        await fleet.start("staying")
        leaving.inbox.begin_draining(60.0)
        await fleet.until_gone("leaving")
        await add_part()
        leaving.engine.say("r", 1, finished=True)
        await fleet.answer("r")
        await eventually(fleet.at_rest)

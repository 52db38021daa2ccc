"""Requests through a frontend to workers and back, whatever happens on the way."""

from __future__ import annotations

import asyncio
import secrets
import threading
from http import HTTPStatus

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from frontend.receipt import Receipt, current_receipt
from frontend.router.block_hashes import RequestHasher
from frontend.sent_request import NoWorkers
from tests.fakes import (
    PATIENCE,
    eventually,
    make_facts,
    make_item,
    make_request,
    within,
)
from tests.frontend.fleets import Fleet, tokens_of
from transfer.arena_layout import SHM
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


async def test_tokens_come_back_and_nothing_is_left(fleet: Fleet) -> None:
    await fleet.start()
    await fleet.client.add_request_async(make_request("r", tokens=[7, 8, 9, 10], max_tokens=3))
    answer = await fleet.answer("r")
    assert tokens_of(answer) == [7, 8, 9]
    assert answer[-1].finish_reason is FinishReason.LENGTH
    await eventually(fleet.at_rest)


async def test_the_first_workers_facts_are_learned_once(fleet: Fleet) -> None:
    first = await fleet.start("worker-1")
    await fleet.start("worker-2")
    assert fleet.learned == [first.facts]


async def test_the_engine_reads_the_tensors_where_the_frontend_wrote_them(
    fleet: Fleet,
) -> None:
    worker = await fleet.start()
    pixels = torch.rand(40, 50)
    request = make_request("r", items=[make_item(pixels), make_item(2.0)])
    await fleet.client.add_request_async(request)
    await fleet.answer("r")
    seen = worker.engine.pixels["r"]
    assert torch.equal(seen[0], pixels)
    assert torch.equal(seen[1], torch.full((8, 100), 2.0))
    received = await within(worker.engine.added.get())
    assert received.mm_features is not None
    assert all(f.data["pixel_values"].data is None for f in received.mm_features if f.data)
    assert fleet.pool.ready_workers()["worker-1"].transfer == "shm"


async def test_without_shared_memory_the_tensors_travel(registry: Registry) -> None:
    async with Fleet(registry, transfer="inline") as fleet:
        worker = await fleet.start()
        pixels = torch.rand(40, 50)
        await fleet.client.add_request_async(make_request("r", items=[make_item(pixels)]))
        await fleet.answer("r")
        assert torch.equal(worker.engine.pixels["r"][0], pixels)
        assert fleet.pool.ready_workers()["worker-1"].transfer == "inline"


async def test_a_worker_that_does_not_see_the_segment_is_sent_tensors(
    fleet: Fleet,
) -> None:
    # As in another container: the name is not there.
    (SHM / fleet.arena.id.name).unlink()
    worker = await fleet.start()
    pixels = torch.rand(40, 50)
    await fleet.client.add_request_async(make_request("r", items=[make_item(pixels)]))
    await fleet.answer("r")
    assert torch.equal(worker.engine.pixels["r"][0], pixels)
    described = fleet.client.describe()["workers"][0]
    assert described["transfer"] == "inline"
    assert "does not see the segment" in described["transfer_reason"]


async def test_an_item_without_room_travels_with_its_request(registry: Registry) -> None:
    async with Fleet(registry, arena_bytes=4096) as fleet:
        worker = await fleet.start()
        pixels = torch.rand(100, 100)
        await fleet.client.add_request_async(make_request("r", items=[make_item(pixels)]))
        await fleet.answer("r")
        assert torch.equal(worker.engine.pixels["r"][0], pixels)
        assert fleet.cache.inlined == 1


async def test_missing_tensors_are_sent_after_all(fleet: Fleet) -> None:
    worker = await fleet.start()
    # The worker has lost its view since it said that it sees the segment.
    view = worker.frontends.get("frontend-1")
    assert view is not None and view.view is not None
    view.view.close()
    pixels = torch.rand(40, 50)
    await fleet.client.add_request_async(make_request("r", items=[make_item(pixels)]))
    assert tokens_of(await fleet.answer("r")) == [0, 1, 2]
    assert torch.equal(worker.engine.pixels["r"][0], pixels)
    assert fleet.count("tensors_missing") == 1
    await eventually(fleet.at_rest)


async def test_the_children_of_one_request_go_to_one_worker(fleet: Fleet) -> None:
    workers = [await fleet.start(f"worker-{i}") for i in range(3)]
    for parent in ("a", "b", "c"):
        for child in range(4):
            await fleet.client.add_request_async(make_request(f"{child}_{parent}"))
    for parent in ("a", "b", "c"):
        await eventually(
            lambda parent=parent: (
                4 in [sum(r.endswith(f"_{parent}") for r in w.engine.pixels) for w in workers]
            )
        )
    answers = [await within(fleet.client.get_output_async()) for _ in range(36)]
    assert len({o.request_id for a in answers for o in a.outputs}) == 12
    await eventually(fleet.at_rest)


async def test_the_children_of_one_request_move_together(fleet: Fleet) -> None:
    workers = {}
    for i in range(4):
        workers[f"worker-{i}"] = await fleet.start(f"worker-{i}")
        workers[f"worker-{i}"].engine.stalled = True
    for child in range(4):
        await fleet.client.add_request_async(make_request(f"{child}_a"))
    first = fleet.client.requests._families["a"]
    await eventually(lambda: len(workers[first].engine.pixels) == 4)
    await workers[first].leave()
    await fleet.until_gone(first)
    second = fleet.client.requests._families["a"]
    assert second != first
    await eventually(lambda: len(workers[second].engine.pixels) == 4)


async def test_a_worker_that_holds_the_prompt_gets_it(fleet: Fleet) -> None:
    facts = make_facts()
    hasher = RequestHasher(facts.block_size, facts.hash_algorithm, facts.root_hash)
    await fleet.start("worker-1")
    holder = await fleet.start("worker-2")
    blocks = hasher.hash(make_request("x", tokens=range(100)))
    index = fleet.client.router.index

    def heard() -> bool:
        # A subscription takes effect without a word; the next delta shows what was missed.
        holder.hold([secrets.token_bytes(32)])
        return fleet.client.router.plane.seq("worker-2") > 0

    await eventually(heard)
    holder.hold(blocks.digests)
    await eventually(lambda: index.overlap(blocks.digests)["worker-2"] == 6)
    for number in range(3):
        receipt = Receipt()
        token = current_receipt.set(receipt)
        await fleet.client.add_request_async(make_request(f"r{number}", tokens=range(100)))
        current_receipt.reset(token)
        await fleet.answer(f"r{number}")
        (routed,) = receipt.routed
        assert (routed.worker, routed.overlap_blocks) == ("worker-2", 6)
        assert (routed.prompt_blocks, routed.transfer) == (6, "none")


async def test_without_a_worker_requests_are_answered_503_after_a_while(
    registry: Registry,
) -> None:
    async with Fleet(registry, wait=0.05) as fleet:
        with pytest.raises(NoWorkers) as caught:
            await within(fleet.client.add_request_async(make_request()))
        assert caught.value.http_status == HTTPStatus.SERVICE_UNAVAILABLE
        await eventually(fleet.at_rest)


async def test_a_request_waits_for_the_first_worker(fleet: Fleet) -> None:
    adding = asyncio.ensure_future(fleet.client.add_request_async(make_request("r")))
    await fleet.start()
    await within(adding)
    assert tokens_of(await fleet.answer("r")) == [0, 1, 2]


@pytest.mark.parametrize("comes", [True, False])
async def test_what_is_aborted_while_it_waits_for_the_first_worker_is_not_sent(
    registry: Registry, comes: bool
) -> None:
    async with Fleet(registry, wait=PATIENCE if comes else 0.05) as fleet:
        adding = asyncio.ensure_future(fleet.client.add_request_async(make_request("r")))
        await asyncio.sleep(0)  # it waits now
        await fleet.client.abort_requests_async(["r"])
        if not comes:
            await within(adding)  # whom would it help to hear of that?
            return
        worker = await fleet.start()
        await within(adding)
        assert worker.engine.added.empty()
        await eventually(fleet.at_rest)


async def test_input_that_streams_in_goes_to_one_worker_and_stays_in_place(
    fleet: Fleet,
) -> None:
    workers = [await fleet.start(f"worker-{i}") for i in range(2)]
    for worker in workers:
        worker.engine.stalled = True
    for number in range(3):
        request = make_request("r", items=[make_item(float(number))])
        request.resumable = True
        await fleet.client.add_request_async(request)
        del request
    await eventually(lambda: 3 in [w.engine.added.qsize() for w in workers])
    assert fleet.arena.stats().leased_entries == 3
    (busy,) = [w for w in workers if w.engine.pixels]
    busy.engine.say("r", 1, finished=True)
    await fleet.answer("r")
    await eventually(fleet.at_rest)


async def test_statistics_alone_are_passed_on(fleet: Fleet) -> None:
    worker = await fleet.start()
    await fleet.hold_request(worker)
    output = EngineCoreOutput("r", [1])
    stats = SchedulerStats(num_running_reqs=4)
    worker.engine.put(EngineCoreOutputs(outputs=[output], scheduler_stats=stats))
    outputs = await within(fleet.client.get_output_async())
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.num_running_reqs == 4


async def test_shutdown_from_another_thread_ends_the_stream_of_outputs(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start()
        waiting = asyncio.ensure_future(fleet.client.get_output_async())
        thread = threading.Thread(target=fleet.client.shutdown)
        thread.start()
        with pytest.raises(EngineDeadError):
            await within(waiting)
        thread.join()
        fleet.client.shutdown()
        assert fleet.client.resources.engine_dead


async def test_a_worker_is_told_when_the_frontend_leaves(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        fleet.client.shutdown()
        await within(fleet.client.closed())
        assert await within(worker.engine.aborted.get()) == ["r"]
        assert worker.frontends.names() == []


async def test_a_hundred_requests_at_once_spread_and_all_come_back(fleet: Fleet) -> None:
    workers = [await fleet.start(f"worker-{i}") for i in range(2)]
    for number in range(100):
        await fleet.client.add_request_async(
            make_request(f"r{number}", tokens=range(number, number + 40), max_tokens=1)
        )
    finished: set[str] = set()
    while len(finished) < 100:
        outputs = await within(fleet.client.get_output_async())
        finished |= {o.request_id for o in outputs.outputs if o.finished}
    assert [len(w.engine.pixels) for w in workers] == [50, 50]
    await eventually(fleet.at_rest)

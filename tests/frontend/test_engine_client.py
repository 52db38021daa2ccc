"""Requests through a frontend to workers and back, whatever happens on the way."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from frontend.receipt import Receipt, current_receipt
from frontend.router.block_hashes import RequestHasher
from frontend.router.router import Route, Router
from frontend.sent_request import AnswerLost, NoWorkers
from tests.fakes import (
    PATIENCE,
    eventually,
    make_facts,
    make_item,
    make_request,
    within,
)
from tests.frontend.fleets import Fleet
from transfer.arena_layout import SHM
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fleet(registry: Registry) -> AsyncIterator[Fleet]:
    async with Fleet(registry) as fleet:
        yield fleet


def tokens_of(answer: list[EngineCoreOutput]) -> list[int]:
    return [token for output in answer for token in output.new_token_ids]


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


async def test_an_aborted_request_keeps_its_tensors_until_the_engine_is_past_it(
    fleet: Fleet,
) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True
    worker.engine.step_over.clear()
    request = make_request("r", items=[make_item(1.0)])
    await fleet.client.add_request_async(request)
    await within(worker.engine.added.get())
    del request
    await fleet.client.abort_requests_async(["r"])
    assert await within(worker.engine.aborted.get()) == ["r"]
    assert len(fleet.client.router.load) == 0
    # A round trip through the worker proves that no release was under way.
    await fleet.client.reset_mm_cache_async()
    assert fleet.arena.stats().leased_entries == 1
    worker.engine.step_over.set()
    await eventually(fleet.at_rest)


async def test_what_an_engine_says_of_an_aborted_request_is_kept_back(fleet: Fleet) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True
    worker.engine.step_over.clear()
    for name in ("r", "other"):
        await fleet.client.add_request_async(make_request(name))
        await within(worker.engine.added.get())
    await fleet.client.abort_requests_async(["r"])
    worker.engine.say("r", 1, finished=True)
    worker.engine.say("other", 2, finished=True)
    (output,) = (await within(fleet.client.get_output_async())).outputs
    assert output.request_id == "other"
    worker.engine.step_over.set()
    await eventually(fleet.at_rest)


async def test_aborting_what_is_over_or_unknown_does_nothing(fleet: Fleet) -> None:
    worker = await fleet.start()
    await fleet.client.add_request_async(make_request("r"))
    await fleet.answer("r")
    await fleet.client.abort_requests_async(["r", "never"])
    assert worker.engine.aborted.empty()
    await eventually(fleet.at_rest)


async def test_outputs_of_unknown_requests_are_dropped(fleet: Fleet) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True
    await fleet.client.add_request_async(make_request("r"))
    await within(worker.engine.added.get())
    worker.engine.say("unknown", 1)
    worker.engine.say("r", 2, finished=True)
    assert tokens_of(await fleet.answer("r")) == [2]


async def test_a_request_without_a_token_moves_when_its_worker_is_lost(fleet: Fleet) -> None:
    first = await fleet.start("worker-1")
    first.engine.stalled = True
    pixels = torch.rand(40, 50)
    await fleet.client.add_request_async(make_request("r", items=[make_item(pixels)]))
    await within(first.engine.added.get())
    second = await fleet.start("worker-2")
    await first.leave()
    assert tokens_of(await fleet.answer("r")) == [0, 1, 2]
    assert torch.equal(second.engine.pixels["r"][0], pixels)
    assert fleet.count("requests_moved") == 1
    await eventually(fleet.at_rest)


async def test_a_request_with_a_token_goes_on_behind_it_when_its_worker_is_lost(
    fleet: Fleet,
) -> None:
    first = await fleet.start("worker-1")
    first.engine.stalled = True
    pixels = torch.rand(40, 50)
    await fleet.client.add_request_async(
        make_request("r", tokens=[3, 4], max_tokens=4, items=[make_item(pixels)])
    )
    await within(first.engine.added.get())
    first.engine.say("r", 5)
    assert (await within(fleet.client.get_output_async())).outputs[0].new_token_ids == [5]
    second = await fleet.start("worker-2")
    await first.leave()
    # The fake engine answers with the first tokens of its prompt.
    answer = await fleet.answer("r")
    assert tokens_of(answer) == [3, 4, 5]
    assert answer[-1].finish_reason is FinishReason.LENGTH
    sent = await within(second.engine.added.get())
    assert sent.prompt_token_ids == [3, 4, 5]
    assert torch.equal(second.engine.pixels["r"][0], pixels)
    assert fleet.count("requests_moved") == 1
    await eventually(fleet.at_rest)


async def test_what_was_said_twice_reaches_the_client_once(fleet: Fleet) -> None:
    first = await fleet.start("worker-1")
    first.engine.stalled = True
    request = make_request("r", tokens=[3, 4, 5, 6], max_tokens=4)
    request.sampling_params = SamplingParams(max_tokens=4, temperature=1.0, seed=7)
    await fleet.client.add_request_async(request)
    await within(first.engine.added.get())
    first.engine.say("r", 3)
    first.engine.say("r", 4)
    for token in (3, 4):
        (output,) = (await within(fleet.client.get_output_async())).outputs
        assert output.new_token_ids == [token]
    second = await fleet.start("worker-2")
    await first.leave()
    assert tokens_of(await fleet.answer("r")) == [5, 6]
    sent = await within(second.engine.added.get())
    assert sent.prompt_token_ids == [3, 4, 5, 6]
    await eventually(fleet.at_rest)


async def test_an_answer_that_comes_out_differently_ends_with_the_reason(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        ended: dict[str, Exception] = {}
        fleet.client._outputs.end_request = ended.__setitem__
        first = await fleet.start("worker-1")
        first.engine.stalled = True
        request = make_request("r")
        request.sampling_params = SamplingParams(max_tokens=4, temperature=1.0, seed=7)
        await fleet.client.add_request_async(request)
        await within(first.engine.added.get())
        first.engine.say("r", 99)
        await within(fleet.client.get_output_async())
        second = await fleet.start("worker-2")
        second.engine.stalled = True
        await first.leave()
        await within(second.engine.added.get())
        second.engine.say("r", 98)
        waiting = asyncio.ensure_future(fleet.client.get_output_async())
        await eventually(lambda: ended)
        assert isinstance(ended["r"], AnswerLost)
        assert "answers differently" in str(ended["r"])
        assert await within(second.engine.aborted.get()) == ["r"]
        assert fleet.count("requests_failed") == 1
        await eventually(fleet.at_rest)
        waiting.cancel()


async def test_a_request_that_cannot_go_on_ends_with_the_reason_behind_its_tokens(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        ended: dict[str, Exception] = {}
        fleet.client._outputs.end_request = ended.__setitem__
        first = await fleet.start("worker-1")
        first.engine.stalled = True
        request = make_request("r")
        request.sampling_params = SamplingParams(temperature=1.0, presence_penalty=1.0)
        await fleet.client.add_request_async(request)
        await within(first.engine.added.get())
        first.engine.say("r", 5)
        await eventually(lambda: fleet.client.requests._sent["r"].answered)
        await first.leave()
        await fleet.until_gone("worker-1")
        assert not ended
        assert tokens_of((await within(fleet.client.get_output_async())).outputs) == [5]
        waiting = asyncio.ensure_future(fleet.client.get_output_async())
        await eventually(lambda: ended)
        assert "presence or frequency penalty" in str(ended["r"])
        assert isinstance(ended["r"], AnswerLost)
        assert ended["r"].http_status == HTTPStatus.SERVICE_UNAVAILABLE
        await eventually(fleet.at_rest)
        waiting.cancel()


async def test_a_request_outlives_so_many_losses_in_the_middle_of_its_answer(
    fleet: Fleet,
) -> None:
    said = [50, 51, 52]
    for number, token in enumerate(said):
        worker = await fleet.introduce(f"worker-{number}")
        worker.engine.stalled = True
        if number == 0:
            await fleet.client.add_request_async(
                make_request("r", tokens=[1, 2, 3, 4], max_tokens=6)
            )
        await within(worker.engine.added.get())
        worker.engine.say("r", token)
        assert tokens_of((await within(fleet.client.get_output_async())).outputs) == [token]
        await worker.leave()
        await fleet.until_gone(f"worker-{number}")
    last = await fleet.start("worker-last")
    assert tokens_of(await fleet.answer("r")) == [1, 2, 3]
    assert (await within(last.engine.added.get())).prompt_token_ids == [1, 2, 3, 4, *said]
    await eventually(fleet.at_rest)


async def test_a_request_whose_only_worker_is_lost_waits_for_the_next(fleet: Fleet) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True
    await fleet.client.add_request_async(make_request("r"))
    await within(worker.engine.added.get())
    await worker.leave()
    await fleet.until_gone("worker-1")
    await fleet.start("worker-2")
    assert len(await fleet.answer("r")) == 3
    await eventually(fleet.at_rest)


async def test_a_request_whose_only_worker_is_not_replaced_ends_in_an_error(
    registry: Registry,
) -> None:
    async with Fleet(registry, wait=0.2) as fleet:
        worker = await fleet.start()
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r"))
        await within(worker.engine.added.get())
        await worker.leave()
        (end,) = await fleet.answer("r")
        assert end.finish_reason is FinishReason.ERROR
        await eventually(fleet.at_rest)


async def test_an_aborted_request_of_a_lost_worker_is_forgotten(fleet: Fleet) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True
    worker.engine.step_over.clear()
    await fleet.client.add_request_async(make_request("r", items=[make_item(1.0)]))
    await within(worker.engine.added.get())
    await fleet.client.abort_requests_async(["r"])
    await worker.leave()
    await fleet.until_gone("worker-1")
    await eventually(fleet.at_rest)


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
    worker.engine.stalled = True
    await fleet.client.add_request_async(make_request("r"))
    await within(worker.engine.added.get())
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
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r"))
        await within(worker.engine.added.get())
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


async def test_a_request_that_brings_workers_down_is_not_sent_to_all(
    registry: Registry,
) -> None:
    async with Fleet(registry, migration_limit=2) as fleet:
        for number in range(3):
            worker = await fleet.introduce(f"worker-{number}")
            worker.engine.stalled = True
            if number == 0:
                await fleet.client.add_request_async(make_request("r"))
            await within(worker.engine.added.get())
            await worker.leave()
            await fleet.until_gone(f"worker-{number}")
        (end,) = await fleet.answer("r")
        assert end.finish_reason is FinishReason.ERROR
        await eventually(fleet.at_rest)


async def test_a_request_that_waits_for_a_worker_can_be_aborted(fleet: Fleet) -> None:
    first = await fleet.start("worker-1")
    first.engine.stalled = True
    await fleet.client.add_request_async(make_request("r", items=[make_item(1.0)]))
    await within(first.engine.added.get())
    await first.leave()
    await fleet.until_gone("worker-1")
    assert fleet.in_flight == 1
    await fleet.client.abort_requests_async(["r"])
    await eventually(fleet.at_rest)
    second = await fleet.start("worker-2")
    await fleet.client.add_request_async(make_request("s"))
    await fleet.answer("s")
    assert set(second.engine.pixels) == {"s"}


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(fleet: Fleet) -> None:
    await fleet.start()
    request = make_request("r", items=[make_item(1.0)])
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {"of no kind that travels": object()}
    with pytest.raises(TypeError):
        await fleet.client.add_request_async(request)
    del request
    await eventually(fleet.at_rest)


class Stumbling(Router):
    """A router that stumbles over one request."""

    def first_token(self, request_id: str) -> None:
        if request_id == "bad":
            raise RuntimeError("stumbled")
        super().first_token(request_id)

    def route(self, request_id: str, *rest: Any) -> Route:
        if request_id == "bad":
            raise RuntimeError("stumbled")
        return super().route(request_id, *rest)


async def test_an_output_that_cannot_be_used_ends_its_request_only(fleet: Fleet) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True
    for name in ("bad", "good"):
        await fleet.client.add_request_async(make_request(name))
        await within(worker.engine.added.get())
    fleet.client.router.__class__ = Stumbling
    worker.engine.put(EngineCoreOutputs(outputs=[
        EngineCoreOutput(name, [7], finish_reason=FinishReason.LENGTH)
        for name in ("bad", "good")
    ]))
    ends = {}
    while len(ends) < 2:
        for output in (await within(fleet.client.get_output_async())).outputs:
            ends[output.request_id] = output
    assert ends["good"].new_token_ids == [7]
    assert ends["bad"].finish_reason is FinishReason.ERROR
    await eventually(fleet.at_rest)
    assert list(fleet.pool.ready_workers()) == ["worker-1"]


async def test_a_request_that_cannot_be_moved_ends_and_the_others_move(fleet: Fleet) -> None:
    first = await fleet.start()
    first.engine.stalled = True
    for name in ("bad", "good"):
        await fleet.client.add_request_async(make_request(name))
        await within(first.engine.added.get())
    await fleet.start("worker-2")
    fleet.client.router.__class__ = Stumbling
    await first.leave()
    ends = {}
    while len(ends) < 2:
        for output in (await within(fleet.client.get_output_async())).outputs:
            if output.finished:
                ends[output.request_id] = output.finish_reason
    assert ends["bad"] is FinishReason.ERROR
    assert ends["good"] is FinishReason.LENGTH
    await eventually(fleet.at_rest)

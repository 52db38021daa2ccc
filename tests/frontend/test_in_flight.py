"""What becomes of requests that are aborted, and of those whose worker is lost."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from frontend.router.router import Route, Router
from frontend.sent_request import AnswerLost
from tests.fakes import eventually, make_item, make_request, within
from tests.frontend.fleets import Fleet, tokens_of
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


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
    await fleet.hold_request(worker)
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
    await fleet.hold_request(worker)
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
        await fleet.hold_request(worker)
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

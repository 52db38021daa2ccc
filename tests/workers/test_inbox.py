"""What a worker does with what frontends say."""

from __future__ import annotations

import asyncio

import pytest
import torch
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fakes import (
    FakeWorker,
    make_item,
    make_request,
    within,
)
from tests.workers.lines import Line
from transfer.arena import Arena
from transfer.messages import (
    AbortRequests,
    AddRequest,
    AskSnapshot,
    Bye,
    KvSnapshot,
    Ping,
    Pong,
    Released,
    TensorsMissing,
)
from transfer.payload import encode_payload

pytestmark = pytest.mark.anyio


async def test_a_request_reaches_the_engine_with_its_tensors(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    pixels = torch.rand(20, 30)
    request = make_request("r", items=[make_item(pixels)], max_tokens=1)
    line.add(request)
    assert (await line.hear_output()).request_id == "r"
    assert torch.equal(worker.engine.pixels["r"][0], pixels)


async def test_replaced_bytes_are_asked_for_and_never_read(
    worker: FakeWorker, line: Line, arena: Arena
) -> None:
    await line.greet()
    request = make_request("r", items=[line.cache.store(make_item(1.0))])
    frames = [bytes(frame) for frame in encode_payload(request)]
    del request
    arena.drop_unleased()
    line.say(AddRequest("r"), frames)
    missing, _ = await line.hear(TensorsMissing)
    assert missing.request_id == "r"
    assert worker.engine.added.empty()


async def test_a_reference_into_anothers_arena_fails(worker: FakeWorker, line: Line) -> None:
    with Arena(1 << 16, populate=False) as foreign:
        async with Line(worker, "frontend-2", foreign) as other:
            await other.greet()
            await line.greet()
            request = make_request("r", items=[other.cache.store(make_item(1.0))])
            line.add(request)
            assert (await line.hear_output()).finish_reason is FinishReason.ERROR
    assert worker.engine.added.empty()


@pytest.mark.parametrize("payload", [[], [b"\xc1"], [b"\x90"]])
async def test_a_request_that_does_not_decode_fails_alone(
    worker: FakeWorker, line: Line, payload: list[bytes]
) -> None:
    await line.greet()
    line.say(AddRequest("r"), payload)
    output = await line.hear_output()
    assert (output.request_id, output.finish_reason) == ("r", FinishReason.ERROR)
    line.add(make_request("s", max_tokens=1))
    assert (await line.hear_output()).request_id == "s"


async def test_a_request_under_another_ones_id_fails(line: Line) -> None:
    await line.greet()
    line.say(AddRequest("r"), encode_payload(make_request("s")))
    assert (await line.hear_output()).finish_reason is FinishReason.ERROR


async def test_an_id_that_another_frontend_is_using_fails(
    worker: FakeWorker, line: Line
) -> None:
    worker.engine.stalled = True
    async with Line(worker, "frontend-2") as other:
        await other.greet()
        await line.greet()
        other.add(make_request("r"))
        await within(worker.engine.added.get())
        line.add(make_request("r"))
        assert (await line.hear_output()).finish_reason is FinishReason.ERROR
        worker.engine.say("r", 5)
        assert (await other.hear_output()).new_token_ids == [5]


async def test_clients_cannot_have_blocks_announced_again(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    request = make_request("r")
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {"kv_cache_report_mode": "all", "other": 1}
    line.add(request)
    received = await within(worker.engine.added.get())
    assert received.sampling_params is not None
    assert received.sampling_params.extra_args == {"other": 1}


async def test_a_ping_is_answered(line: Line) -> None:
    await line.greet()
    line.say(Ping())
    await line.hear(Pong)


async def test_who_was_not_greeted_is_told_so(worker: FakeWorker, line: Line) -> None:
    line.say(Ping())
    await line.hear(Bye)
    line.say(AddRequest("r"), encode_payload(make_request("r")))
    await line.hear(Bye)
    assert worker.engine.added.empty()
    # A goodbye is not answered with one: two strangers would go on for ever.
    line.say(Bye())
    assert (await line.greet()).worker == "worker-1"


async def test_a_snapshot_says_what_the_engine_holds(worker: FakeWorker, line: Line) -> None:
    await line.greet()
    worker.hold([b"a" * 32, b"b" * 32])
    line.say(AskSnapshot())
    snapshot, _ = await line.hear(KvSnapshot)
    assert (snapshot.epoch, snapshot.seq) == ("epoch-1", 1)
    assert sorted(snapshot.blocks["GPU"]) == [b"a" * 32, b"b" * 32]


async def test_every_frontend_is_told_goodbye(worker: FakeWorker, line: Line) -> None:
    async with Line(worker, "frontend-2") as other:
        await line.greet()
        await other.greet()
        worker.inbox.say_goodbye()
        await line.hear(Bye)
        await other.hear(Bye)


async def test_messages_that_are_not_for_workers_are_ignored(line: Line) -> None:
    await line.greet()
    line.say(Released(["r"]))
    line.say(Ping())
    await line.hear(Pong)


async def test_an_abort_is_passed_on_and_confirmed(worker: FakeWorker, line: Line) -> None:
    await line.greet()
    worker.engine.stalled = True
    line.add(make_request("r"))
    line.say(AbortRequests(["r"]))
    released, _ = await line.hear(Released)
    assert released.request_ids == ["r"]


async def test_the_end_of_the_engine_ends_the_inbox(worker: FakeWorker, line: Line) -> None:
    await line.greet()

    def dead(frames: object) -> None:
        raise EngineDeadError()

    worker.engine.add = dead  # type: ignore[method-assign]
    line.add(make_request("r"))
    inbox = next(t for t in worker._tasks if "Inbox.run" in repr(t))
    with pytest.raises(EngineDeadError):
        await within(asyncio.shield(inbox))

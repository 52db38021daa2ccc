"""What a worker does with what frontends say."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from tests.fakes import (
    FakeWorker,
    eventually,
    handles_on,
    make_facts,
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
    Call,
    CallResult,
    KvSnapshot,
    Ping,
    Pong,
    Refused,
    Released,
    TensorsMissing,
    decode_payload_as,
    encode_payload,
)
from transfer.registry import Registry
from transfer.tensor_ref import ArenaId
from workers.frontends import SILENT_SECONDS

pytestmark = pytest.mark.anyio


async def test_a_greeting_is_answered_with_who_this_is(worker: FakeWorker, line: Line) -> None:
    ready = await line.greet()
    assert (ready.worker, ready.facts, ready.epoch) == ("worker-1", worker.facts, "epoch-1")
    assert ready.kv_address == worker.kv_publisher.address
    assert (ready.transfer, ready.transfer_reason) == ("shm", "the worker sees the segment")


async def test_a_repeated_greeting_is_answered_again_and_maps_nothing_twice(
    worker: FakeWorker, line: Line, arena: Arena
) -> None:
    await line.greet()
    before = handles_on(arena)
    for _ in range(3):
        assert (await line.greet()).transfer == "shm"
    assert handles_on(arena) == before
    assert worker.frontends.names() == ["frontend-1"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transfer": "inline"}, "asked for"),
        ({"arena": None}, "has no arena"),
        ({"arena": ArenaId("foveal-1-2-ab", b"n" * 16)}, "does not see the segment"),
        ({"arena": ArenaId("../../etc/passwd", b"n" * 16)}, "does not see the segment"),
    ],
)
async def test_tensors_go_inline_where_the_segment_is_not_shared(
    line: Line, changes: dict[str, object], reason: str
) -> None:
    ready = await line.greet(**changes)
    assert ready.transfer == "inline"
    assert reason in ready.transfer_reason


async def test_a_segment_of_another_host_with_the_same_name_is_told_apart(
    line: Line, arena: Arena
) -> None:
    ready = await line.greet(arena=ArenaId(arena.id.name, b"other host's...."))
    assert ready.transfer == "inline"
    assert "another arena of the same name" in ready.transfer_reason


async def test_a_segment_that_the_engine_cannot_map_is_not_used(
    worker: FakeWorker, line: Line
) -> None:
    worker.engine.reader.attach_arena = lambda *_: "no"  # type: ignore[method-assign]
    ready = await line.greet()
    assert ready.transfer == "inline"
    assert ready.transfer_reason.startswith("the engine cannot map the segment: no; no NIXL")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"frontend": "somebody else"}, "calls itself somebody else"),
        ({"identity_seed_fingerprint": "other"}, "another image identity seed"),
    ],
)
async def test_a_frontend_that_does_not_fit_is_refused_with_the_reason(
    worker: FakeWorker, line: Line, changes: dict[str, object], reason: str
) -> None:
    line.say(line.hello(**changes))
    refused, _ = await line.hear(Refused)
    assert refused.worker == "worker-1"
    assert reason in refused.reason
    assert worker.frontends.names() == []


async def test_the_first_frontend_decides_the_seed_where_none_is_set(
    registry: Registry,
) -> None:
    facts = make_facts(identity_seed_fingerprint="")
    async with (
        FakeWorker(registry, "worker-2", facts=facts) as worker,
        Line(worker, "frontend-1") as first,
        Line(worker, "frontend-2") as second,
    ):
        await first.greet(identity_seed_fingerprint="one")
        second.say(second.hello(identity_seed_fingerprint="two"))
        await second.hear(Refused)
        await second.greet(identity_seed_fingerprint="one")


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


async def test_a_call_is_made_and_answered(worker: FakeWorker, line: Line) -> None:
    await line.greet()
    worker.engine.answers["pin_lora"] = True
    line.say(Call(7, "pin_lora"), encode_payload([3]))
    result, payload = await line.hear(CallResult)
    assert (result.call_id, result.error) == (7, None)
    assert decode_payload_as(object, payload) is True
    assert await within(worker.engine.called.get()) == ("pin_lora", 3)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("shutdown", encode_payload([])),
        ("__init__", encode_payload([])),
        ("add_lora", encode_payload({"not": "a list"})),
        ("add_lora", [b"\xc1"]),
        ("collective_rpc", encode_payload([])),
        ("collective_rpc", encode_payload([b"pickled"])),
        ("collective_rpc", encode_payload([["reset_weights"]])),
        ("collective_rpc", encode_payload(["attach_arena", None, ["a", b"n"]])),
        ("collective_rpc", encode_payload(["synchronize_device"])),
        ("collective_rpc", encode_payload(["__init__"])),
    ],
)
async def test_a_call_that_is_not_for_frontends_is_answered_with_an_error(
    worker: FakeWorker, line: Line, method: str, arguments: list[bytes]
) -> None:
    await line.greet()
    line.say(Call(1, method), arguments)
    result, _ = await line.hear(CallResult)
    assert result.error is not None and result.error.startswith(f"{method}: ")
    assert worker.engine.called.empty()


async def test_a_result_that_cannot_be_sent_is_an_error(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    worker.engine.answers["is_sleeping"] = object()
    line.say(Call(1, "is_sleeping"), encode_payload([]))
    result, _ = await line.hear(CallResult)
    assert result.error is not None


@pytest.mark.parametrize(
    ("method", "answer", "emptied"),
    [
        ("reset_prefix_cache", True, True),
        ("reset_prefix_cache", False, False),
        ("sleep", None, True),
        ("pin_lora", True, False),
    ],
)
async def test_a_call_that_empties_the_cache_is_told_at_once(
    worker: FakeWorker, line: Line, method: str, answer: object, emptied: bool
) -> None:
    await line.greet()
    worker.hold([b"a" * 32])
    worker.engine.answers[method] = answer
    line.say(Call(1, method), encode_payload([]))
    await line.hear(CallResult)
    assert worker.kv_state.snapshot().blocks == ({} if emptied else {"GPU": [b"a" * 32]})


async def test_a_frontend_that_leaves_leaves_nothing(
    worker: FakeWorker, line: Line, arena: Arena
) -> None:
    before = handles_on(arena)
    await line.greet()
    assert handles_on(arena) > before
    worker.engine.stalled = True
    request = make_request("r", items=[make_item(1.0)])
    line.add(request)
    await within(worker.engine.added.get())
    worker.engine.pixels.clear()
    line.say(Bye())
    assert await within(worker.engine.aborted.get()) == ["r"]
    await eventually(lambda: handles_on(arena) == before)
    assert worker.frontends.names() == []
    assert worker.frontends.owner("r") is None
    assert not worker.engine.reader._arenas


async def test_a_silent_frontend_is_dropped_and_told_when_it_speaks_again(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    frontend = worker.frontends.get("frontend-1")
    assert frontend is not None
    assert worker.frontends.silent_since(time.monotonic() - SILENT_SECONDS) == []
    frontend.last_seen -= SILENT_SECONDS
    assert worker.frontends.silent_since(time.monotonic() - SILENT_SECONDS) == ["frontend-1"]
    worker.inbox._drop("frontend-1")
    line.say(Ping())
    await line.hear(Bye)
    assert (await line.greet()).transfer == "shm"


async def test_a_frontend_back_before_it_was_cleaned_up_after_keeps_its_mapping(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    worker.engine.step_over.clear()
    line.say(Bye())
    line.say(line.hello())
    # The clean-up waits for the step, and unmaps behind the new greeting if it may.
    await eventually(lambda: worker.inbox._leaving)
    worker.engine.step_over.set()
    assert (await line.greet()).transfer == "shm"
    await eventually(lambda: not worker.inbox._leaving)
    pixels = torch.rand(20, 30)
    request = make_request("r", items=[make_item(pixels)], max_tokens=1)
    line.add(request)
    await within(worker.engine.added.get())
    assert torch.equal(worker.engine.pixels["r"][0], pixels)


async def test_a_frontend_with_a_new_arena_is_another_one(
    worker: FakeWorker, line: Line
) -> None:
    await line.greet()
    worker.engine.stalled = True
    line.add(make_request("r"))
    await within(worker.engine.added.get())
    with Arena(1 << 16, populate=False) as arena:
        line.arena = arena
        assert (await line.greet()).transfer == "shm"
        assert await within(worker.engine.aborted.get()) == ["r"]
        await eventually(lambda: list(worker.engine.reader._arenas) == [arena.id.name])


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

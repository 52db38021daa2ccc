"""Who is served, how its memory is mapped, and what is left when it goes."""

from __future__ import annotations

import time

import pytest
import torch

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
from transfer.messages import Bye, Ping, Refused
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
    await eventually(lambda: worker.inbox._handshake.leaving)
    worker.engine.step_over.set()
    assert (await line.greet()).transfer == "shm"
    await eventually(lambda: not worker.inbox._handshake.leaving)
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

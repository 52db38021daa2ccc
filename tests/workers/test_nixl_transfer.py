"""A worker and a frontend that is another process: real NIXL agents, over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest, FinishReason

from tests.fakes import FakeWorker, eventually, make_item, make_request, within
from tests.fakes_nixl import cpu_seconds
from tests.nixl_owner import Owner
from tests.workers.lines import Line
from transfer.arena import Arena
from transfer.messages import (
    AbortRequests,
    AddRequest,
    Bye,
    Frame,
    Message,
    NixlOffer,
    Pulling,
    Ready,
    Released,
    TensorsMissing,
    TransferChosen,
)
from transfer.pack import plan, refer, write
from transfer.payload import encode_payload
from transfer.tensor_ref import ArenaId, EntryRef, RemoteArena
from workers import nixl_transfer

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.usefixtures("over_tcp")]

M = TypeVar("M", bound=Message)


@pytest.fixture(scope="module")
def owner(over_tcp: None) -> Iterator[Owner]:
    with Owner() as owner:
        yield owner


@pytest.fixture
def doomed(over_tcp: None) -> Iterator[Owner]:
    with Owner() as owner:
        yield owner


@pytest.fixture
def worker_settings() -> dict[str, Any]:
    return {"cache_gib": 1 / 64, "transfer_timeout": 0.5}


class FarLine(Line):
    """What a frontend on another host has: its arena is in the process ``owner``."""

    def __init__(self, worker: FakeWorker, owner: Owner, name: str = "frontend-1") -> None:
        super().__init__(worker, name)
        self.owner = owner
        self.helpful = True
        """Whether the owner's agent is driven when the worker asks for it."""
        self.told: list[Pulling] = []
        """What the worker has said of its pulling."""

    async def hear(self, kind: type[M]) -> tuple[M, list[Frame]]:
        while True:
            message, payload = await within(self._link.receive())
            if isinstance(message, Pulling):
                self.told.append(message)
                if self.helpful:
                    self.owner.do("progress_for", self.name, message.seconds)
                continue
            assert isinstance(message, kind), message
            return message, list(payload)

    async def offer(self, **changes: object) -> TransferChosen:
        self.say(NixlOffer(msgspec.structs.replace(self.owner.remote, **changes)))
        chosen, _ = await self.hear(TransferChosen)
        return chosen

    async def meet(self) -> Ready:
        """Greet the worker and have it read the owner's arena."""
        ready = await self.greet(transfer="nixl", arena=self.owner.remote.arena)
        assert ready.nixl
        chosen = await self.offer()
        assert chosen.transfer == "nixl", chosen
        return ready

    def hang(self) -> None:
        """READs from the owner do not get on from here on."""
        self.helpful = False
        self.owner.do("progress_for", self.name, 0.0)

    def go_on(self) -> None:
        self.helpful = True
        self.owner.do("progress_for", self.name, 60.0)

    def store(self, item: MultiModalKwargsItem, **changes: object) -> MultiModalKwargsItem:
        """The item with a reference into the owner's arena."""
        tensors = plan(item)
        assert tensors is not None
        contents = bytearray(tensors.nbytes)
        write(tensors, item, memoryview(contents))
        entry: EntryRef = self.owner.put(bytes(contents))
        packed = refer(tensors, item, entry)
        if changes:
            entry = msgspec.structs.replace(entry, **changes)
            packed = refer(replace(tensors, nbytes=entry.nbytes), item, entry)
        return packed

    def send(self, request: EngineCoreRequest, part: int = 0) -> None:
        self.say(AddRequest(request.request_id, part), encode_payload(request))

    def ask(self, request_id: str, pixels: torch.Tensor) -> None:
        items = [self.store(make_item(pixels))]
        self.send(make_request(request_id, items=items, max_tokens=1))


@pytest.fixture
async def line(worker: FakeWorker, owner: Owner) -> AsyncIterator[FarLine]:
    async with FarLine(worker, owner) as line:
        yield line


def cache_of(worker: FakeWorker) -> Arena:
    assert worker.nixl._arena is not None
    return worker.nixl._arena


async def test_tensors_are_pulled_from_another_process(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    pixels = torch.rand(300, 400)
    line.ask("r", pixels)
    assert (await line.hear_output()).request_id == "r"
    assert torch.equal(worker.engine.pixels["r"][0], pixels)
    line.hang()
    line.ask("s", pixels)  # is here already
    assert (await line.hear_output()).request_id == "s"
    assert torch.equal(worker.engine.pixels["s"][0], pixels)


async def test_nobody_uses_the_processor_between_pulls(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    line.ask("r", torch.rand(300, 400))
    await line.hear_output()
    assert line.told[-1].seconds == 0.0
    line.hang()
    assert cpu_seconds(1.0) < 0.05
    assert line.owner.do("cpu_seconds", 1.0) < 0.05


async def test_the_end_of_pulling_is_told_with_what_came_of_it(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    line.told.clear()
    line.ask("r", torch.rand(10, 30))
    await line.hear_output()
    begun, ended = line.told
    assert begun.seconds > 0
    assert (ended.seconds, ended.pulls, ended.nbytes, ended.failures) == (0.0, 1, 1200, 0)


async def test_replaced_bytes_are_asked_for_and_the_path_stays(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    request = make_request("r", items=[line.store(make_item(torch.rand(40, 50)))])
    line.owner.do("forget")
    line.send(request)
    missing, _ = await line.hear(TensorsMissing)
    assert (missing.request_id, missing.part) == ("r", 0)
    assert "no longer there" in missing.reason
    assert worker.engine.added.empty() and worker.frontends.owner("r") is None
    line.ask("s", torch.rand(40, 50))
    assert (await line.hear_output()).request_id == "s"


async def test_references_that_do_not_fit_their_item_fail_alone(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    for changes in ({"nbytes": 64}, {"arena": "foveal-1-2-ab"}):
        item = line.store(make_item(torch.rand(40, 50)), **changes)
        line.send(make_request("r", items=[item]))
        assert (await line.hear_output()).finish_reason is FinishReason.ERROR
    line.ask("s", torch.rand(40, 50))
    assert (await line.hear_output()).request_id == "s"


async def test_references_outside_the_arena_are_asked_for(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    for changes in (
        {"offset": 1 << 50}, {"offset": 64}, {"generation": 999}, {"identity": b"x" * 16},
        {"nbytes": 1 << 40},
    ):
        item = line.store(make_item(torch.rand(40, 50)), **changes)
        line.send(make_request("r", items=[item]))
        await line.hear(TensorsMissing)
    assert worker.engine.added.empty()
    assert cache_of(worker).stats().leased_entries == 0


async def test_an_aborted_request_is_confirmed_and_never_added(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    line.hang()
    line.ask("r", torch.rand(40, 50))
    line.say(AbortRequests(["r"]))
    released, _ = await line.hear(Released)
    assert released.request_ids == ["r"]
    # The name is free again, and this one is another request.
    pixels = torch.rand(40, 50)
    line.go_on()
    line.ask("r", pixels)
    await line.hear_output()
    assert worker.engine.added.qsize() == 1
    assert torch.equal(worker.engine.pixels["r"][0], pixels)


async def test_nobody_aborts_anothers_request(worker: FakeWorker, line: FarLine) -> None:
    await line.meet()
    line.hang()
    line.ask("r", torch.rand(40, 50))
    await eventually(lambda: worker.frontends.owner("r"))
    async with Line(worker, "frontend-2") as other:
        await other.greet()
        other.say(AbortRequests(["r"]))
        await other.hear(Released)
    line.go_on()
    assert (await line.hear_output()).request_id == "r"


async def test_a_frontend_that_hangs_is_asked_for_tensors_and_tried_again(
    worker: FakeWorker, line: FarLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transfer, "RETRY_SECONDS", 0.1)
    await line.meet()
    line.hang()
    line.ask("r", torch.rand(40, 50))
    await line.hear(TensorsMissing)
    chosen, _ = await line.hear(TransferChosen)
    assert (chosen.transfer, chosen.reason) == ("inline", "NIXL: no tensors within 0.5 s")
    # What is sent by reference all the same is asked for at once.
    line.ask("s", torch.rand(40, 50))
    await line.hear(TensorsMissing)
    line.go_on()
    chosen, _ = await line.hear(TransferChosen)
    if chosen.transfer == "inline":  # it tried once more before
        chosen, _ = await line.hear(TransferChosen)
    assert chosen.transfer == "nixl"


async def test_a_frontend_that_leaves_while_it_is_read_from_leaves_nothing(
    worker: FakeWorker, doomed: Owner
) -> None:
    async with FarLine(worker, doomed) as line:
        await line.meet()
        line.ask("before", torch.rand(40, 50))
        await line.hear_output()
        doomed.stop()
        line.helpful = False
        # Asked for without the owner, who hangs.
        before = worker.frontends.get("frontend-1")
        assert before is not None
        entry = EntryRef(doomed.remote.arena.name, 4160, 8000, 77, b"i" * 16)
        tensors = plan(make_item(1.0))
        assert tensors is not None
        item = refer(replace(tensors, nbytes=8000), make_item(1.0), entry)
        line.send(make_request("r", items=[item]))
        await eventually(lambda: worker.frontends.owner("r"))
        line.say(Bye())
        await eventually(lambda: not worker.frontends.names())
        assert not worker.inbox._waiting._tasks
        await eventually(lambda: not worker.inbox._handshake.leaving)
        assert before.leases == {}
        doomed.kill()
        reader = worker.nixl._reader
        await eventually(lambda: reader and not reader._under_way and not reader._known)
        await eventually(lambda: cache_of(worker).stats().leased_entries == 0)
    assert worker.engine.pixels.keys() == {"before"}


async def test_a_restarted_frontend_is_met_anew_and_its_old_agent_dropped(
    worker: FakeWorker, doomed: Owner, owner: Owner
) -> None:
    async with FarLine(worker, doomed) as line:
        await line.meet()
        doomed.kill()
        line.owner = owner
        await line.meet()
        pixels = torch.rand(40, 50)
        line.ask("r", pixels)
        await line.hear_output()
        assert torch.equal(worker.engine.pixels["r"][0], pixels)
        assert worker.nixl._reader is not None
        assert worker.nixl._reader._known == {owner.remote.agent}


async def test_an_offer_of_anothers_arena_is_not_taken(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.greet(transfer="nixl", arena=line.owner.remote.arena)
    chosen = await line.offer(arena=ArenaId("foveal-1-2-ab", b"n" * 16))
    assert (chosen.transfer, chosen.reason) == ("inline", "what it offers is not its arena")
    assert worker.nixl.cache is None


async def test_an_arena_that_cannot_be_read_is_not_used(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.greet(transfer="nixl", arena=line.owner.remote.arena)
    chosen = await line.offer(address=line.owner.remote.address + (1 << 40))
    assert chosen.transfer == "inline"
    assert "NIXL" in chosen.reason
    assert (await line.offer()).transfer == "nixl"


async def test_parts_of_a_request_reach_the_engine_in_their_order(
    worker: FakeWorker, line: FarLine
) -> None:
    worker.engine.stalled = True
    await line.meet()
    line.hang()
    for part in range(4):
        items = [] if part % 2 else [line.store(make_item(torch.full((40, 50), float(part))))]
        request = make_request("r", items=items, tokens=range(part, part + 5))
        request.resumable = part < 3
        line.send(request, part)
    await eventually(lambda: len(worker.inbox._waiting._tasks.get("r", ())) == 4)
    line.go_on()
    added = [await within(worker.engine.added.get()) for _ in range(4)]
    assert [(a.prompt_token_ids or [0])[0] for a in added] == [0, 1, 2, 3]


async def test_parts_behind_one_that_is_missing_are_asked_for_too_in_their_order(
    worker: FakeWorker, line: FarLine
) -> None:
    worker.engine.stalled = True
    await line.meet()
    parts = []
    for part in range(3):
        request = make_request("r", tokens=range(part, part + 5))
        if part == 1:
            request = make_request(
                "r", tokens=range(part, part + 5),
                items=[line.store(make_item(torch.rand(40, 50)))],
            )
        request.resumable = part < 2
        parts.append(request)
    line.owner.do("forget")
    for part, request in enumerate(parts):
        line.send(request, part)
    missing = [(await line.hear(TensorsMissing))[0].part for _ in range(2)]
    assert missing == [1, 2]
    whole = make_request("r", tokens=range(1, 6), items=[make_item(1.0)])
    whole.resumable = True
    line.send(whole, 1)
    line.send(parts[2], 2)
    added = [await within(worker.engine.added.get()) for _ in range(3)]
    assert [(a.prompt_token_ids or [0])[0] for a in added] == [0, 1, 2]


async def test_a_part_that_comes_too_early_is_asked_for_again(
    worker: FakeWorker, line: FarLine
) -> None:
    await line.meet()
    line.send(make_request("r"), 1)
    missing, _ = await line.hear(TensorsMissing)
    assert (missing.request_id, missing.part) == ("r", 1)
    assert worker.engine.added.empty()


def test_a_remote_arena_names_all_that_a_reader_needs(owner: Owner) -> None:
    assert isinstance(owner.remote, RemoteArena)
    assert owner.remote.nbytes == (1 << 24) + 4096

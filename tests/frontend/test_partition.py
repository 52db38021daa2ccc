"""A network between frontend and worker that loses everything and tells nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import zmq

from benchmarks.chaos.cut import CuttableLine
from frontend.worker import SILENT_SECONDS
from frontend.worker_pool import WATCH_SECONDS
from tests.fakes import FakeWorker, eventually, make_item, make_request, within
from tests.frontend.fleets import Fleet
from transfer.link import FrontendLink, KvPublisher, KvSubscriber, WorkerLink
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


class Overslept:
    """How late the event loop was, added up: nobody can be missed while it sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.seconds += time.monotonic() - before - 0.01

    def close(self) -> None:
        self._task.cancel()


@pytest.fixture
async def far(registry: Registry) -> AsyncIterator[tuple[FakeWorker, CuttableLine]]:
    """A worker that is reached over a line that can be cut, and that line."""
    worker = FakeWorker(registry, "far", address="tcp://127.0.0.1:*")
    worker.ready.process = None  # it is far: nobody here sees whether it runs
    worker.start()
    line = CuttableLine(int(worker.address.rpartition(":")[2]))
    await line.start()
    yield worker, line
    await line.close()
    await worker.stop()


async def test_a_worker_beyond_a_dead_network_is_missed_and_found_again(
    registry: Registry, far: tuple[FakeWorker, CuttableLine]
) -> None:
    worker, line = far
    async with Fleet(registry, addresses=[f"tcp://127.0.0.1:{line.port}"]) as fleet:
        await fleet.until_ready("far")
        worker.engine.stalled = True
        await fleet.client.add_request_async(
            make_request("r", items=[make_item(1.0)], max_tokens=3)
        )
        await within(worker.engine.added.get())
        worker.engine.say("r", 0)
        first = await within(fleet.client.get_output_async())
        assert first.outputs[0].new_token_ids == [0]
        near = await fleet.start("near")

        line.cut()
        began, late = time.monotonic(), Overslept()
        await fleet.until_gone("far")
        took = time.monotonic() - began - late.seconds
        late.close()
        assert took < SILENT_SECONDS + WATCH_SECONDS + 0.25
        moved = await within(near.engine.added.get())
        assert moved.request_id == "r"
        # What it says from beyond is of no use to anybody when it arrives.
        worker.engine.say("r", 77, finished=True)
        # The fake answers each request with its first tokens: 0 and 1 are the two to go.
        rest = await fleet.answer("r")
        assert [token for output in rest for token in output.new_token_ids] == [0, 1]

        line.mend(breaks=False)
        await fleet.until_ready("far")
        await eventually(lambda: worker.frontends.num_requests == 0)
        await eventually(fleet.at_rest)
        worker.engine.stalled = False
        await near.leave()
        await fleet.client.add_request_async(make_request("again"))
        answer = await fleet.answer("again")
        assert [token for output in answer for token in output.new_token_ids] == [0, 1, 2]


@pytest.mark.parametrize("plane", ["requests", "kv"])
async def test_a_peer_that_stands_still_is_given_up_with_what_is_queued_for_it(
    monkeypatch: pytest.MonkeyPatch, plane: str
) -> None:
    monkeypatch.setattr("transfer.link.PEER_SILENT_MS", 1500)
    with zmq.Context() as context:
        kind = WorkerLink if plane == "requests" else KvPublisher
        end = kind(context, "tcp://127.0.0.1:*")
        events = end._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        line = CuttableLine(int(end.address.rpartition(":")[2]))
        await line.start()
        address = f"tcp://127.0.0.1:{line.port}"
        link: FrontendLink | KvSubscriber
        if plane == "requests":
            link = FrontendLink(context, "frontend-1", address)
        else:
            link = KvSubscriber(context, address)
        try:
            assert await asyncio.to_thread(events.poll, 20_000)
            events.recv_multipart()
            line.cut()
            assert await asyncio.to_thread(events.poll, 20_000)
            event = int.from_bytes(events.recv_multipart()[0][:2], "little")
            assert event == zmq.EVENT_DISCONNECTED
        finally:
            link.close()
            await line.close()
            end._socket.disable_monitor()
            events.close(linger=0)
            end.close()

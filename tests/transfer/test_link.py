"""Messages between a frontend's and a worker's end of a line."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
import zmq.asyncio

from tests.fakes import eventually, make_item, make_request, within
from transfer.errors import BadMessage, TransferError
from transfer.link import FrontendLink, KvPublisher, KvSubscriber, WorkerLink
from transfer.messages import (
    AbortRequests,
    AddRequest,
    Bye,
    Frame,
    KvDelta,
    Message,
    Ping,
    Pong,
    encode,
)
from transfer.payload import decode_request, encode_payload
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


class HeardWorkerLink(WorkerLink):
    """Keeps what it hears until it is asked for."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, address)
        self._heard: asyncio.Queue[tuple[str, Message, Sequence[Frame]]] = asyncio.Queue()
        self._listening = asyncio.create_task(
            self.listen(lambda *heard: self._heard.put_nowait(heard))
        )

    async def receive(self) -> tuple[str, Message, Sequence[Frame]]:
        return await self._heard.get()

    def close(self) -> None:
        self._listening.cancel()
        super().close()


class Ends:
    """Opens ends of lines, and closes them with the test."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self._open = ExitStack()

    def worker(self, address: str) -> HeardWorkerLink:
        return self._open.enter_context(closing(HeardWorkerLink(self.context, address)))

    def frontend(self, name: str, address: str) -> FrontendLink:
        return self._open.enter_context(closing(FrontendLink(self.context, name, address)))

    def publisher(self, address: str) -> KvPublisher:
        return self._open.enter_context(closing(KvPublisher(self.context, address)))

    def subscriber(self, address: str) -> KvSubscriber:
        return self._open.enter_context(closing(KvSubscriber(self.context, address)))

    def raw(self, kind: int) -> zmq.asyncio.Socket:
        """A socket for what our own ends would never send."""
        socket: zmq.asyncio.Socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return self._open.enter_context(socket)

    def close(self) -> None:
        self._open.close()
        self.context.term()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    with closing(Ends()) as ends:
        yield ends


@pytest.fixture
def sockets(registry: Registry) -> Path:
    return registry.socket_directory("w")


async def test_what_is_sent_arrives_in_order_on_both_sides(ends: Ends, sockets: Path) -> None:
    worker = ends.worker(f"ipc://{sockets}/requests")
    frontend = ends.frontend("frontend-1", worker.address)
    for number in range(200):
        frontend.send(AbortRequests([str(number)]))
    for number in range(200):
        assert await within(worker.receive()) == (
            "frontend-1",
            AbortRequests([str(number)]),
            [],
        )
        worker.send("frontend-1", AbortRequests([str(-number)]))
    for number in range(200):
        assert await within(frontend.receive()) == (AbortRequests([str(-number)]), [])


async def test_each_frontend_hears_only_its_own(ends: Ends, sockets: Path) -> None:
    worker = ends.worker(f"ipc://{sockets}/requests")
    frontends = [ends.frontend(f"frontend-{i}", worker.address) for i in range(3)]
    for frontend in frontends:
        frontend.send(Ping())
    names = {(await within(worker.receive()))[0] for _ in frontends}
    for name in names:
        worker.send(name, AbortRequests([name]))
    for i, frontend in enumerate(frontends):
        assert (await within(frontend.receive()))[0] == AbortRequests([f"frontend-{i}"])


async def test_what_waits_in_an_abandoned_link_is_not_sent(
    ends: Ends, sockets: Path
) -> None:
    address = f"ipc://{sockets}/requests"
    earlier = FrontendLink(ends.context, "frontend-1", address)
    earlier.send(Bye())
    frontend = ends.frontend("frontend-1", address)
    frontend.send(Ping())
    earlier.abandon()
    worker = ends.worker(address)
    assert await within(worker.receive()) == ("frontend-1", Ping(), [])
    worker.send("frontend-1", Pong())
    assert await within(frontend.receive()) == (Pong(), [])


async def test_tensors_arrive_as_they_were(ends: Ends, sockets: Path) -> None:
    worker = ends.worker(f"ipc://{sockets}/requests")
    frontend = ends.frontend("frontend-1", worker.address)
    request = make_request(items=[make_item(torch.rand(300, 400))])
    frontend.send(AddRequest("r"), encode_payload(request))
    _, message, payload = await within(worker.receive())
    assert message == AddRequest("r")
    assert decode_request(payload).mm_features == request.mm_features


async def test_a_reply_to_a_frontend_that_is_not_there_stops_nobody(
    ends: Ends, sockets: Path
) -> None:
    worker = ends.worker(f"ipc://{sockets}/requests")
    worker.send("nobody", Pong())
    frontend = ends.frontend("frontend-1", worker.address)
    frontend.send(Ping())
    assert (await within(worker.receive()))[1] == Ping()


async def test_what_does_not_decode_is_dropped_by_a_worker_and_told_to_a_frontend(
    ends: Ends, sockets: Path
) -> None:
    worker = ends.worker(f"ipc://{sockets}/requests")
    stranger = ends.raw(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"frontend-1")
    stranger.connect(worker.address)
    await within(stranger.send_multipart([b"no message"]))
    await within(stranger.send_multipart([b""]))
    await within(stranger.send_multipart(encode(Ping())))
    assert await within(worker.receive()) == ("frontend-1", Ping(), [])
    assert worker.bad_messages == 2

    server = ends.raw(zmq.ROUTER)
    server.bind(f"ipc://{sockets}/other")
    frontend = ends.frontend("frontend-2", f"ipc://{sockets}/other")
    frontend.send(Ping())
    peer, _ = await within(server.recv_multipart())
    await within(server.send_multipart([peer, b"\xc1"]))
    await within(server.send_multipart([peer, *encode(Pong())]))
    with pytest.raises(BadMessage):
        await within(frontend.receive())
    assert await within(frontend.receive()) == (Pong(), [])


async def test_a_frontend_that_connects_again_takes_over_its_name(
    ends: Ends, sockets: Path
) -> None:
    worker = ends.worker(f"ipc://{sockets}/requests")
    dead = ends.frontend("frontend-1", worker.address)
    dead.send(Ping())
    await within(worker.receive())
    again = ends.frontend("frontend-1", worker.address)
    again.send(Bye())
    assert await within(worker.receive()) == ("frontend-1", Bye(), [])
    worker.send("frontend-1", Pong())
    assert await within(again.receive()) == (Pong(), [])


async def test_a_line_works_again_after_the_worker_was_away(ends: Ends, sockets: Path) -> None:
    worker = ends.worker("tcp://127.0.0.1:*")
    frontend = ends.frontend("frontend-1", worker.address)
    frontend.send(Ping())
    await within(worker.receive())
    address = worker.address
    worker.close()
    opened: list[WorkerLink] = []

    def reopened() -> bool:
        # ZeroMQ closes in a thread of its own, and until then the address is taken.
        with suppress(zmq.ZMQError):
            opened.append(ends.worker(address))
        return bool(opened)

    await eventually(reopened)
    receiving = asyncio.ensure_future(opened[0].receive())

    def heard() -> bool:
        # What goes out before the old connection is known to be dead is lost with it.
        frontend.send(Bye())
        return receiving.done()

    await eventually(heard)
    assert await within(receiving) == ("frontend-1", Bye(), [])


async def test_deltas_reach_every_subscriber_and_nothing_else_does(
    ends: Ends, sockets: Path
) -> None:
    publisher = ends.raw(zmq.PUB)
    publisher.bind(f"ipc://{sockets}/kv")
    subscribers = [ends.subscriber(f"ipc://{sockets}/kv") for _ in range(2)]
    delta = KvDelta("e", 1, {"GPU": [b"d" * 32]})
    for subscriber in subscribers:
        receiving = asyncio.ensure_future(subscriber.receive())

        def sent(receiving: asyncio.Future[KvDelta] = receiving) -> bool:
            # Subscriptions take effect without a word, so this is said until it is heard.
            publisher.send_multipart(encode(Ping()))
            publisher.send_multipart(encode(delta))
            return receiving.done()

        await eventually(sent)
        assert await within(receiving) == delta
        assert subscriber.bad_messages >= 1


async def test_the_shipped_publisher_is_heard(ends: Ends, sockets: Path) -> None:
    publisher = ends.publisher(f"ipc://{sockets}/kv")
    subscriber = ends.subscriber(publisher.address)
    receiving = asyncio.ensure_future(subscriber.receive())
    delta = KvDelta("e", 1, removed={"CPU": [b"d" * 32]}, cleared=True)

    def heard() -> bool:
        publisher.publish(delta)
        return receiving.done()

    await eventually(heard)
    assert await within(receiving) == delta
    publisher.close()
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("end", ["worker", "publisher"])
async def test_sockets_are_for_one_user_and_removed_on_closing(
    ends: Ends, sockets: Path, end: str
) -> None:
    link = getattr(ends, end)(f"ipc://{sockets}/here")
    (path,) = sockets.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link.close()
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_port_is_found_and_named_where_none_is_given(ends: Ends, host: str) -> None:
    try:
        worker = ends.worker(f"tcp://{host}:*")
    except zmq.ZMQError:
        pytest.skip(f"no {host} on this machine")
    assert worker.address.startswith(f"tcp://{host}:")
    frontend = ends.frontend("frontend-1", worker.address)
    frontend.send(Ping())
    assert (await within(worker.receive()))[1] == Ping()


async def test_whoever_listens_gets_what_its_callback_raised(
    ends: Ends, sockets: Path
) -> None:
    worker = ends._open.enter_context(closing(WorkerLink(ends.context, f"ipc://{sockets}/r")))
    frontend = ends.frontend("frontend-1", worker.address)
    heard = []

    def on_message(name: str, message: Message, payload: Sequence[Frame]) -> None:
        heard.append(message)
        raise KeyError(name)

    frontend.send(Ping())
    frontend.send(Bye())
    with pytest.raises(KeyError, match="frontend-1"):
        await within(worker.listen(on_message))
    assert heard == [Ping()]


async def test_lines_that_are_made_anew_again_and_again_do_not_meet_each_other(
    ends: Ends, sockets: Path
) -> None:
    """libzmq is not done with the last one when the next, in the same place, is made."""
    context = zmq.Context()
    for _ in range(300):
        with pytest.raises(TransferError):
            FrontendLink(context, "f", "nonsense")
        FrontendLink(context, "f", f"ipc://{sockets}/nobody").close()
    await within(asyncio.to_thread(context.term))

"""Messages between a frontend's and a worker's end of a line."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
import zmq.asyncio

from tests.fakes import eventually, make_item, make_request, within
from transfer.link import FrontendLink, KvPublisher, KvSubscriber, WorkerLink
from transfer.messages import (
    AbortRequests,
    AddRequest,
    Bye,
    KvDelta,
    Ping,
    Pong,
    decode_request,
    encode,
    encode_payload,
)
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def sockets(registry: Registry) -> Path:
    return registry.socket_directory("w")


async def test_what_is_sent_arrives_in_order_on_both_sides(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, f"ipc://{sockets}/requests")
    frontend = FrontendLink(context, "frontend-1", worker.address)
    for number in range(200):
        frontend.send(AbortRequests([str(number)]))
    for number in range(200):
        assert await within(worker.receive()) == ("frontend-1", AbortRequests([str(number)]), [])
        worker.send("frontend-1", AbortRequests([str(-number)]))
    for number in range(200):
        assert await within(frontend.receive()) == (AbortRequests([str(-number)]), [])


async def test_each_frontend_hears_only_its_own(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, f"ipc://{sockets}/requests")
    frontends = [FrontendLink(context, f"frontend-{i}", worker.address) for i in range(3)]
    for frontend in frontends:
        frontend.send(Ping())
    names = {(await within(worker.receive()))[0] for _ in frontends}
    for name in names:
        worker.send(name, AbortRequests([name]))
    for i, frontend in enumerate(frontends):
        assert (await within(frontend.receive()))[0] == AbortRequests([f"frontend-{i}"])


async def test_tensors_arrive_as_they_were(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, f"ipc://{sockets}/requests")
    frontend = FrontendLink(context, "frontend-1", worker.address)
    request = make_request(items=[make_item(torch.rand(300, 400))])
    frontend.send(AddRequest("r"), encode_payload(request))
    _, message, payload = await within(worker.receive())
    assert message == AddRequest("r")
    assert decode_request(payload).mm_features == request.mm_features


async def test_a_reply_to_a_frontend_that_is_not_there_stops_nobody(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, f"ipc://{sockets}/requests")
    worker.send("nobody", Pong())
    frontend = FrontendLink(context, "frontend-1", worker.address)
    frontend.send(Ping())
    assert (await within(worker.receive()))[1] == Ping()


async def test_what_does_not_decode_is_counted_and_dropped_on_both_sides(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, f"ipc://{sockets}/requests")
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"frontend-1")
    stranger.connect(worker.address)
    await within(stranger.send_multipart([b"no message"]))
    await within(stranger.send_multipart([b""]))
    await within(stranger.send_multipart(encode(Ping())))
    assert await within(worker.receive()) == ("frontend-1", Ping(), [])
    assert worker.bad_messages == 2
    stranger.close(linger=0)

    server = context.socket(zmq.ROUTER)
    server.bind(f"ipc://{sockets}/other")
    frontend = FrontendLink(context, "frontend-2", f"ipc://{sockets}/other")
    frontend.send(Ping())
    peer, _ = await within(server.recv_multipart())
    await within(server.send_multipart([peer, b"\xc1"]))
    await within(server.send_multipart([peer, *encode(Pong())]))
    assert await within(frontend.receive()) == (Pong(), [])
    assert frontend.bad_messages == 1


async def test_a_frontend_that_connects_again_takes_over_its_name(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, f"ipc://{sockets}/requests")
    dead = FrontendLink(context, "frontend-1", worker.address)
    dead.send(Ping())
    await within(worker.receive())
    again = FrontendLink(context, "frontend-1", worker.address)
    again.send(Bye())
    assert await within(worker.receive()) == ("frontend-1", Bye(), [])
    worker.send("frontend-1", Pong())
    assert await within(again.receive()) == (Pong(), [])


async def test_a_line_works_again_after_the_worker_was_away(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    worker = WorkerLink(context, "tcp://127.0.0.1:*")
    frontend = FrontendLink(context, "frontend-1", worker.address)
    frontend.send(Ping())
    await within(worker.receive())
    address = worker.address
    worker.close()
    again = WorkerLink(context, address)
    frontend.send(Bye())
    assert await within(again.receive()) == ("frontend-1", Bye(), [])


async def test_deltas_reach_every_subscriber_and_nothing_else_does(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    publisher = context.socket(zmq.PUB)
    publisher.bind(f"ipc://{sockets}/kv")
    subscribers = [KvSubscriber(context, f"ipc://{sockets}/kv") for _ in range(2)]
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


async def test_the_shipped_publisher_is_heard(
    context: zmq.asyncio.Context, sockets: Path
) -> None:
    publisher = KvPublisher(context, f"ipc://{sockets}/kv")
    subscriber = KvSubscriber(context, publisher.address)
    receiving = asyncio.ensure_future(subscriber.receive())
    delta = KvDelta("e", 1, removed={"CPU": [b"d" * 32]}, cleared=True)

    def heard() -> bool:
        publisher.publish(delta)
        return receiving.done()

    await eventually(heard)
    assert await within(receiving) == delta
    publisher.close()
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("end", [WorkerLink, KvPublisher])
async def test_sockets_are_for_one_user_and_removed_on_closing(
    context: zmq.asyncio.Context, sockets: Path, end: type[WorkerLink | KvPublisher]
) -> None:
    link = end(context, f"ipc://{sockets}/here")
    (path,) = sockets.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link.close()
    assert not list(sockets.iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_port_is_found_and_named_where_none_is_given(
    context: zmq.asyncio.Context, host: str
) -> None:
    try:
        worker = WorkerLink(context, f"tcp://{host}:*")
    except zmq.ZMQError:
        pytest.skip(f"no {host} on this machine")
    assert worker.address.startswith(f"tcp://{host}:")
    frontend = FrontendLink(context, "frontend-1", worker.address)
    frontend.send(Ping())
    assert (await within(worker.receive()))[1] == Ping()

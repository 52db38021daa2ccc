"""Moves messages between frontends and workers over ZeroMQ.

A worker binds one ROUTER for requests and one PUB for KV deltas; every frontend connects
a DEALER and a SUB. A DEALER's routing id is the frontend's name, so a worker's replies
find their way and a frontend that reconnects is the same peer.

Sending never waits: messages queue in ZeroMQ, in order, and a peer that does not read is
found out by its missing heartbeats, not by a blocked sender. What arrives and does not
decode is counted, logged and dropped; it cannot stop the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from transfer.errors import BadMessage
from transfer.messages import Frame, KvDelta, LoadReport, Message, decode, encode
from transfer.socket_reader import SocketReader

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""How often a frontend pings each of its workers."""

LAST_WORDS_MS = 200
"""How long closing may take to get a last message out, in milliseconds."""

OnMessage = Callable[[str, Message, Sequence[Frame]], None]
"""Takes a frontend's name, what it says and the frames behind that."""

_MAPPED_IPV4 = re.compile(r"^tcp://\[::ffff:([0-9.]+)\]:")
"""How a socket that speaks IPv6 too names an IPv4 address."""


class _Socket:
    """One ZeroMQ socket that carries our messages. Used on one event loop."""

    copies_what_it_receives = True

    def __init__(self, context: zmq.Context[Any], kind: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Socket(context, kind)
        self._reader: SocketReader | None = None
        self._received: asyncio.Queue[list[Frame]] = asyncio.Queue()
        self._socket.setsockopt(zmq.LINGER, 0)
        # No limit on queued messages: a limit would drop silently (ROUTER) or block
        # (DEALER). What bounds the queue is that lost peers are dropped.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self.bad_messages = 0

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._socket.close(linger=LAST_WORDS_MS)

    def _put(self, frames: Sequence[Frame]) -> None:
        try:
            # pyzmq copies frames below 64 KiB and keeps larger ones alive until sent.
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            logger.error("could not send: %s", error)
        if self._reader is not None:
            self._reader.look_again()

    def _read_with(self, on_frames: Callable[[list[Frame]], None]) -> None:
        self._reader = SocketReader(
            self._socket, on_frames, copy=self.copies_what_it_receives
        )

    async def _frames(self) -> list[Frame]:
        if self._reader is None:
            self._read_with(self._received.put_nowait)
        return await self._received.get()

    def _count_bad(self, sender: str, error: BadMessage) -> None:
        self.bad_messages += 1
        logger.warning("dropped a message from %s: %s", sender, error)


class FrontendLink(_Socket):
    """A frontend's end of the line to one worker."""

    _monitor: tuple[zmq.Socket[bytes], SocketReader] | None = None

    def __init__(self, context: zmq.Context[Any], frontend: str, address: str) -> None:
        super().__init__(context, zmq.DEALER)
        self.address = address
        self._socket.setsockopt(zmq.ROUTING_ID, frontend.encode())
        self._socket.connect(address)

    def watch_breaks(self, on_break: Callable[[], None]) -> None:
        """Call ``on_break`` whenever the connection breaks.

        ZeroMQ makes a new one by itself, but what was under way may be lost.
        """
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor = monitor, SocketReader(monitor, lambda _: on_break(), copy=True)

    def close(self) -> None:
        if self._monitor is not None:
            monitor, reader = self._monitor
            reader.close()
            self._socket.disable_monitor()
            monitor.close(linger=0)
            self._monitor = None
        super().close()

    def send(self, message: Message, payload: Sequence[Frame] = ()) -> None:
        self._put(encode(message, payload))

    async def receive(self) -> tuple[Message, Sequence[Frame]]:
        while True:
            try:
                return decode(await self._frames())
            except BadMessage as error:
                self._count_bad(self.address, error)


class WorkerLink(_Socket):
    """A worker's end of the lines to all its frontends."""

    copies_what_it_receives = False  # tensors may be among it

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, zmq.ROUTER)
        # A frontend that reconnects takes over from its dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = _bind(self._socket, address)

    def close(self) -> None:
        super().close()
        _unlink_ipc(self.address)

    def send(self, frontend: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        self._put([frontend.encode(), *encode(message, payload)])

    async def listen(self, on_message: OnMessage) -> None:
        """Call ``on_message`` with what each frontend says until cancelled.

        Straight from the socket's callback: a request passes without waking a task.

        Raises:
            Exception: what ``on_message`` raised; nothing is read after that.
        """
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_frames(frames: list[Frame]) -> None:
            if failed.done():
                return
            peer, *rest = frames
            name = bytes(peer).decode(errors="replace")
            try:
                message, payload = decode(rest)
            except BadMessage as error:
                self._count_bad(name, error)
                return
            try:
                on_message(name, message, payload)
            except Exception as error:
                failed.set_exception(error)

        self._read_with(on_frames)
        await failed


class KvPublisher(_Socket):
    """A worker tells all frontends what its KV cache gained and lost, and how busy it is."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, zmq.PUB)
        self.address = _bind(self._socket, address)

    def close(self) -> None:
        super().close()
        _unlink_ipc(self.address)

    def publish(self, news: KvDelta | LoadReport) -> None:
        self._put(encode(news))


class KvSubscriber(_Socket):
    """A frontend listens to what one worker publishes."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, zmq.SUB)
        self.address = address
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    async def receive(self) -> KvDelta | LoadReport:
        while True:
            try:
                message, _ = decode(await self._frames())
                if not isinstance(message, KvDelta | LoadReport):
                    raise BadMessage(f"{type(message).__name__} on the KV plane")
                return message
            except BadMessage as error:
                self._count_bad(self.address, error)


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Bind and return the address as peers must name it (port 0 is resolved)."""
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close(linger=0)  # nobody else would, and its context could not end
        raise
    if address.startswith("ipc://"):
        # ZeroMQ makes the socket file with the umask's mode: only our user may speak.
        Path(address.removeprefix("ipc://")).chmod(0o600)
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return _MAPPED_IPV4.sub(r"tcp://\1:", bound)


def _unlink_ipc(address: str) -> None:
    if address.startswith("ipc://"):
        with contextlib.suppress(FileNotFoundError):
            Path(address.removeprefix("ipc://")).unlink()

"""Moves messages between frontends and workers over ZeroMQ.

A worker binds one ROUTER for requests and one PUB for KV deltas; every frontend connects
a DEALER and a SUB. A DEALER's routing id is the frontend's name, so a worker's replies
find their way and a frontend that reconnects is the same peer.

On TCP both are protected as ``transfer.access`` says: authenticated and encrypted where
there are keys, else open to this host only.

Sending never waits: messages queue in ZeroMQ, in order, and a peer that does not read is
found out by its missing heartbeats, not by a blocked sender. What arrives and does not
decode is counted, logged and dropped; it cannot stop the reader. Only a frontend is told,
of what its worker sends: tokens would be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from transfer.access import Access
from transfer.errors import BadMessage, TransferError
from transfer.messages import Frame, KvDelta, LoadReport, Message, decode, encode
from transfer.socket_reader import SocketReader

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
"""How often a frontend pings each of its workers."""

PEER_SILENT_MS = 20_000
"""After so long a connection whose other end does not answer ZeroMQ itself is given up, in
milliseconds: what is queued in it is let go of, and whoever connected tries again. Longer
than processes are missed (frontend.worker_pool, workers.frontends), so that this is of
networks that lose everything and of processes that stand still."""
CONNECT_MS = 3_000
"""So long one attempt to connect may take, in milliseconds: whoever tried while the network
was gone is back soon after it is."""

LAST_WORDS_MS = 200
"""How long closing may take to get a last message out, in milliseconds."""

OnMessage = Callable[[str, Message, Sequence[Frame]], None]
"""Takes a frontend's name, what it says and the frames behind that."""

REFUSED_SECONDS = 1.0
"""After so long a worker that has refused this frontend is tried again."""

_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_UNPROTECTED = Access()

_monitors = itertools.count()

_MAPPED_IPV4 = re.compile(r"^tcp://\[::ffff:([0-9.]+)\]:")
"""How a socket that speaks IPv6 too names an IPv4 address."""


class _Socket:
    """One ZeroMQ socket that carries our messages. Used on one event loop."""

    copies_what_it_receives = True
    refused = False
    """Whether the keys of both ends do not fit, as far as that has been noticed."""

    def __init__(self, context: zmq.Context[Any], kind: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Socket(context, kind)
        self._reader: SocketReader | None = None
        self._received: asyncio.Queue[list[Frame]] = asyncio.Queue()
        self._socket.setsockopt(zmq.LINGER, 0)
        # No limit on queued messages: a limit would drop silently (ROUTER) or block
        # (DEALER). What bounds the queue is that lost peers are dropped, and their
        # connections given up.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT_SECONDS))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PEER_SILENT_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self.bad_messages = 0

    def close(self) -> None:
        self._close(LAST_WORDS_MS)

    def _close(self, linger_ms: int) -> None:
        if self._reader is not None:
            self._reader.close()
        self._socket.close(linger=linger_ms)

    def _put(self, frames: Sequence[Frame]) -> None:
        try:
            # pyzmq copies frames below 64 KiB and keeps larger ones alive until sent.
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if not self.refused:  # said already
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

    def __init__(
        self,
        context: zmq.Context[Any],
        frontend: str,
        address: str,
        access: Access = _UNPROTECTED,
    ) -> None:
        """
        Raises:
            TransferError: that is no address.
        """
        super().__init__(context, zmq.DEALER)
        self.address = address
        self._has_keys = access.keys is not None
        self._events: SocketReader | None = None
        self._again: asyncio.TimerHandle | None = None
        self._socket.setsockopt(zmq.ROUTING_ID, frontend.encode())
        # Watched from before it connects: a refusal is told once.
        # A name that was never used: libzmq lets go of one some time after its socket is
        # closed, and what has an id() now may not be the first.
        name = f"inproc://events-{next(_monitors)}"
        self._socket.monitor(name, zmq.EVENT_DISCONNECTED | _HANDSHAKES)
        self._monitor: zmq.Socket[bytes] = zmq.Socket(context, zmq.PAIR)
        self._monitor.connect(name)
        try:
            _connect(self._socket, address, access)
        except TransferError:
            self._stop_monitor()
            self._socket.close(linger=0)
            raise

    def watch_breaks(self, on_break: Callable[[], None]) -> None:
        """Call ``on_break`` whenever the connection breaks, and log when it is refused.

        ZeroMQ makes a new one by itself, but what was under way may be lost.
        """

        def on_event(frames: list[Frame]) -> None:
            event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
            if event == zmq.EVENT_DISCONNECTED:
                on_break()
            else:
                self._on_handshake(event)

        self._events = SocketReader(self._monitor, on_event, copy=True)

    def _on_handshake(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refused = False
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not self._has_keys:
            return  # whoever was there left in the middle of it
        if not self.refused:  # it is tried again and again
            self.refused = True
            logger.error(
                "%s and this frontend do not accept each other: both need --secure-keys "
                "with keys made together, or neither", self.address,
            )
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._again is None:
            # After any other failure ZeroMQ gives up: another worker may take its place.
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(REFUSED_SECONDS, self._connect_again)

    def _connect_again(self) -> None:
        self._again = None
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self.address)
        self._socket.connect(self.address)

    def abandon(self) -> None:
        """Close it at once, because another takes its place; what waits in it is not sent.

        If it still connected, behind the other, the worker would listen to it alone: to the
        last that comes under a name. The other would be heard when it is given up as silent.
        """
        self._stop_watching()
        self._close(linger_ms=0)

    def close(self) -> None:
        self._stop_watching()
        super().close()

    def _stop_watching(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._events is not None:
            self._events.close()
        self._stop_monitor()

    def _stop_monitor(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def send(self, message: Message, payload: Sequence[Frame] = ()) -> None:
        self._put(encode(message, payload))

    async def receive(self) -> tuple[Message, Sequence[Frame]]:
        """
        Raises:
            BadMessage: what came cannot be read. It may have been tokens.
        """
        return decode(await self._frames())

    def last_words(self) -> list[tuple[Message, Sequence[Frame]]]:
        """All that has come and was not received yet, up to what cannot be read."""
        if self._reader is not None:
            self._reader.read_all()
        words = []
        with contextlib.suppress(BadMessage):
            while not self._received.empty():
                words.append(decode(self._received.get_nowait()))
        return words


class WorkerLink(_Socket):
    """A worker's end of the lines to all its frontends."""

    copies_what_it_receives = False  # tensors may be among it

    def __init__(
        self, context: zmq.Context[Any], address: str, access: Access = _UNPROTECTED
    ) -> None:
        """
        Raises:
            TransferError: other hosts could reach it, and nothing would keep them out.
            zmq.ZMQError: the address cannot be listened on.
        """
        super().__init__(context, zmq.ROUTER)
        # A frontend that reconnects takes over from its dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = _bind(self._socket, address, access)

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

    def __init__(
        self, context: zmq.Context[Any], address: str, access: Access = _UNPROTECTED
    ) -> None:
        """Raises: as ``WorkerLink``."""
        super().__init__(context, zmq.PUB)
        self.address = _bind(self._socket, address, access)

    def close(self) -> None:
        super().close()
        _unlink_ipc(self.address)

    def publish(self, news: KvDelta | LoadReport) -> None:
        self._put(encode(news))


class KvSubscriber(_Socket):
    """A frontend listens to what one worker publishes."""

    def __init__(
        self, context: zmq.Context[Any], address: str, access: Access = _UNPROTECTED
    ) -> None:
        """
        Raises:
            TransferError: that is no address.
        """
        super().__init__(context, zmq.SUB)
        self.address = address
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            _connect(self._socket, address, access)
        except TransferError:
            self._socket.close(linger=0)
            raise

    async def receive(self) -> KvDelta | LoadReport:
        while True:
            try:
                message, _ = decode(await self._frames())
                if not isinstance(message, KvDelta | LoadReport):
                    raise BadMessage(f"{type(message).__name__} on the KV plane")
                return message
            except BadMessage as error:
                self._count_bad(self.address, error)


def _connect(socket: zmq.Socket[bytes], address: str, access: Access) -> None:
    """
    Raises:
        TransferError: that is no address. The caller closes the socket: else its context
            could not end.
    """
    try:
        access.before_connect(socket, address)
        socket.connect(address)
    except Exception as error:  # of pyzmq or of libzmq: it depends on what is wrong with it
        raise TransferError(f"{address!r} is no address to connect to: {error}") from error


def _bind(socket: zmq.Socket[bytes], address: str, access: Access) -> str:
    """Bind and return the address as peers must name it (port 0 is resolved)."""
    try:
        access.before_bind(socket, address)
        socket.bind(address)
    except (zmq.ZMQError, TransferError):
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

"""Reads a ZeroMQ socket on an event loop, at the cost of a callback per wake-up.

``zmq.asyncio`` makes and schedules several futures per message, which costs about 0.3 ms;
a token passes two such hops on its way to a client.

A ZeroMQ socket's descriptor announces changes, not states: after a wake-up everything
must be read, and sending may swallow an announcement, so ``look_again`` after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from transfer.messages import Frame

MESSAGES_AT_ONCE = 128
"""After so many messages others on the event loop get their turn."""


class SocketReader:
    """Calls ``on_message`` with the frames of every message of ``socket``.

    ``copy`` False leaves large frames where ZeroMQ received them. Make it, and use the
    socket, on the event loop's thread; close it before the socket.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[Frame]], None],
        *,
        copy: bool,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._copy = copy
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.call_soon(self._read)  # what is there already is not announced

    def look_again(self) -> None:
        """Read what came in while the socket was used otherwise."""
        if not self._closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def read_all(self) -> None:
        """Pass on what is there now, whoever else waits for a turn."""
        while not self._closed:
            try:
                frames = self._receive()
            except (zmq.Again, zmq.ContextTerminated):
                return
            self._on_message(frames)

    def _receive(self) -> list[Frame]:
        if self._copy:
            return [*self._socket.recv_multipart(zmq.NOBLOCK)]
        return [part.buffer for part in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]

    def _read(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            if self._closed:
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            except zmq.ContextTerminated:
                self.close()
                return
            try:
                self._on_message(frames)
            except BaseException:
                # What lies behind this message has been announced and will not be again.
                self._loop.call_soon(self._read)
                raise
        self._loop.call_soon(self._read)

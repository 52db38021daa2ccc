"""A TCP line between frontends and a worker that can be cut."""

from __future__ import annotations

import asyncio
import contextlib


class CuttableLine:
    """Forwards what comes to ``port`` to another port of this machine, unless it is cut.

    While it is cut nothing gets through and nobody is told, as when a cable is pulled.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._through = asyncio.Event()
        self._through.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._through.clear()

    def mend(self, *, breaks: bool = True) -> None:
        """Let everything through again; ``breaks``: the connections that were there end."""
        if breaks:
            for writer in self._writers:
                writer.transport.abort()
        self._through.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.mend()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._through.wait()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._forward(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._through.wait()
                target.write(data)
                await target.drain()
        target.transport.abort()
        self._writers.discard(target)

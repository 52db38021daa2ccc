"""A frontend that is told to leave answers what it has been asked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import PlainTextResponse, StreamingResponse

from frontend.draining import HttpDrain, OpenRequestsMiddleware
from tests.fakes import eventually, within

pytestmark = pytest.mark.anyio


class Served:
    """An app behind a real server, with one stream that a test lets go on."""

    def __init__(self, seconds: float) -> None:
        self.go_on = asyncio.Event()
        self.drain = HttpDrain(seconds)
        self.app = FastAPI()
        self.app.add_middleware(OpenRequestsMiddleware)
        self.drain.watch(self.app)
        self.app.get("/stream")(self._stream)
        self.app.get("/short")(self._short)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self.app.state.server = self.server

    async def _stream(self) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            yield b"first,"
            await self.go_on.wait()
            yield b"last"

        return StreamingResponse(body())

    async def _short(self) -> PlainTextResponse:
        return PlainTextResponse("short")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return reader, writer


@asynccontextmanager
async def served(seconds: float = 60.0) -> AsyncIterator[Served]:
    served = Served(seconds)
    with served.server.capture_signals():
        pass
    task = asyncio.create_task(served.server._serve([served._socket]))
    await eventually(lambda: served.server.started)
    yield served
    served.go_on.set()
    served.server.should_exit = True
    await within(task)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


async def test_a_stream_is_finished_while_nobody_new_gets_in() -> None:
    async with served() as app:
        reader, writer = await app.ask("/stream")
        head = await within(reader.readuntil(b"first,"))
        assert b"connection: close" not in head
        draining = asyncio.create_task(app.drain.run())
        await eventually(lambda: app.drain.requests.draining)
        with pytest.raises(OSError):
            await app.connect()
        assert not draining.done()
        app.go_on.set()
        assert (await within(reader.read())).find(b"last") > 0  # up to the end of file
        await within(draining)
        writer.close()


async def test_connections_that_are_kept_alive_are_closed() -> None:
    async with served() as app:
        reader, writer = await app.ask("/short")
        await within(reader.readuntil(b"short"))
        await within(app.drain.run())
        assert await within(reader.read()) == b""
        writer.close()


async def test_streams_have_so_long_and_no_longer() -> None:
    async with served(seconds=0.05) as app:
        reader, writer = await app.ask("/stream")
        await within(reader.readuntil(b"first,"))
        await within(app.drain.run())
        assert app.drain.requests.count == 1
        writer.close()


async def test_a_second_signal_ends_the_wait() -> None:
    async with served() as app:
        reader, writer = await app.ask("/stream")
        await within(reader.readuntil(b"first,"))
        draining = asyncio.create_task(app.drain.run())
        await eventually(lambda: app.drain.requests.draining)
        os.kill(os.getpid(), signal.SIGTERM)
        await within(draining)
        writer.close()


async def test_it_is_waited_for_in_another_thread() -> None:
    async with served() as app:
        reader, writer = await app.ask("/stream")
        await within(reader.readuntil(b"first,"))
        thread = threading.Thread(target=app.drain.wait)
        thread.start()
        await eventually(lambda: app.drain.requests.draining)
        assert thread.is_alive()
        app.go_on.set()
        await eventually(lambda: not thread.is_alive())
        writer.close()

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.chaos.cut import CuttableLine
from tests.fakes import within

pytestmark = pytest.mark.anyio


@pytest.fixture
async def line() -> AsyncIterator[CuttableLine]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    line = CuttableLine(server.sockets[0].getsockname()[1])
    await line.start()
    yield line
    await line.close()
    server.close()


async def test_what_is_said_gets_through(line: CuttableLine) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(b"hello")
    assert await within(reader.readexactly(5)) == b"hello"
    writer.close()


async def test_nothing_gets_through_a_cut_line_and_mending_breaks_it(
    line: CuttableLine,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(b"a")
    await within(reader.readexactly(1))
    line.cut()
    writer.write(b"b")
    with pytest.raises(TimeoutError):
        await within(reader.read(1), 0.05)
    line.mend()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await within(reader.readexactly(1))
    writer.close()
    again, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(b"c")
    assert await within(again.readexactly(1)) == b"c"
    writer.close()

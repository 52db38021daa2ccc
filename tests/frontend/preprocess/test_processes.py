"""The frontend's end of the line, with a peer that follows a script."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from frontend.preprocess.messages import (
    Began,
    Done,
    Failed,
    Measured,
    Media,
    Message,
    Place,
    Work,
    encode,
    length_prefix,
)
from frontend.preprocess.processes import NeverBegan, NoRoom, PreprocessProcess, receive
from tests.fakes import within
from transfer.arena import Arena
from transfer.errors import BadMessage, PeerLost

pytestmark = pytest.mark.anyio

WORK = Work("image", Media(b"data", "RGB", (255, 255, 255), "RGB"), {"max_pixels": 9})
IDENTITY = bytes(16)


class Peer:
    """The process's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def say(self, message: Message) -> None:
        body = encode(message)
        self.writer.write(length_prefix(body) + body)

    async def hear(self) -> Message:
        return await within(receive(self._reader))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(1 << 16, populate=False) as arena:
        yield arena
        assert arena.stats().leased_entries == 0
        arena.drop_unleased()
        assert arena.stats().bytes_used == 0


@pytest.fixture
async def line() -> AsyncIterator[tuple[PreprocessProcess, Peer]]:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(["sleep", "600"])  # to have a process id
    peer = Peer(*await asyncio.open_connection(sock=theirs))
    process = PreprocessProcess(child.pid, *await asyncio.open_connection(sock=ours))
    peer.say(Began())
    yield process, peer
    peer.writer.close()
    await process.end()
    assert child.wait(20) == -9
    assert not process.is_alive()


Line = tuple[PreprocessProcess, Peer]


def done(nbytes: int) -> Done:
    return Done(IDENTITY, nbytes, (), {}, [], [])


async def test_space_is_reserved_written_elsewhere_and_sealed(
    line: Line, arena: Arena
) -> None:
    process, peer = line
    running = asyncio.create_task(process.run(WORK, arena))
    assert await peer.hear() == WORK
    peer.say(Measured(100))
    place = await peer.hear()
    assert isinstance(place, Place) and place.offset is not None
    peer.say(done(100))
    finished = await within(running)
    assert finished.lease.entry.offset == place.offset  # type: ignore[union-attr]
    assert finished.lease.entry.identity == IDENTITY  # type: ignore[union-attr]


async def test_a_reservation_of_a_lost_process_is_freed(line: Line, arena: Arena) -> None:
    process, peer = line
    running = asyncio.create_task(process.run(WORK, arena))
    peer.say(Measured(100))
    await peer.hear()
    await peer.hear()
    assert arena.stats().bytes_used > 0
    peer.writer.close()
    with pytest.raises(PeerLost):
        await within(running)
    assert arena.stats().bytes_used == 0


async def test_space_is_given_back_only_when_its_writer_is_gone(
    line: Line, arena: Arena
) -> None:
    process, peer = line
    running = asyncio.create_task(process.run(WORK, arena))
    peer.say(Measured(100))
    await peer.hear()
    await peer.hear()
    running.cancel()
    await asyncio.sleep(0)
    assert arena.stats().bytes_used > 0  # the line is open: somebody might still write
    peer.writer.close()
    with pytest.raises(asyncio.CancelledError):
        await within(running)
    assert not process.is_alive()


async def test_without_room_the_process_is_told_and_goes_on(
    line: Line, arena: Arena
) -> None:
    process, peer = line
    running = asyncio.create_task(process.run(WORK, arena))
    peer.say(Measured(1 << 20))
    await peer.hear()
    assert await peer.hear() == Place(None)
    with pytest.raises(NoRoom):
        await within(running)
    running = asyncio.create_task(process.run(WORK, arena))
    peer.say(Began())
    peer.say(Failed(unreadable=True, reason="broken"))
    assert await within(running) == Failed(unreadable=True, reason="broken")


@pytest.mark.parametrize(
    "answers", [[done(5)], [Place(1)], [Measured(100), done(99)], [Measured(100), Place(1)]]
)
async def test_answers_that_make_no_sense_are_refused(
    line: Line, arena: Arena, answers: list[Message]
) -> None:
    process, peer = line
    for answer in answers:
        peer.say(answer)
    running = asyncio.create_task(process.run(WORK, arena))
    await peer.hear()
    peer.writer.write_eof()
    with pytest.raises(BadMessage):
        await within(running)


async def test_a_process_that_never_began_is_told_from_one_that_ended_over_an_item(
    line: Line, arena: Arena
) -> None:
    process, peer = line
    peer.say(Failed(unreadable=False, reason="the first item"))
    await within(process.run(WORK, arena))
    peer.writer.close()
    with pytest.raises(NeverBegan):
        await within(process.run(WORK, arena))


async def test_bytes_that_are_no_message_are_refused(line: Line, arena: Arena) -> None:
    process, peer = line
    peer.writer.write(length_prefix(b"junk") + b"junk")
    with pytest.raises(BadMessage):
        await within(process.run(WORK, arena))

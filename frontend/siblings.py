"""What the frontend processes of one ``--frontends`` tell each other about themselves.

Behind one port, the kernel chooses the process that answers. For what concerns all of
them (metrics, the dashboard) that one asks the others, each over a Unix socket in a
directory that their supervisor has made for them. Each has the lowest number that is free
when it starts, so that one that is started again has its predecessor's.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transfer.errors import TransferError

logger = logging.getLogger(__name__)

MOST = 64
"""Processes of one ``--frontends``, see configs/schema.py."""

ANSWER_SECONDS = 2.0
"""A sibling that has not answered for so long is left out."""

LONGEST_QUESTION = 256
LONGEST_ANSWER = 16 << 20

Answer = Callable[[str], Awaitable[bytes]]

_PREFIX = "foveal-frontends-"


@contextmanager
def meeting_place(parent: Path | None = None) -> Iterator[Path]:
    """A new directory of mode 0700 for the processes that are started within.

    What one left that was killed is removed on the occasion.
    """
    parent = parent or Path(tempfile.gettempdir())
    for left_over in parent.glob(f"{_PREFIX}*-*"):
        owner = left_over.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(left_over, ignore_errors=True)
    prefix = f"{_PREFIX}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as directory:
        yield Path(directory)


class Siblings:
    """One process among them."""

    def __init__(self, directory: Path | None) -> None:
        """Take a number. Without a directory there are no others, and the number is 0.

        Raises:
            TransferError: there are too many already.
        """
        self._directory = directory
        self._server: asyncio.Server | None = None
        self._lock = -1
        self.number = 0
        if directory is not None:
            self.number = self._take_number(directory)

    async def serve(self, answer: Answer) -> None:
        """Answer the others from now on."""
        if self._directory is None:
            return

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    line = await reader.readuntil(b"\n")
                    writer.write(await answer(line.decode().strip()))
                    await writer.drain()
            except Exception as error:  # whatever it is, it does without
                logger.warning("a sibling got no answer: %r", error)
            finally:
                writer.close()

        path = self._socket(self.number)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(reply, path, limit=LONGEST_QUESTION)

    async def ask_all(self, question: str) -> dict[int, bytes]:
        """Ask every other process; returns the answers by number."""
        if self._directory is None:
            return {}
        numbers = [
            int(path.stem)
            for path in self._directory.glob("*.sock")
            if path.stem.isdecimal() and int(path.stem) != self.number
        ]
        answers = await asyncio.gather(*(self.ask(number, question) for number in numbers))
        return {n: a for n, a in zip(numbers, answers, strict=True) if a is not None}

    async def ask(self, number: int, question: str) -> bytes | None:
        """Ask one process; None when it does not answer."""
        if self._directory is None:
            return None
        writer = None
        # Nobody listens, it takes too long, or says too much.
        with suppress(OSError, TimeoutError, ValueError):
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    reader, writer = await asyncio.open_unix_connection(
                        self._socket(number), limit=LONGEST_ANSWER
                    )
                    writer.write(f"{question}\n".encode())
                    answer = bytearray()
                    while chunk := await reader.read(1 << 16):
                        answer += chunk
                        if len(answer) > LONGEST_ANSWER:
                            return None
                    return bytes(answer)
            finally:
                if writer is not None:
                    writer.close()
        return None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._socket(self.number).unlink(missing_ok=True)
            self._server = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_number(self, directory: Path) -> int:
        for number in range(MOST):
            # Held as long as this process lives, whatever its end.
            lock = os.open(directory / f"{number}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            return number
        raise TransferError(f"{MOST} frontends use {directory} already")

    def _socket(self, number: int) -> Path:
        if self._directory is None:
            raise RuntimeError("there are no siblings")
        return self._directory / f"{number}.sock"

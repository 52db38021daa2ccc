"""The frontend's hold on its template and on the preprocess processes forked from it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from frontend.preprocess.messages import (
    LENGTH_BYTES,
    Began,
    Done,
    Failed,
    Measured,
    Message,
    Place,
    Setup,
    SetupFailed,
    TemplateReady,
    Up,
    Work,
    decode,
    encode,
    length_of,
    length_prefix,
)
from transfer.arena import Arena
from transfer.errors import ArenaFull, BadMessage, PeerLost
from transfer.leases import Lease, Reservation

TEMPLATE = (sys.executable, "-m", "frontend.preprocess.template")
ANSWER_BYTES = 1 << 16
FORK_SECONDS = 30.0
"""How long a template may take to fork. It takes milliseconds, but has to wait for a
processor that nobody else wants."""
END_SECONDS = 10.0
"""How long a killed process is waited for."""

ONE_THREAD = {
    # A template forks itself, and processes share the cores among them.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The frontend has said it all while it made the same configuration.
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class NoProcesses(Exception):
    """Preprocess processes cannot be started; the text says why."""


class NeverBegan(PeerLost):
    """A process ended before it began with an item."""


class NoRoom(Exception):
    """The arena has no room for an item's tensors."""


@dataclass(frozen=True)
class Finished:
    """A processed item: its small parts, and a lease on the large ones if it has any."""

    done: Done
    lease: Lease | None


class PreprocessProcess:
    """One process, which works on one item at a time."""

    def __init__(
        self,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Raises: ProcessLookupError: it has ended already."""
        self.pid = pid
        self._pidfd: int | None = os.pidfd_open(pid)
        self._reader = reader
        self._writer = writer

    async def run(self, work: Work, arena: Arena) -> Finished | Failed:
        """Have one item processed. After any exception but NoRoom the process must end.

        Raises:
            NoRoom: the arena is full of images in use.
            NeverBegan: the process had ended before.
            PeerLost: it has ended over the item.
            BadMessage: it said something that makes no sense.
        """
        try:
            await self._send(work)
            began = await self._receive()
        except PeerLost as error:
            raise NeverBegan(f"process {self.pid} had ended before") from error
        if not isinstance(began, Began):
            raise BadMessage(f"{type(began).__name__} before the work began")
        message = await self._receive()
        if isinstance(message, Failed):
            return message
        if isinstance(message, Done):
            if message.nbytes:
                raise BadMessage("tensors were written without a place for them")
            return Finished(message, None)
        if not isinstance(message, Measured):
            raise BadMessage(f"{type(message).__name__} in answer to work")
        reservation = _reserve(arena, message.nbytes)
        if reservation is None:
            await self._send(Place(None))
            raise NoRoom
        try:
            await self._send(Place(reservation.offset))
            done = await self._receive()
            if not isinstance(done, Done) or done.nbytes != message.nbytes:
                raise BadMessage(f"{type(done).__name__} in answer to a place")
            return Finished(done, reservation.seal(done.identity))
        except BaseException:
            # The space must not be used again while the process may still write to it.
            await asyncio.shield(self.end())
            raise
        finally:
            reservation.cancel()

    def is_alive(self) -> bool:
        if self._pidfd is None:
            return False
        ended, _, _ = select.select([self._pidfd], [], [], 0)
        return not ended

    async def end(self) -> None:
        """Kill the process and wait until it is gone. Doing it again does nothing."""
        if self._pidfd is None:
            return
        pidfd, self._pidfd = self._pidfd, None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        # A process closes its files last, when its memory is gone already.
        try:
            async with asyncio.timeout(END_SECONDS):
                while await self._reader.read(ANSWER_BYTES):
                    pass
        except TimeoutError:
            pass
        except OSError as error:
            _let_go(error)
        self._writer.close()

    async def _send(self, message: Message) -> None:
        body = encode(message)
        try:
            self._writer.writelines((length_prefix(body), body))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # the latter: uvloop, of a closed stream
            raise _lost(error) from None

    async def _receive(self) -> Message:
        return await receive(self._reader)


async def receive(reader: asyncio.StreamReader) -> Message:
    """Raises: PeerLost, BadMessage."""
    try:
        length = length_of(await reader.readexactly(LENGTH_BYTES))
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise _lost(error) from None


def _lost(error: Exception) -> PeerLost:
    _let_go(error)
    return PeerLost(f"a preprocess process has ended: {error or type(error).__name__}")


def _let_go(error: BaseException) -> None:
    """Have a stream's error hold nothing but its text.

    The stream keeps it, and with its traceback, and that of the error it was raised during,
    all that their frames hold, the stream itself included: an item would stay in place
    until the next garbage collection.
    """
    error.__traceback__ = error.__context__ = None


def _reserve(arena: Arena, nbytes: int) -> Reservation | None:
    try:
        return arena.reserve(nbytes)
    except ArenaFull:
        return None


class Template:
    """The process that preprocess processes are forked from."""

    def __init__(self, setup: Setup, command: Sequence[str] = TEMPLATE) -> None:
        """Start it, from the main thread: it ends with the thread that started it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
            )
        ours.setblocking(False)
        self._control = ours
        self._setup = setup

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, seconds: float) -> None:
        """Wait until it can fork.

        Raises:
            NoProcesses: it cannot, or not in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(self._control, encode(self._setup))
                answer = await loop.sock_recv(self._control, ANSWER_BYTES)
        except TimeoutError as error:
            raise NoProcesses(f"the processor was not loaded in {seconds:.0f} s") from error
        except OSError as error:
            raise NoProcesses(f"the template has ended: {error}") from error
        message = decode(answer) if answer else None
        if isinstance(message, SetupFailed):
            raise NoProcesses(message.reason)
        if not isinstance(message, TemplateReady):
            raise NoProcesses("the template has ended")

    async def fork(self) -> PreprocessProcess:
        """Start one preprocess process.

        Raises:
            NoProcesses: the template is gone, or does not answer.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise NoProcesses(f"no more files may be opened: {error}") from error
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            async with asyncio.timeout(FORK_SECONDS):
                reader, writer = await asyncio.open_connection(sock=ours)
                up = await receive(reader)
            if not isinstance(up, Up):
                raise NoProcesses(f"{type(up).__name__} from a new process")
            return PreprocessProcess(up.pid, reader, writer)
        except (OSError, PeerLost, BadMessage, TimeoutError) as error:
            ours.close()
            raise NoProcesses("the template does not fork any more") from error

    def end(self) -> None:
        """Kill it, and by that every process forked from it."""
        self._control.close()
        self._process.kill()
        self._process.wait()

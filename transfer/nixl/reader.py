"""The side that reads: entries of other processes' arenas, copied into one of ours.

All of NIXL happens in one thread, because a READ over shared memory is a copy within the
call. The thread sleeps while nothing is under way, and NIXL lets go of the interpreter
while it copies.

An entry's payload is read first and its header afterwards: a header that still stands
then proves that the payload had not been replaced (``arena_layout``). Whoever asked may
stop waiting at any time; the READ goes on, and its target stays reserved until it ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from transfer.arena import Arena
from transfer.arena_layout import (
    ARENA_HEADER_BYTES,
    ENTRY_HEADER_BYTES,
    PAGE_BYTES,
    arena_nonce_and_size,
    entry_header,
)
from transfer.errors import NixlUnavailable, ReadFailed, StaleRef, TransferError
from transfer.leases import Reservation
from transfer.nixl.agent import NixlAgent, Read, address_of
from transfer.tensor_ref import EntryRef, RemoteArena

logger = logging.getLogger(__name__)

PAUSES = ((1.0, 0.0002), (10.0, 0.005))
"""Up to this age in seconds a READ is looked after so often; an older one ..."""
LATE_PAUSE = 0.1

Steps = Generator[Read, None, None]


@dataclass
class _Work:
    """Something to be done for one peer, a READ at a time."""

    peer: str
    steps: Callable[[NixlAgent], Steps]
    kept: tuple[Reservation, ...]
    """Where it writes; not to be given away before its end."""
    done: Future[Reservation] = field(default_factory=Future)
    """Becomes the first of these."""
    started: float = field(default_factory=time.monotonic)
    running: Steps | None = None
    read: Read | None = None


class ArenaReader:
    """Reads into ``arena``. Makes its agent, and registers the arena, when started."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._commands: queue.SimpleQueue[_Work | str | None] = queue.SimpleQueue()
        self._under_way: list[_Work] = []
        self._known: set[str] = set()
        self._leaving: set[str] = set()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="NIXL reader", daemon=True)

    def start(self) -> Future[None]:
        """Make the agent. Its failure is raised by the future as NixlUnavailable."""
        self._thread.start()
        return self._started

    def connect(self, remote: RemoteArena) -> Future[Reservation]:
        """Get to know an arena's agent, and read the arena's header by way of proof.

        The future raises ReadFailed when it cannot be read, or is another arena.
        Connecting again renews a broken connection.

        Raises:
            ArenaFull: there is no room here, not even for the header.
        """
        target = self._arena.reserve(ARENA_HEADER_BYTES)

        def steps(agent: NixlAgent) -> Steps:
            # Not while it is being read from: those READs would seem to end, and go on.
            if not any(w.peer == remote.agent and w.read for w in self._under_way):
                agent.drop_peer(remote.agent)
                agent.add_peer(remote.agent, remote.metadata)
                self._known.add(remote.agent)
            local = address_of(target.memory)
            target.memory[:] = bytes(ARENA_HEADER_BYTES)
            yield agent.read(remote.agent, remote.address, local, ARENA_HEADER_BYTES)
            stated = arena_nonce_and_size(bytes(target.memory))
            if stated != (remote.arena.nonce, remote.nbytes):
                raise ReadFailed(f"what is read is not arena {remote.arena.name}")

        return self._do(remote.agent, steps, target)

    def read(self, remote: RemoteArena, entry: EntryRef) -> Future[Reservation]:
        """Copy the payload of ``entry`` here; the future is the space that holds it.

        The future raises StaleRef when the entry was not, or did not stay, what the
        reference says, and ReadFailed when it cannot be read.

        Raises:
            StaleRef: no entry of that arena can be like this.
            ArenaFull: there is no room for it.
        """
        expected = _checked_header(remote, entry)
        target = self._arena.reserve(entry.nbytes)
        header = self._arena.reserve(ENTRY_HEADER_BYTES)

        def steps(agent: NixlAgent) -> Steps:
            start = remote.address + entry.offset
            yield agent.read(remote.agent, start, address_of(target.memory), entry.nbytes)
            # What an earlier user of this memory left must not pass for an answer.
            header.memory[:] = bytes(ENTRY_HEADER_BYTES)
            yield agent.read(
                remote.agent,
                start - ENTRY_HEADER_BYTES,
                address_of(header.memory),
                ENTRY_HEADER_BYTES,
            )
            if header.memory != expected:
                raise StaleRef(f"generation {entry.generation} is no longer there")

        return self._do(remote.agent, steps, target, header)

    def disconnect(self, remote: RemoteArena) -> None:
        """Drop what is known of an arena's agent, once nothing is read from it."""
        self._commands.put(remote.agent)

    def close(self, seconds: float = 5.0) -> None:
        """End the thread. What is under way fails."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(seconds)

    def _do(
        self, peer: str, steps: Callable[[NixlAgent], Steps], *kept: Reservation
    ) -> Future[Reservation]:
        work = _Work(peer, steps, kept)
        # So that nobody can cancel it: it is over when the READ is.
        work.done.set_running_or_notify_cancel()
        self._commands.put(work)
        return work.done

    def _run(self) -> None:
        try:
            agent = NixlAgent(self._arena.memory(), "reader")
        except NixlUnavailable as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while self._take_command(agent):
                self._advance(agent)
        finally:
            for work in self._under_way:
                work.done.set_exception(ReadFailed("this process is stopping"))
            agent.close()

    def _take_command(self, agent: NixlAgent) -> bool:
        """Wait for something to do; False when it is time to end."""
        try:
            command = self._commands.get(timeout=self._pause())
        except queue.Empty:
            return True
        if isinstance(command, _Work):
            self._leaving.discard(command.peer)
            self._under_way.append(command)
        elif command is not None:
            self._leaving.add(command)
        return command is not None

    def _pause(self) -> float | None:
        """How long to sleep; None when nothing is under way."""
        if not self._under_way:
            return None
        age = time.monotonic() - max(work.started for work in self._under_way)
        return next((pause for limit, pause in PAUSES if age < limit), LATE_PAUSE)

    def _advance(self, agent: NixlAgent) -> None:
        for work in list(self._under_way):
            try:
                over = self._advance_one(agent, work)
            except Exception as error:  # what is not foreseen must not end the others
                self._under_way.remove(work)
                for reservation in work.kept:
                    reservation.cancel()
                if not isinstance(error, TransferError):
                    logger.exception("reading from %s", work.peer)
                    error = ReadFailed(f"{type(error).__name__}: {error}")
                work.done.set_exception(error)
            else:
                if over:
                    self._under_way.remove(work)
                    work.done.set_result(work.kept[0])
        busy = {work.peer for work in self._under_way}
        for peer in self._leaving - busy:
            agent.drop_peer(peer)
            self._known.discard(peer)
        self._leaving &= busy

    def _advance_one(self, agent: NixlAgent, work: _Work) -> bool:
        if work.running is None:
            work.running = work.steps(agent)
            work.read = next(work.running)
        while work.read is not None and work.read.poll():
            work.read = None
            with suppress(StopIteration):
                work.read = next(work.running)
        return work.read is None


def _checked_header(remote: RemoteArena, entry: EntryRef) -> bytes:
    """Return the header that stands before ``entry`` while it is good."""
    if entry.arena != remote.arena.name:
        raise StaleRef(f"a reference to arena {entry.arena!r}, not {remote.arena.name}")
    start = entry.offset - ENTRY_HEADER_BYTES
    inside = start >= PAGE_BYTES and 0 < entry.nbytes <= remote.nbytes - entry.offset
    if not inside or start % PAGE_BYTES:
        raise StaleRef(f"no entry of {entry.nbytes} bytes can be at {entry.offset}")
    try:
        return entry_header(entry)
    except ValueError as error:
        raise StaleRef(f"no entry can be like this: {error}") from error

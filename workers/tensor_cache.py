"""Tensors that frontends of other hosts have sent, kept by canonical identity.

They lie in an arena of this worker, which its engine's processes map as they map the
arenas of frontends of this host. What nobody leases is evicted, least recently used
first, when room is needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from transfer.arena import Arena
from transfer.errors import BadMessage, ReadFailed, TransferError
from transfer.leases import Lease
from transfer.nixl.reader import ArenaReader
from transfer.tensor_ref import EntryRef
from workers.nixl_source import NixlSource

logger = logging.getLogger(__name__)


@dataclass
class PullCounts:
    """Of this worker since its start."""

    pulls: int = 0
    """Entries that were read."""
    nbytes: int = 0
    hits: int = 0
    """Entries that were here already."""
    failures: int = 0


@dataclass(frozen=True)
class Pull:
    """An entry on its way. Its lease lasts as long as the task is kept."""

    entry: EntryRef
    source: NixlSource
    task: asyncio.Task[Lease]


class TensorCache:
    """Finds entries here, or pulls them. Used on one event loop."""

    def __init__(self, arena: Arena, reader: ArenaReader, timeout: float) -> None:
        """``timeout``: seconds that anybody waits for entries."""
        self._arena = arena
        self._reader = reader
        self._timeout = timeout
        self._pulls: dict[bytes, Pull] = {}
        """By identity: each is pulled once, whoever needs it."""
        self.counts = PullCounts()

    def find(self, entry: EntryRef) -> Lease | None:
        """Lease what ``entry`` holds, if it is here."""
        lease = self._arena.lease(entry.identity)
        if lease is None or lease.entry.nbytes != entry.nbytes:
            return None
        self.counts.hits += 1
        return lease

    def pull(self, source: NixlSource, entry: EntryRef) -> Pull:
        """Begin to read ``entry``, or join whoever has begun."""
        pull = self._pulls.get(entry.identity)
        # Not one from a frontend that has gone: it may end late, or never.
        if pull is None or not pull.source.works:
            task = asyncio.create_task(self._read(source, entry), name="pull")
            pull = self._pulls[entry.identity] = begun = Pull(entry, source, task)
            task.add_done_callback(lambda _: self._forget(begun))
            task.add_done_callback(_look_at_error)
        return pull

    async def wait(self, pulls: Sequence[Pull]) -> list[Lease]:
        """Lease what pulls bring. They go on when this is cancelled, or takes too long.

        Raises:
            ReadFailed: one failed, or takes too long.
            StaleRef: the owner holds something else by now.
            ArenaFull: there is no room here.
            BadMessage: other bytes are known here by an identity.
        """
        if pulls:
            await asyncio.wait([pull.task for pull in pulls], timeout=self._timeout)
        leases = []
        for pull in pulls:
            if not pull.task.done():
                reason = f"NIXL: no tensors within {self._timeout:.1f} s"
                pull.source.fail(reason)
                raise ReadFailed(reason)
            pull.task.result()
            lease = self._arena.lease(pull.entry.identity)
            if lease is None or lease.entry.nbytes != pull.entry.nbytes:
                raise BadMessage("other bytes are known by this identity")
            leases.append(lease)
        return leases

    def _forget(self, pull: Pull) -> None:
        if self._pulls.get(pull.entry.identity) is pull:
            del self._pulls[pull.entry.identity]

    def drop_unleased(self) -> None:
        """Forget what no request needs."""
        self._arena.drop_unleased()

    async def _read(self, source: NixlSource, entry: EntryRef) -> Lease:
        began = time.monotonic()
        with source.reading() as outcome:
            try:
                space = await asyncio.wrap_future(self._reader.read(source.arena, entry))
            except TransferError as error:
                outcome.failures = 1
                self.counts.failures += 1
                logger.warning("a pull of %d bytes failed: %s", entry.nbytes, error)
                if isinstance(error, ReadFailed):
                    source.fail(str(error))
                raise
            outcome.pulls, outcome.nbytes = 1, entry.nbytes
            outcome.seconds = time.monotonic() - began
        self.counts.pulls += 1
        self.counts.nbytes += entry.nbytes
        return space.seal(entry.identity)


def _look_at_error(task: asyncio.Task[Lease]) -> None:
    """It has been logged, and perhaps nobody waits for it any more."""
    if not task.cancelled():
        task.exception()

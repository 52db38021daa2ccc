"""Encoder outputs of other hosts, read by NIXL into this host's cache.

They pass through the arena that tensors of other hosts are read into. Who waits for one is
told when it is in the cache, or why it is not; what comes late but whole is kept all the
same. Nothing that came is trusted: the store checks model, identity, type, shape and every
byte.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from transfer.errors import ArenaFull, ReadFailed, StaleRef, TransferError
from transfer.messages import EmbeddingPulled, PullEmbedding
from transfer.nixl.reader import ArenaReader
from transfer.tensor_ref import RemoteArena
from workers.embedding_cache import HostEmbeddings
from workers.nixl_transfer import NixlTransfer

logger = logging.getLogger(__name__)

MOST_OWNERS = 16
"""Encode workers that stay connected: those of the latest pulls."""


class EmbeddingPulls:
    """What this worker reads for its host. Used on one event loop."""

    def __init__(self, nixl: NixlTransfer, embeddings: HostEmbeddings) -> None:
        self._nixl = nixl
        self._embeddings = embeddings
        self._connected: OrderedDict[str, tuple[RemoteArena, asyncio.Task[None]]] = (
            OrderedDict()
        )
        """By agent, the latest used last."""
        self._under_way: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Count the outputs that are being read, late ones included."""
        return len(self._under_way)

    async def answer(
        self, asked: PullEmbedding, say: Callable[[EmbeddingPulled], None]
    ) -> None:
        """Read an output and say what came of it."""
        try:
            reader = await self._nixl.reader()
            await self._pull_in_time(reader, asked)
        except (TransferError, OSError) as error:
            logger.warning("no encoder output from another host: %s", error)
            say(EmbeddingPulled(asked.move_id, str(error) or repr(error)))
        else:
            say(EmbeddingPulled(asked.move_id))

    async def close(self) -> None:
        """Wait for nothing any more."""
        tasks = [*self._under_way, *(task for _, task in self._connected.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull_in_time(self, reader: ArenaReader, asked: PullEmbedding) -> None:
        """
        Raises:
            TransferError, OSError: it cannot be had, or takes too long.
        """
        pull = asyncio.create_task(self._pull(reader, asked), name="pull of an output")
        self._under_way.add(pull)
        pull.add_done_callback(self._under_way.discard)
        pull.add_done_callback(_look_at_error)
        # Not cancelled when it takes too long: a READ cannot be called off.
        timeout = self._nixl.timeout
        await asyncio.wait([pull], timeout=timeout)
        if not pull.done():
            raise ReadFailed(f"NIXL: no encoder output within {timeout:.1f} s")
        pull.result()

    async def _pull(self, reader: ArenaReader, asked: PullEmbedding) -> None:
        if (held := self._embeddings.lease(asked.identifier)) is not None:
            held.release()
            return
        remote, clears = asked.offer.arena, self._embeddings.clears
        await asyncio.shield(self._connection(reader, remote))
        try:
            space = await asyncio.wrap_future(reader.read(remote, asked.offer.entry))
        except ReadFailed:
            self._disconnect(reader, remote.agent)
            raise
        try:
            self._require_wanted(clears)
            keep = self._embeddings.keep
            kept = await asyncio.to_thread(keep, asked.identifier, space.memory)
        finally:  # at once: an error that is raised here may live until it is collected
            space.cancel()
        if not kept:
            raise ArenaFull("the cache has no room for an encoder output")
        try:
            self._require_wanted(clears)
        except StaleRef:
            self._embeddings.forget(asked.identifier)
            raise

    def _require_wanted(self, clears: int) -> None:
        """
        Raises:
            StaleRef: the cache was cleared since: the output may be one of other weights.
        """
        if self._embeddings.clears != clears:
            raise StaleRef("all encoder outputs were to be forgotten meanwhile")

    def _connection(self, reader: ArenaReader, remote: RemoteArena) -> asyncio.Task[None]:
        """The connection to an encode worker, made unless it stands."""
        known, connecting = self._connected.get(remote.agent, (None, None))
        if connecting is None or known != remote or _has_failed(connecting):
            connecting = asyncio.create_task(_connect(reader, remote), name="connection")
            connecting.add_done_callback(_look_at_error)
            self._connected[remote.agent] = (remote, connecting)
        self._connected.move_to_end(remote.agent)
        while len(self._connected) > MOST_OWNERS:
            self._disconnect(reader, next(iter(self._connected)))
        return connecting

    def _disconnect(self, reader: ArenaReader, agent: str) -> None:
        with suppress(KeyError):
            remote, _ = self._connected.pop(agent)
            reader.disconnect(remote)


async def _connect(reader: ArenaReader, remote: RemoteArena) -> None:
    await asyncio.wrap_future(reader.connect(remote))


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _look_at_error(task: asyncio.Task[None]) -> None:
    """It has been said, or nobody waits any more."""
    if not task.cancelled():
        task.exception()

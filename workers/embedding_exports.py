"""Encoder outputs of this host, made readable for workers of other hosts.

An encode worker copies what it is asked for from its host's cache to an arena of its own
and offers that by NIXL. A copy stays in place, and the agent is driven, until the frontend
that asked says that it has been read, or has gone, or ``LEASE_SECONDS`` have passed.

Arena and agent are made with the first that is asked for: an agent listens on the network,
so there should be none where none is needed. If it does not work here, it is not tried
again by this process.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass

import xxhash

from transfer.arena import Arena
from transfer.arena_file import sweep_dead_arenas
from transfer.arena_layout import SHM
from transfer.errors import ReadFailed, StaleRef, TransferError
from transfer.leases import Lease
from transfer.messages import (
    EmbeddingExported,
    EmbeddingOffer,
    ExportEmbedding,
    WorkerFacts,
)
from transfer.nixl.export import ArenaExport
from workers.embedding_cache import GIB, HostEmbeddings

logger = logging.getLogger(__name__)

MOST_GIB = 0.5
"""Outputs only pass through, so little is enough; never more than the flag allows."""
START_SECONDS = 30.0
"""How long anybody waits for arena and agent to be made."""
LEASE_SECONDS = 30.0
"""Longer than anybody waits for an output. A READ that is late may still end meanwhile."""


@dataclass
class _Exported:
    lease: Lease
    end: asyncio.TimerHandle


class EmbeddingExports:
    """What others may read of this host's outputs. Used on one event loop."""

    def __init__(self, embeddings: HostEmbeddings, cache_gib: float | None) -> None:
        """``cache_gib``: what ``--mm-worker-cache-gb`` allows."""
        self._embeddings = embeddings
        self._gib = MOST_GIB if cache_gib is None else min(MOST_GIB, cache_gib)
        self._making: asyncio.Task[None] | None = None
        self._arena: Arena | None = None
        self._export: ArenaExport | None = None
        self._unusable = "" if self._gib else "--mm-worker-cache-gb is 0"
        self._exported: dict[tuple[str, int], _Exported] = {}
        """By frontend and its number for it."""

    def __len__(self) -> int:
        """Count what is kept in place for others to read."""
        return len(self._exported)

    async def answer(self, frontend: str, asked: ExportEmbedding) -> EmbeddingExported:
        """Make an output readable; the answer says why it cannot be had."""
        try:
            offer = await self._offer(frontend, asked)
        except (TransferError, OSError) as error:
            logger.warning("cannot hand over an encoder output: %s", error)
            return EmbeddingExported(asked.move_id, error=str(error))
        return EmbeddingExported(asked.move_id, offer)

    def release(self, frontend: str, move_id: int) -> None:
        """Note that nobody reads this any more. Doing it again does nothing."""
        exported = self._exported.pop((frontend, move_id), None)
        if exported is not None:
            exported.end.cancel()
            exported.lease.release()
            if self._export is not None:
                self._export.progress_for(_reader(frontend, move_id), 0.0)

    def forget(self, frontend: str) -> None:
        """Drop what a frontend that has gone had asked for."""
        for name, move_id in list(self._exported):
            if name == frontend:
                self.release(name, move_id)

    async def close(self) -> None:
        """Withdraw all of it. Readers see the connection end."""
        for name, move_id in list(self._exported):
            self.release(name, move_id)
        if self._making is not None:
            await asyncio.wait([self._making], timeout=LEASE_SECONDS)
        self._unusable = "this worker is leaving"
        await self._unmake()

    async def _offer(self, frontend: str, asked: ExportEmbedding) -> EmbeddingOffer:
        held = self._embeddings.lease(asked.identifier)
        if held is None:
            raise StaleRef("the encoder output is not in the cache")
        try:
            if self._making is None:
                self._making = asyncio.create_task(self._make())
            await asyncio.wait([self._making], timeout=START_SECONDS)
            if not self._making.done():
                raise ReadFailed(f"NIXL: no agent within {START_SECONDS:.0f} s")
            arena, export = self._arena, self._export
            if arena is None or export is None:
                raise ReadFailed(self._unusable)
            # Named by its contents: an image may come to have another output.
            identity = xxhash.xxh3_128_digest(held.header)
            lease = arena.lease(identity)
            if lease is None:
                space = arena.reserve(held.nbytes)
                try:
                    await asyncio.to_thread(held.copy_to, space.memory)
                except StaleRef:
                    self._embeddings.forget(asked.identifier)
                    raise
                lease = space.seal(identity)
        finally:
            held.release()
        move = (frontend, asked.move_id)
        self.release(*move)
        end = asyncio.get_running_loop().call_later(LEASE_SECONDS, self.release, *move)
        self._exported[move] = _Exported(lease, end)
        export.progress_for(_reader(*move), LEASE_SECONDS)
        return EmbeddingOffer(export.remote, lease.entry)

    async def _make(self) -> None:
        if self._unusable:
            return
        try:
            await asyncio.to_thread(sweep_dead_arenas)
            gib = min(self._gib, shutil.disk_usage(SHM).free / 2 / GIB)
            logger.info("taking %.2f GiB of %s to hand encoder outputs over", gib, SHM)
            self._arena = await asyncio.to_thread(Arena, int(gib * GIB))
            self._export = await asyncio.to_thread(ArenaExport, self._arena)
        except Exception as error:  # whatever it is, those who wait must be told
            self._unusable = str(error) or repr(error)
            logger.error("NIXL is switched off for encoder outputs: %s", error)
            await self._unmake()

    async def _unmake(self) -> None:
        if self._export is not None:
            await asyncio.to_thread(self._export.close)
            self._export = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def exports_of(
    embeddings: HostEmbeddings | None, facts: WorkerFacts, cache_gib: float | None
) -> EmbeddingExports | None:
    """What a worker hands over of ``embeddings``: nothing unless it only encodes."""
    if embeddings is None or facts.role != "encode":
        return None
    return EmbeddingExports(embeddings, cache_gib)


def _reader(frontend: str, move_id: int) -> str:
    """Under what name the agent is driven."""
    return f"{frontend} {move_id}"

"""Tensors of frontends that share no memory with this worker, pulled by NIXL.

Everything is made when a frontend first offers its arena: a NIXL agent listens on the
network and lets whoever can speak to it read and write, so there should be none where
none is needed. If it does not work here, it is not tried again by this process.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

from transfer.arena import Arena
from transfer.arena_file import sweep_dead_arenas
from transfer.arena_layout import SHM
from transfer.errors import NixlUnavailable, ReadFailed
from transfer.messages import Pulling, TransferChosen
from transfer.nixl.reader import ArenaReader
from transfer.tensor_ref import RemoteArena
from workers.frontends import Frontend
from workers.nixl_source import NixlSource
from workers.tensor_cache import TensorCache

logger = logging.getLogger(__name__)

GIB = 1 << 30
START_SECONDS = 60.0
RETRY_SECONDS = 30.0
"""How long after a failure a frontend's arena is tried again."""

Say = Callable[[TransferChosen | Pulling], None]


class NixlTransfer:
    """What this worker has of NIXL. Used on one event loop."""

    def __init__(
        self,
        cache_gib: float | None,
        timeout: float,
        attach: Callable[[str, bytes], Awaitable[str]],
    ) -> None:
        """``attach`` has the engine map an arena, and returns why it cannot, or nothing."""
        self._cache_gib = cache_gib
        self.timeout = timeout
        """Seconds that anybody waits for a READ."""
        self._attach = attach
        self._unusable = ""
        if cache_gib == 0:
            self._unusable = "--mm-worker-cache-gb is 0"
        elif find_spec("nixl") is None:
            self._unusable = "NIXL is not installed"
        self._starting: asyncio.Task[None] | None = None
        self._arena: Arena | None = None
        self._reader: ArenaReader | None = None
        self.cache: TensorCache | None = None
        self._connections: dict[str, asyncio.Task[None]] = {}
        """By frontend, what keeps its arena in reach."""

    @property
    def unusable(self) -> str:
        """Why this worker would not take an offer; empty when it would."""
        return self._unusable

    async def reader(self) -> ArenaReader:
        """What reads into this worker's arena; starts it with the first that asks.

        Raises:
            NixlUnavailable: NIXL does not work here.
        """
        if not await self._started() or self._reader is None:
            raise NixlUnavailable(self._unusable or "this worker is leaving")
        return self._reader

    def accept(self, frontend: Frontend, arena: RemoteArena, say: Say) -> None:
        """Take a frontend's offer; what comes of it is said by ``TransferChosen``."""
        self._end_connection(frontend.name)
        self._connections[frontend.name] = asyncio.create_task(
            self._keep_in_reach(frontend, arena, say), name=f"NIXL to {frontend.name}"
        )

    def forget(self, frontend: Frontend) -> None:
        """Drop what is known of a frontend that has gone."""
        self._end_connection(frontend.name)
        self._drop_source(frontend)

    async def close(self) -> None:
        """Stop reading. Call when the engine reads nothing any more."""
        for name in list(self._connections):
            self._end_connection(name)
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=self.timeout)
        if self.cache is not None:
            logger.info("NIXL: %s", self.cache.counts)
        await self._unmake_cache()

    async def _keep_in_reach(self, frontend: Frontend, arena: RemoteArena, say: Say) -> None:
        """Connect, and again after failures, until cancelled."""
        if arena.arena != frontend.arena:
            say(TransferChosen("inline", "what it offers is not its arena"))
            return
        if not await self._started():
            say(TransferChosen("inline", self._unusable))
            return
        self._drop_source(frontend)
        source = frontend.source = NixlSource(arena, say)
        connecting, known = None, ""
        while True:
            if connecting is None or connecting.done():
                connecting = asyncio.create_task(self._connect(source))
                connecting.add_done_callback(_look_at_error)
            if reason := await self._outcome(connecting):
                say(TransferChosen("inline", reason))
            else:
                logger.info("frontend %s: its arena is read by NIXL", frontend.name)
                say(TransferChosen("nixl", "the worker reads the arena by NIXL"))
                reason = await source.failure()
                say(TransferChosen("inline", reason))
            if reason != known:
                logger.warning("frontend %s is beyond NIXL: %s", frontend.name, reason)
            known = reason
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self, source: NixlSource) -> None:
        if self._reader is None:
            raise ReadFailed("NIXL has not been started")
        with source.reading():
            await asyncio.wrap_future(self._reader.connect(source.arena))
        source.works = True

    async def _outcome(self, connecting: asyncio.Task[None]) -> str:
        """Why a connection did not come about in time; empty when it did."""
        await asyncio.wait([connecting], timeout=self.timeout)
        if not connecting.done():
            return f"NIXL: no connection within {self.timeout:.1f} s"
        error = connecting.exception()
        return "" if error is None else str(error)

    async def _started(self) -> bool:
        """Start once; tells whether NIXL works here."""
        if self._unusable:
            return False
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return not self._unusable

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._make_cache()
        except Exception as error:  # whatever it is, those who wait must be told
            self._unusable = str(error) or f"no start within {START_SECONDS:.0f} s"
            logger.error("NIXL is switched off in this process: %s", self._unusable)
            await self._unmake_cache()

    async def _make_cache(self) -> None:
        await asyncio.to_thread(sweep_dead_arenas)
        gib = self._cache_gib
        if gib is None:
            gib = min(4.0, shutil.disk_usage(SHM).free / 2 / GIB)
        logger.info("taking %.2f GiB of %s for tensors from other hosts", gib, SHM)
        self._arena = await asyncio.to_thread(Arena, int(gib * GIB))
        self._reader = ArenaReader(self._arena)
        await asyncio.wrap_future(self._reader.start())
        arena = self._arena.id
        if problem := await self._attach(arena.name, arena.nonce):
            raise ReadFailed(f"the engine cannot map the worker's arena: {problem}")
        self.cache = TensorCache(self._arena, self._reader, self.timeout)

    async def _unmake_cache(self) -> None:
        if self._reader is not None:
            await asyncio.to_thread(self._reader.close)
            self._reader = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _end_connection(self, name: str) -> None:
        if (task := self._connections.pop(name, None)) is not None:
            task.cancel()

    def _drop_source(self, frontend: Frontend) -> None:
        if frontend.source is None:
            return
        frontend.source.close()
        if self._reader is not None:
            self._reader.disconnect(frontend.source.arena)
        frontend.source = None


def _look_at_error(connecting: asyncio.Task[None]) -> None:
    """The frontend may have gone meanwhile, and then nobody else does."""
    if not connecting.cancelled():
        connecting.exception()

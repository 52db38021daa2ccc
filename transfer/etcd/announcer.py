"""Keeps what this process announces in etcd, for as long as the process lives.

All keys hang on one lease. A thread renews it, so that an event loop that is busy is not
taken for a dead process; whoever hangs for good is found by the heartbeat of its links.
Where etcd has lost the lease or all it held, everything is announced anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from transfer.errors import EtcdUnavailable
from transfer.etcd.address import EtcdAddress
from transfer.etcd.client import EtcdClient

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10
"""After this time without a sign of life etcd forgets a worker."""
RENEWALS_PER_LEASE = 3
TRY_AGAIN_SECONDS = 0.5
LAST_WORDS_SECONDS = 3.0
"""How long ``close`` waits for etcd."""


class Announcer:
    """A thread that keeps keys alive. Its methods may be called from any thread."""

    def __init__(self, address: EtcdAddress, lease_seconds: int = LEASE_SECONDS) -> None:
        self._address = address
        self._lease_seconds = lease_seconds
        self._wanted: dict[str, bytes] = {}
        self._gone: set[str] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._changed = asyncio.Event()
        self._stopping = False

    def announce(self, key: str, value: bytes) -> None:
        """Have ``key`` hold ``value`` from soon on, until withdrawn or this process ends."""
        self._tell(lambda: self._want(key, value))

    def withdraw(self, key: str) -> None:
        """Have ``key`` gone soon, whoever announced it."""
        self._tell(lambda: self._forget(key))

    def close(self) -> None:
        """Withdraw everything, if etcd answers soon. Doing so twice is no error."""
        if self._thread is not None:
            self._tell(self._stop)
            self._thread.join(2 * LAST_WORDS_SECONDS)

    def _tell(self, change: Callable[[], None]) -> None:
        """Apply ``change`` in the thread, which begins with the first of them.

        Not earlier: what forks before, an engine's process for one, has no thread to lose.
        """

        def apply() -> None:
            change()
            self._changed.set()

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="etcd", daemon=True
                )
                self._thread.start()
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(apply)

    def _want(self, key: str, value: bytes) -> None:
        self._gone.discard(key)
        self._wanted[key] = value

    def _forget(self, key: str) -> None:
        self._wanted.pop(key, None)
        self._gone.add(key)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        client = EtcdClient(self._address)
        lease = ""
        announced: dict[str, bytes] = {}
        troubled = False
        while not self._stopping:
            self._changed.clear()
            try:
                if lease and not await client.keep_alive(lease):
                    logger.warning("etcd has lost our lease: announcing everything again")
                    lease = ""
                if not lease and self._wanted:
                    lease, announced = await client.grant(self._lease_seconds), {}
                await self._catch_up(client, lease, announced)
            except EtcdUnavailable as error:
                if not troubled:
                    logger.warning("%s; trying again until it answers", error)
                troubled = True
            else:
                if troubled:
                    logger.info("etcd at %s answers again", self._address)
                troubled = False
            pause = self._lease_seconds / RENEWALS_PER_LEASE if lease else None
            with suppress(TimeoutError):
                async with asyncio.timeout(TRY_AGAIN_SECONDS if troubled else pause):
                    await self._changed.wait()
        with suppress(EtcdUnavailable, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._catch_up(client, lease, announced)
                if lease:
                    await client.revoke(lease)
        await client.close()

    async def _catch_up(
        self, client: EtcdClient, lease: str, announced: dict[str, bytes]
    ) -> None:
        """Bring etcd from what was ``announced`` to what is wanted."""
        for key in sorted(self._gone):
            await client.delete(key)
            self._gone.discard(key)
            announced.pop(key, None)
        for key, value in list(self._wanted.items()):
            if announced.get(key) != value:
                await client.put(key, value, lease)
                announced[key] = value

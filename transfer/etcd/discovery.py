"""Discovery through etcd: workers on any host, found by frontends on any other.

Under ``foveal/<namespace>/`` there are

- ``workers/<worker>``: what a registry directory has in a file, on a lease that its
  process renews: it is gone seconds after the process;
- ``identity-seed``: the secret seed of image identities. Whoever may read these keys can
  read it, so etcd must be as well guarded as the seed's file would be.

Sockets and whatever else is of one host stay in that host's registry directory.
While etcd does not answer, nobody is forgotten: links have heartbeats of their own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import msgspec

from transfer.errors import EtcdUnavailable
from transfer.etcd.address import EtcdAddress
from transfer.etcd.announcer import LEASE_SECONDS, Announcer
from transfer.etcd.client import Change, EtcdClient, WatchLost
from transfer.identity import SEED_BYTES
from transfer.registry import Registry, WorkerRecord

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
"""How long a process that starts waits for an etcd that does not answer."""
PAUSE_SECONDS = 0.5
READ_AGAIN_SECONDS = 30.0
"""How long one watch is relied on."""


class EtcdDiscovery:
    """The workers of one namespace, as etcd has them."""

    def __init__(
        self,
        address: EtcdAddress,
        namespace: str,
        local: Registry,
        lease_seconds: int = LEASE_SECONDS,
    ) -> None:
        """``local`` is where this host's sockets are."""
        self._address = address
        self._prefix = f"foveal/{namespace}/"
        self._local = local
        self._grace = 2.0 * lease_seconds
        self._announcer = Announcer(address, lease_seconds)

    def shared_seed(self) -> bytes:
        """The deployment's seed, made by whoever comes first.

        Raises:
            EtcdUnavailable: etcd does not answer, or holds something else.
        """
        key = self._prefix + "identity-seed"
        # In a thread, because the caller may be in an event loop; at start it may wait.
        with ThreadPoolExecutor(1) as thread:
            seed = thread.submit(asyncio.run, self._agree_on(key)).result()
        if len(seed) != SEED_BYTES:
            raise EtcdUnavailable(f"{key} in etcd has not the {SEED_BYTES} bytes of a seed")
        return seed

    def socket_directory(self, worker: str) -> Path:
        """Make and return the directory for a worker's sockets, on this host.

        Raises:
            TransferError: its path is too long for Unix sockets.
        """
        return self._local.socket_directory(worker)

    def announce(self, record: WorkerRecord) -> None:
        """Publish ``record`` as soon as etcd takes it."""
        self._announcer.announce(self._key(record.worker), msgspec.json.encode(record))

    def withdraw_record(self, worker: str) -> None:
        """Take ``worker`` off the list; its sockets stay. Doing so twice is no error."""
        self._announcer.withdraw(self._key(worker))

    def withdraw(self, worker: str) -> None:
        """Remove all that belongs to ``worker``. Doing so twice is no error."""
        self.withdraw_record(worker)
        self._local.withdraw(worker)

    def close(self) -> None:
        """Withdraw what this process announced; waits a little for etcd."""
        self._announcer.close()

    async def watch(self) -> AsyncGenerator[dict[str, WorkerRecord]]:
        """Yield the workers now and after every change."""
        client = EtcdClient(self._address)
        known: dict[str, WorkerRecord] = {}
        missed: dict[str, float] = {}
        troubled = False
        try:
            while True:
                try:
                    values, revision = await client.read(self._prefix + "workers/")
                except EtcdUnavailable as error:
                    if not troubled:
                        logger.warning("%s; workers stay as they were last seen", error)
                    troubled = True
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                troubled = False
                present = self._decode_all(values)
                # An etcd that lost its data is told again within a lease's time.
                now = time.monotonic()
                missed = {n: missed.get(n, now) for n in known if n not in present}
                kept = {n for n, since in missed.items() if now - since < self._grace}
                known = {**{n: known[n] for n in kept}, **present}
                yield dict(known)
                patience = self._grace / 2 if kept else READ_AGAIN_SECONDS
                changes_seen = client.watch(self._prefix + "workers/", revision, patience)
                try:
                    async with aclosing(changes_seen):
                        async for changes in changes_seen:
                            if changes:
                                self._apply(changes, known)
                                yield dict(known)
                except WatchLost as error:
                    logger.debug("watching etcd again: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            await client.close()

    async def _agree_on(self, key: str) -> bytes:
        client = EtcdClient(self._address)
        deadline = time.monotonic() + START_SECONDS
        try:
            while True:
                try:
                    return await client.put_if_absent(key, secrets.token_bytes(SEED_BYTES))
                except EtcdUnavailable as error:
                    if time.monotonic() > deadline:
                        raise
                    logger.warning("%s; trying again", error)
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            await client.close()

    def _apply(self, changes: list[Change], known: dict[str, WorkerRecord]) -> None:
        for change in changes:
            name = change.key.rpartition("/")[2]
            if change.value is None:
                known.pop(name, None)
            else:
                known.update(self._decode_all({change.key: change.value}))

    def _decode_all(self, values: dict[str, bytes]) -> dict[str, WorkerRecord]:
        found: dict[str, WorkerRecord] = {}
        for key, value in values.items():
            try:
                record = msgspec.json.decode(value, type=WorkerRecord)
            except msgspec.DecodeError as error:
                logger.warning("ignored %s in etcd: %s", key, error)
                continue
            if record.worker != key.rpartition("/")[2]:
                # What it leaves behind is removed by its name.
                logger.warning("ignored %s in etcd: it speaks of %r", key, record.worker)
            elif record.is_dead():
                logger.info("swept worker %s: its process is gone", record.worker)
                self.withdraw(record.worker)
            elif record.address.startswith("ipc://") and not record.is_local():
                logger.warning(
                    "worker %s listens on a socket of another host: give it --port",
                    record.worker,
                )
            else:
                found[record.worker] = record
        return found

    def _key(self, worker: str) -> str:
        return f"{self._prefix}workers/{worker}"

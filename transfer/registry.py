"""Discovery through a directory: one file per worker, watched, not polled.

``<registry>/<namespace>/`` is private to one user (mode 0700) and holds

- ``<worker>.json``: who a worker is and where it listens, written once it is ready and
  removed when it leaves;
- ``<worker>.d/``: that worker's sockets;
- ``identity-seed``: the secret seed of image identities.

A record whose process is gone (same host, other start time or none) counts for nothing,
and whoever comes along sweeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import watchfiles

from transfer.errors import TransferError
from transfer.identity import load_or_create_seed
from transfer.messages import WorkerFacts
from transfer.process import Process

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0

LONGEST_SOCKET_PATH = 107
"""sun_path of sockaddr_un(7) less its final NUL, in bytes."""


class WorkerRecord(Process, frozen=True, kw_only=True):
    """A worker's process as it announces itself."""

    worker: str
    address: str
    facts: WorkerFacts


class Registry:
    """The registry directory of one namespace."""

    def __init__(self, root: Path | None, namespace: str) -> None:
        if root is None:
            root = default_root()
            _make_private(root)
        self.path = root / namespace
        _make_private(self.path)

    @property
    def seed_path(self) -> Path:
        return self.path / "identity-seed"

    def shared_seed(self) -> bytes:
        """The namespace's secret seed of image identities, made by whoever comes first.

        Raises:
            BadSeed, OSError: it cannot be used, or not be made.
        """
        return load_or_create_seed(self.seed_path)

    def close(self) -> None:
        """Nothing is held open; discovery by etcd has something to do here."""

    def socket_directory(self, worker: str) -> Path:
        """Make and return the directory for a worker's sockets.

        Raises:
            TransferError: its path is too long for Unix sockets.
        """
        path = self.path / f"{worker}.d"
        # The longest name put there is vLLM's: a UUID of 36 characters.
        if len(os.fsencode(path)) + 37 > LONGEST_SOCKET_PATH:
            raise TransferError(
                f"the path {path} is too long for Unix sockets: choose a shorter --registry"
            )
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def announce(self, record: WorkerRecord) -> None:
        """Publish ``record``, at once and whole."""
        target = self.path / f"{record.worker}.json"
        temporary = target.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        temporary.rename(target)

    def withdraw_record(self, worker: str) -> None:
        """Take ``worker`` off the list; its sockets stay. Doing so twice is no error."""
        for suffix in (".json", ".tmp"):
            with contextlib.suppress(FileNotFoundError):
                (self.path / f"{worker}{suffix}").unlink()

    def withdraw(self, worker: str) -> None:
        """Remove all that belongs to ``worker``. Doing so twice is no error."""
        self.withdraw_record(worker)
        shutil.rmtree(self.path / f"{worker}.d", ignore_errors=True)

    def records(self) -> dict[str, WorkerRecord]:
        """The workers that are there now; what dead ones left is swept."""
        found: dict[str, WorkerRecord] = {}
        for path in sorted(self.path.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=WorkerRecord)
            except FileNotFoundError:
                continue
            except (msgspec.DecodeError, OSError) as error:
                logger.warning("ignored %s: %s", path, error)
                continue
            if record.worker != path.stem:
                # What it leaves behind is removed by its name.
                logger.warning("ignored %s: it speaks of %r", path, record.worker)
                continue
            if record.is_dead():
                logger.info("swept worker %s: its process is gone", record.worker)
                self.withdraw(record.worker)
            else:
                found[record.worker] = record
        return found

    async def watch(self) -> AsyncGenerator[dict[str, WorkerRecord]]:
        """Yield ``records()`` now and after every change.

        Where the directory cannot be watched (it is gone, or this host has no watches
        left) it is looked at every second until it can.
        """
        troubled = False
        while True:
            changes = watchfiles.awatch(
                self.path,
                watch_filter=lambda _, path: path.endswith(".json"),
                step=20,
                recursive=False,
                yield_on_timeout=True,  # a file system without events is read anyway
                rust_timeout=5000,
            )
            # Watched before it is read, so that nothing falls in between.
            news = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0)
            try:
                while True:
                    yield self.records()
                    await news
                    troubled = False
                    news = asyncio.ensure_future(anext(changes))
            except (OSError, RuntimeError, StopAsyncIteration) as error:
                if not troubled:
                    logger.error("%s cannot be watched: %r", self.path, error)
                troubled = True
            finally:
                news.cancel()
            await asyncio.sleep(LOOK_AGAIN_SECONDS)


def default_root() -> Path:
    """One directory per user, on a file system that does not outlive the boot if any."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and len(runtime) < 40:
        return Path(runtime) / "foveal"
    return Path(tempfile.gettempdir()) / f"foveal-{os.getuid()}"


def _make_private(path: Path) -> None:
    """Make ``path`` with mode 0700 and refuse one that others can enter.

    Raises:
        TransferError: the directory is another user's or open to others.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TransferError(
            f"the registry directory {path} must belong to this user with mode 0700"
        )

"""The encoder outputs of one model that the processes of a host share.

One directory in shared memory, one file for each output. Any process may save, lease,
load and evict; no process owns anything, so none is missed when it is killed:

- An output is written to a file with a name of its own and renamed when it is whole.
- A lease is a shared lock (flock) on the output's file. The kernel ends it with the
  process. Whoever evicts asks for the exclusive lock first, and leaves what is leased.
- Whoever saves holds the lock of the directory while it makes room and takes space, for
  all its bytes at once. Unfinished files whose writer is gone are removed on that occasion.
- When an output was last used is the time of its file.

What is not whole, not of this model or not what its name says is a miss and is removed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from transfer.arena_file import take_space
from transfer.embeddings.entry import (
    HEADER_BYTES,
    IDENTIFIER,
    Description,
    check_elements,
    checked_description,
    describe,
    header,
    read_description,
    read_elements,
    read_elements_into,
    write_entry,
)
from transfer.errors import ArenaFull, StaleRef
from transfer.identity import tensor_bytes

LOCK_NAME = "lock"
PART_PREFIX = ".part-"
LOCK_SECONDS = 0.25
"""How long is waited for the lock of the directory: whoever holds it lists a directory and
removes files. An output that is not saved for want of it is merely encoded again."""
_LOCK_POLL_SECONDS = 0.001


class EmbeddingLease:
    """Keeps one output from being evicted until it is released or not referenced."""

    __slots__ = ("__weakref__", "_end", "description", "fd")

    def __init__(self, fd: int, description: Description) -> None:
        self.fd = fd
        self.description = description
        self._end = weakref.finalize(self, os.close, fd)

    def load(self) -> torch.Tensor:
        """Return the output, on the CPU, bit for bit as it was saved.

        Raises:
            StaleRef: its bytes have changed.
        """
        return read_elements(self.fd, self.description)

    @property
    def nbytes(self) -> int:
        """The size of its file."""
        return HEADER_BYTES + self.description.nbytes

    @property
    def header(self) -> bytes:
        """The first bytes of its file, which name its contents."""
        return header(self.description)

    def copy_to(self, memory: memoryview) -> None:
        """Copy its file to ``memory``, ``nbytes`` long.

        Raises:
            StaleRef: its bytes have changed.
        """
        memory[:HEADER_BYTES] = self.header
        read_elements_into(self.fd, self.description, memory[HEADER_BYTES:])

    @property
    def path(self) -> str:
        """Where other processes of this host can open it, even when it has been removed."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def release(self) -> None:
        """End the lease now. Doing it again does nothing."""
        self._end()


@dataclass
class StoreCounts:
    """What one process has done to a store; they only grow."""

    saved: int = 0
    evicted: int = 0
    refused: int = 0
    """Entries found that were not whole, or not what their name says."""
    without_room: int = 0
    """Outputs not saved: too large, or all else is leased, or the lock was not to be had."""


@dataclass(frozen=True)
class _Found:
    path: Path
    nbytes: int
    used_at: int


class EmbeddingStore:
    """One model's outputs in ``directory``, which is private to this user.

    ``capacity`` is in bytes, headers included, and holds for all processes together: each
    keeps to its own when it saves. Safe to use from several threads.

    Raises:
        OSError: the directory cannot be used.
    """

    def __init__(self, directory: Path, model_key: str, capacity: int) -> None:
        self.directory = directory
        self.model_key = model_key
        self.capacity = capacity
        self.counts = StoreCounts()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mutex = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock_fd = os.open(directory / LOCK_NAME, flags, 0o600)
        self.close = weakref.finalize(self, os.close, self._lock_fd)

    def lease(self, identifier: str) -> EmbeddingLease | None:
        """Lease an output if it is there; counts as a use. Its elements are not read."""
        if IDENTIFIER.fullmatch(identifier) is None:
            return None
        path = self.directory / identifier
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            # Refused while somebody removes it, or has just written it.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                raise BlockingIOError
            description = read_description(fd, self.model_key, identifier)
            _touch(fd)
        except StaleRef:
            os.close(fd)
            self.forget(identifier)
            return None
        except OSError:
            os.close(fd)
            return None
        return EmbeddingLease(fd, description)

    def lease_whole(self, identifier: str) -> EmbeddingLease | None:
        """Lease an output whose every byte has been checked."""
        lease = self.lease(identifier)
        if lease is None or self._load(lease) is None:
            return None
        return lease

    def load(self, identifier: str) -> torch.Tensor | None:
        """Return an output on the CPU, bit for bit as it was saved; None if it is not here."""
        lease = self.lease(identifier)
        return None if lease is None else self._load(lease)

    def save(self, identifier: str, tensor: torch.Tensor) -> bool:
        """Keep an output, evicting the longest unused; tells whether it was saved.

        One that is there already is not written again.
        """
        if IDENTIFIER.fullmatch(identifier) is None:
            return False
        if (self.directory / identifier).exists():
            return False
        description = describe(self.model_key, identifier, tensor)
        return description is not None and self._write(description, tensor_bytes(tensor))

    def save_entry(self, identifier: str, entry: memoryview) -> bool:
        """Keep an output that comes as the bytes of its file (see ``entry``) elsewhere.

        Tells whether it is here now. All that the bytes state is checked before.

        Raises:
            StaleRef: they are not this output, or not of this model.
        """
        if IDENTIFIER.fullmatch(identifier) is None:
            return False
        stated = checked_description(
            bytes(entry[:HEADER_BYTES]), entry.nbytes, self.model_key, identifier
        )
        elements = entry[HEADER_BYTES:]
        check_elements(elements, stated)
        path = self.directory / identifier
        return path.exists() or self._write(stated, elements)

    def identifiers(self) -> list[str]:
        """Return what is here, the most recently used last."""
        # Asked for again and again: with nothing made for an entry that is not needed here.
        found: list[tuple[int, str]] = []
        with suppress(FileNotFoundError), os.scandir(self.directory) as files:
            for file in files:
                if IDENTIFIER.fullmatch(file.name):
                    try:
                        used_at = file.stat(follow_symlinks=False).st_mtime_ns
                    except OSError:  # it has gone meanwhile
                        continue
                    found.append((used_at, file.name))
        return [name for _, name in sorted(found)]

    def version(self) -> int:
        """Return a number that changes when an output comes or goes."""
        try:
            return self.directory.stat().st_mtime_ns
        except OSError:
            return 0

    def forget(self, identifier: str) -> None:
        """Remove one output, which cannot be used."""
        self.counts.refused += 1
        if IDENTIFIER.fullmatch(identifier) is not None:
            (self.directory / identifier).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all outputs. What is leased can still be read by who leases it."""
        for found in self._entries():
            found.path.unlink(missing_ok=True)

    def _write(self, description: Description, elements: memoryview) -> bool:
        """Write a file for an output, if there is room; tells whether it was written."""
        part = self._begin(HEADER_BYTES + description.nbytes)
        if part is None:
            self.counts.without_room += 1
            return False
        part_path, fd = part
        try:
            write_entry(fd, description, elements)
            _touch(fd)
            part_path.rename(self.directory / description.identifier)
        except OSError:
            part_path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.counts.saved += 1
        return True

    def _load(self, lease: EmbeddingLease) -> torch.Tensor | None:
        try:
            return lease.load()
        except (StaleRef, OSError):
            lease.release()
            self.forget(lease.description.identifier)
            return None

    def _begin(self, size: int) -> tuple[Path, int] | None:
        """Make a file of ``size`` bytes, locked, once there is room; None if there is none."""
        if size > self.capacity:
            return None
        with self._locked() as locked:
            if not locked or not self._make_room(size):
                return None
            path = self.directory / f"{PART_PREFIX}{secrets.token_hex(8)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                take_space(fd, size, self.directory)
            except BaseException as error:
                os.close(fd)
                path.unlink(missing_ok=True)
                if isinstance(error, ArenaFull):
                    return None
                raise
            return path, fd

    def _make_room(self, size: int) -> bool:
        """Evict until ``size`` more bytes are within the capacity; under the lock."""
        unfinished = [
            found for found in self._files(PART_PREFIX) if not _remove_unlocked(found.path)
        ]
        entries = self._entries()
        total = sum(found.nbytes for found in (*unfinished, *entries))
        for found in entries:
            if total + size <= self.capacity:
                break
            if _remove_unlocked(found.path):
                self.counts.evicted += 1
                total -= found.nbytes
        return total + size <= self.capacity

    def _entries(self) -> list[_Found]:
        """All outputs, the longest unused first."""
        found = [each for each in self._files() if IDENTIFIER.fullmatch(each.path.name)]
        return sorted(found, key=lambda each: each.used_at)

    def _files(self, prefix: str = "") -> Iterator[_Found]:
        with suppress(FileNotFoundError), os.scandir(self.directory) as files:
            for file in files:
                if file.name.startswith(prefix):
                    with suppress(OSError):
                        status = file.stat(follow_symlinks=False)
                        yield _Found(Path(file.path), status.st_size, status.st_mtime_ns)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the directory; gives False if it is not to be had in time."""
        with self._mutex:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        yield False
                        return
                    time.sleep(_LOCK_POLL_SECONDS)
                else:
                    break
            try:
                yield True
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


def _touch(fd: int) -> None:
    """Note that a file is used now, finer than the kernel's own clock ticks."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _remove_unlocked(path: Path) -> bool:
    """Remove a file that nobody holds a lock on; tell whether it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True

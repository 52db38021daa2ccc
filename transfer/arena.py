"""The writer's side of shared memory: one file, carved into entries.

The life of an entry: reserve, write, seal, lease, release, evict. A sealed entry is
found by its identity and never changes; nobody leases it, it may be evicted, least
recently released first. Before its space is used again its header is wiped, so that a
reference kept too long is noticed by readers (``arena_view``) and never read.

All space is taken, and every page touched, when the arena is made: a fresh page of
shared memory costs more than the copy into it, and a file that cannot get its pages
later would kill the process with SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from transfer.arena_file import create_file, take_space, unlink_own
from transfer.arena_layout import (
    ENTRY_HEADER_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    SHM,
    WIPED_ENTRY_HEADER,
    arena_header,
    entry_header,
)
from transfer.errors import ArenaFull, ArenaGone, StaleRef
from transfer.leases import Lease, Reservation
from transfer.process import process_start_time
from transfer.slots import SlotAllocator
from transfer.tensor_ref import ArenaId, EntryRef


@dataclass(frozen=True)
class ArenaStats:
    """Counters of one arena; the last three only ever grow."""

    entries: int
    leased_entries: int
    bytes_used: int
    """Bytes that entries and open reservations take, headers and padding included."""
    bytes_total: int
    evictions: int
    """Entries dropped to make room."""
    bytes_written: int
    """Payload bytes ever sealed."""
    full: int
    """Times that no room could be made."""


@dataclass(slots=True)
class _Entry:
    ref: EntryRef
    slot: int
    leases: int = 0


class Arena:
    """One file of shared memory that this process writes and others read.

    Safe to use from several threads. ``nbytes`` is the space for entries; the file has
    one page more.

    Raises:
        ArenaFull: the filesystem of ``directory`` has not that much space.
    """

    def __init__(self, nbytes: int, directory: Path = SHM, *, populate: bool = True) -> None:
        self._slots = SlotAllocator(nbytes, PAGE_BYTES)
        size = PAGE_BYTES + self._slots.nbytes
        nonce = secrets.token_bytes(NONCE_BYTES)
        pid, start_time = os.getpid(), process_start_time(os.getpid()) or 0
        path, self._fd = create_file(directory, pid, start_time)
        self._unlink = weakref.finalize(self, unlink_own, path, pid)
        try:
            take_space(self._fd, size, directory)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self._map = mmap.mmap(self._fd, size, flags=flags)
        except BaseException:
            self._unlink()
            os.close(self._fd)
            raise
        header = arena_header(nonce, pid, start_time, size)
        self._map[: len(header)] = header
        self.id = ArenaId(name=path.name, nonce=nonce)

        self._lock = threading.Lock()
        self._closed = False
        self._generation = 0
        self._entries: dict[bytes, _Entry] = {}
        self._by_generation: dict[int, _Entry] = {}
        self._idle: OrderedDict[bytes, _Entry] = OrderedDict()
        """Entries without a lease, the next to be evicted first."""
        self._pinned: set[int] = set()
        """Slots of leased entries and open reservations."""
        self._released: deque[int] = deque()
        """Generations whose lease has ended, filled by finalizers."""
        self._abandoned: deque[int] = deque()
        """Slots of reservations that came to nothing, filled by finalizers."""
        self._evictions = self._bytes_written = self._full = 0

    def reserve(self, nbytes: int) -> Reservation:
        """Find space for an entry of ``nbytes``, evicting what nobody leases.

        What it is the writer need not know yet: the identity is named when it is sealed.
        Nothing is evicted when that would not make enough room.

        Raises:
            ArenaFull: leased entries leave no room, or the arena is too small.
            ArenaGone: the arena was closed.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        with self._lock:
            self._require_open()
            self._drain()
            slot = self._find_slot(nbytes + ENTRY_HEADER_BYTES)
            self._pinned.add(slot)
            start = PAGE_BYTES + slot + ENTRY_HEADER_BYTES
            return Reservation(
                memory=memoryview(self._map)[start : start + nbytes],
                offset=start,
                publish=partial(self._seal, slot, nbytes),
                abandon=partial(self._abandoned.append, slot),
            )

    def lease(self, identity: bytes) -> Lease | None:
        """Lease the entry with these contents, if there is one; counts as a use."""
        with self._lock:
            self._drain()
            entry = None if self._closed else self._entries.get(identity)
            return None if entry is None else self._lease(entry)

    def __contains__(self, identity: bytes) -> bool:
        with self._lock:
            return identity in self._entries and not self._closed

    def view(self, ref: EntryRef) -> memoryview:
        """Return the payload of an entry that the caller leases. Not to be written.

        It is writable only because torch asks that of the memory under its tensors.

        Raises:
            StaleRef: the entry is no longer there.
            ArenaGone: the arena was closed.
        """
        with self._lock:
            self._require_open()
            entry = self._entries.get(ref.identity)
            if entry is None or entry.ref != ref:
                raise StaleRef(f"generation {ref.generation} is no longer in the arena")
            return memoryview(self._map)[ref.offset : ref.offset + ref.nbytes]

    def memory(self) -> memoryview:
        """Return the whole file as it is mapped, for those who register it elsewhere.

        The mapping lasts as long as this view, even when the arena is closed before.

        Raises:
            ArenaGone: the arena was closed.
        """
        with self._lock:
            self._require_open()
            return memoryview(self._map)

    def drop_unleased(self) -> None:
        """Forget every entry that nobody leases."""
        with self._lock:
            self._drain()
            while self._idle and not self._closed:
                self._drop_oldest()

    def stats(self) -> ArenaStats:
        """Return the counters as of now."""
        with self._lock:
            self._drain()
            return ArenaStats(
                entries=len(self._entries),
                leased_entries=len(self._entries) - len(self._idle),
                bytes_used=self._slots.nbytes - self._slots.free_bytes,
                bytes_total=self._slots.nbytes,
                evictions=self._evictions,
                bytes_written=self._bytes_written,
                full=self._full,
            )

    def close(self) -> None:
        """Remove the file. Readers keep what they have mapped, new ones find nothing.

        Views that are still in use here stay valid; the mapping goes with the last.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._unlink()
            with suppress(BufferError):
                self._map.close()
            os.close(self._fd)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _seal(self, slot: int, nbytes: int, identity: bytes) -> Lease:
        with self._lock:
            self._drain()
            existing = self._entries.get(identity)
            if self._closed or existing is not None:
                self._pinned.discard(slot)
                self._slots.free(slot)
                self._require_open()
            if existing is not None:
                return self._lease(existing)
            self._generation += 1
            start = PAGE_BYTES + slot
            ref = EntryRef(
                arena=self.id.name,
                offset=start + ENTRY_HEADER_BYTES,
                nbytes=nbytes,
                generation=self._generation,
                identity=identity,
            )
            self._map[start : start + ENTRY_HEADER_BYTES] = entry_header(ref)
            entry = _Entry(ref, slot)
            self._entries[identity] = entry
            self._by_generation[ref.generation] = entry
            self._bytes_written += nbytes
            return self._lease(entry)

    def _lease(self, entry: _Entry) -> Lease:
        entry.leases += 1
        self._pinned.add(entry.slot)
        self._idle.pop(entry.ref.identity, None)
        return Lease(entry.ref, self._released)

    def _drain(self) -> None:
        """Take account of leases and reservations that have ended since last time."""
        while self._released:
            entry = self._by_generation[self._released.popleft()]
            entry.leases -= 1
            if entry.leases == 0:
                self._pinned.discard(entry.slot)
                self._idle[entry.ref.identity] = entry
        while self._abandoned:
            slot = self._abandoned.popleft()
            self._pinned.discard(slot)
            self._slots.free(slot)

    def _find_slot(self, nbytes: int) -> int:
        slot = self._slots.allocate(nbytes)
        if slot is None:
            room = self._room_between_pinned()
            if room < nbytes:
                self._full += 1
                raise ArenaFull(
                    f"{nbytes} bytes do not fit: the arena has {self._slots.nbytes} bytes "
                    f"and at most {room} in a row that no request uses"
                )
            while slot is None:
                self._drop_oldest()
                self._evictions += 1
                slot = self._slots.allocate(nbytes)
        return slot

    def _room_between_pinned(self) -> int:
        """Return the longest run of bytes if every entry without a lease were evicted."""
        longest = end = 0
        for slot in sorted(self._pinned):
            longest = max(longest, slot - end)
            end = slot + self._slots.length_of(slot)
        return max(longest, self._slots.nbytes - end)

    def _drop_oldest(self) -> None:
        identity, entry = self._idle.popitem(last=False)
        # Wiped before the space can be taken again: from here on the reference is stale.
        start = PAGE_BYTES + entry.slot
        self._map[start : start + ENTRY_HEADER_BYTES] = WIPED_ENTRY_HEADER
        del self._entries[identity]
        del self._by_generation[entry.ref.generation]
        self._slots.free(entry.slot)

    def _require_open(self) -> None:
        if self._closed:
            raise ArenaGone(f"arena {self.id.name} was closed")

"""A reader's side of shared memory: an arena of another process, mapped here.

The mapping is private and writable: torch wants writable memory under its tensors, and
what a model writes there stays in this process. Such a written page is a copy of its
own, blind to what the owner puts there later. So when an entry is read for the first
time, and pages of it were written to while they held another, its pages are dropped,
which brings back the owner's bytes. Headers are read through the file, never through the
mapping, for the same reason.

Reading an entry again drops nothing: its bytes have not changed, and a tensor of another
request may still lie over them. All tensors of one entry share their memory, as do those
that vLLM's own receiver cache hands out, so a model that writes to its inputs sees there
what it wrote.

``multiprocessing.shared_memory`` is not used: its resource tracker removes the owner's
live segment when a reader exits.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from transfer.arena_layout import (
    ARENA_HEADER_BYTES,
    ENTRY_HEADER_BYTES,
    NAME_PATTERN,
    PAGE_BYTES,
    SHM,
    arena_nonce_and_size,
    entry_header,
)
from transfer.errors import ArenaGone, BadMessage, StaleRef
from transfer.tensor_ref import ArenaId, EntryRef
from transfer.written_pages import WrittenPages


class ArenaView:
    """Reads entries of the arena that ``arena`` names, without copying them.

    Not for several threads at once.

    Raises:
        BadMessage: the name is not one that an arena can have.
        ArenaGone: no such arena is seen from here.
    """

    def __init__(
        self, arena: ArenaId, directory: Path = SHM, *, shared: bool = False
    ) -> None:
        """``shared`` maps the owner's own pages, for devices that read them: they cannot
        be given pages that are copied when they are written to. Whoever maps them so must
        not write.
        """
        if NAME_PATTERN.fullmatch(arena.name) is None:
            raise BadMessage(f"{arena.name!r} is not the name of an arena")
        self.id = arena
        try:
            access = os.O_RDWR if shared else os.O_RDONLY
            self._fd = os.open(directory / arena.name, access | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaGone(f"cannot open arena {arena.name}: {error}") from error
        try:
            self._size = checked_size(self._fd, arena)
            self._map = mmap.mmap(
                self._fd,
                self._size,
                flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except BaseException:
            os.close(self._fd)
            raise
        self._written = None if shared else WrittenPages(self._map)
        # By page: the generation that was last read of the entry which had it, 0 for none.
        # The pages of this table that stay 0 take no memory.
        self._read_as = np.zeros(self._size // PAGE_BYTES, np.uint64)
        self._closed = False

    def memory(self) -> memoryview:
        """Return the whole file as it is mapped, for those who register it elsewhere."""
        return memoryview(self._map)

    def read(self, ref: EntryRef) -> memoryview:
        """Return the payload of an entry, as its owner wrote it.

        Its bytes stay as they are while the owner's lease lasts. What is written to them
        is seen only here, by all who read the same entry, and is gone when the owner has
        put another in its place.

        Raises:
            StaleRef: the entry holds something else by now, or never held this.
            ArenaGone: this view was closed.
        """
        self.check(ref)
        end = ref.offset + ref.nbytes
        first_page, end_page = ref.offset // PAGE_BYTES, -(-end // PAGE_BYTES)
        # A good entry has had all its pages to itself since it was sealed, and no other
        # has its generation. If the page that it starts on was read as this one, then all
        # of them were, and nothing else since. Those never read cannot have been written.
        read_as = self._read_as[first_page:end_page]
        if read_as[0] != ref.generation:
            if (
                self._written is not None
                and read_as.any()
                and self._written.may_be_in(first_page, end_page)
            ):
                start = first_page * PAGE_BYTES
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
            read_as[:] = ref.generation
        return memoryview(self._map)[ref.offset : end]

    def check(self, ref: EntryRef) -> None:
        """Make sure that the owner's entry is still the one that ``ref`` names.

        Raises:
            StaleRef: it is not.
            ArenaGone: this view was closed.
        """
        if self._closed:
            raise ArenaGone(f"the view of arena {self.id.name} was closed")
        if ref.arena != self.id.name:
            raise StaleRef(f"a reference to arena {ref.arena!r}, not {self.id.name}")
        start = ref.offset - ENTRY_HEADER_BYTES
        inside = start >= PAGE_BYTES and 0 <= ref.nbytes <= self._size - ref.offset
        if not inside or start % PAGE_BYTES:
            raise StaleRef(f"no entry of {ref.nbytes} bytes can be at {ref.offset}")
        try:
            expected = entry_header(ref)
        except ValueError as error:
            raise StaleRef(f"no entry can be like this: {error}") from error
        if os.pread(self._fd, ENTRY_HEADER_BYTES, start) != expected:
            raise StaleRef(f"generation {ref.generation} is no longer at {ref.offset}")

    def close(self) -> None:
        """Unmap the arena; views still in use stay valid and the last unmaps it."""
        if self._closed:
            return
        self._closed = True
        if self._written is not None:
            self._written.close()
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)

    def __enter__(self) -> ArenaView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def checked_size(fd: int, arena: ArenaId) -> int:
    """Return the size of the file in bytes, once it is sure to be this arena."""
    stated = arena_nonce_and_size(os.pread(fd, ARENA_HEADER_BYTES, 0))
    if stated is None:
        raise ArenaGone(f"{arena.name} is not an arena of this version")
    nonce, size = stated
    if nonce != arena.nonce:
        raise ArenaGone(f"{arena.name} is another arena of the same name")
    # Touching a mapping beyond the end of its file would kill the process.
    if os.fstat(fd).st_size != size:
        raise ArenaGone(f"{arena.name} has not the size that its header states")
    return size

"""A second writer of an arena: fills space that the arena's owner reserved for it.

It never decides where to write. The owner reserves, says where, and seals what was
written; until then no reader is told of it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from transfer.arena_layout import ENTRY_HEADER_BYTES, NAME_PATTERN, PAGE_BYTES, SHM
from transfer.arena_view import checked_size
from transfer.errors import ArenaGone, BadMessage
from transfer.tensor_ref import ArenaId


class ArenaWriter:
    """Maps the arena that ``arena`` names so that what is written here is seen by all.

    Raises:
        BadMessage: the name is not one that an arena can have.
        ArenaGone: no such arena is seen from here.
    """

    def __init__(self, arena: ArenaId, directory: Path = SHM) -> None:
        if NAME_PATTERN.fullmatch(arena.name) is None:
            raise BadMessage(f"{arena.name!r} is not the name of an arena")
        try:
            fd = os.open(directory / arena.name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaGone(f"cannot open arena {arena.name}: {error}") from error
        try:
            self._size = checked_size(fd, arena)
            self._map = mmap.mmap(fd, self._size, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Return the ``nbytes`` bytes at ``offset`` of the file, to be written.

        Raises:
            BadMessage: no reservation can be there.
        """
        start = offset - ENTRY_HEADER_BYTES
        inside = start >= PAGE_BYTES and 0 <= nbytes <= self._size - offset
        if not inside or start % PAGE_BYTES:
            raise BadMessage(f"no reservation of {nbytes} bytes can be at {offset}")
        return memoryview(self._map)[offset : offset + nbytes]

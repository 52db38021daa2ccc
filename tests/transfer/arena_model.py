"""What an arena must do, with nothing clever about it: one character per page of space."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transfer.arena_layout import ENTRY_HEADER_BYTES, PAGE_BYTES


def identity_of(label: int, nbytes: int) -> bytes:
    """An identity names contents, so the length is part of it."""
    return bytes([label]) * 8 + nbytes.to_bytes(8, "big")


def contents_of(label: int, nbytes: int) -> bytes:
    """Bytes that differ for every identity and at every place."""
    return hashlib.shake_128(identity_of(label, nbytes)).digest(nbytes)


def pages_for(nbytes: int) -> int:
    return -(-(nbytes + ENTRY_HEADER_BYTES) // PAGE_BYTES)


@dataclass(eq=False)
class ModelEntry:
    place: str
    identity: bytes
    generation: int
    leases: int = 0


class ArenaModel:
    """Best fit, least recently released first out, leased and reserved space kept."""

    def __init__(self, pages: int) -> None:
        self.space = ["."] * pages
        self.entries: dict[bytes, ModelEntry] = {}
        self.idle: list[ModelEntry] = []
        self.pinned: set[str] = set()
        self.generation = self.evictions = self.bytes_written = self.full = 0
        self._places = 0

    def reserve(self, nbytes: int) -> str | None:
        """Return the name of the place taken; None when there is no room."""
        pages = pages_for(nbytes)
        if self._longest_run({".", *(entry.place for entry in self.idle)}) < pages:
            self.full += 1
            return None
        while (start := self._best_gap(pages)) is None:
            self.drop(self.idle[0])
            self.evictions += 1
        self._places += 1
        place = f"place {self._places}"
        self.space[start : start + pages] = [place] * pages
        self.pinned.add(place)
        return place

    def give_back(self, place: str) -> None:
        self.pinned.discard(place)
        self.space = ["." if taken_by == place else taken_by for taken_by in self.space]

    def seal(self, place: str, identity: bytes, nbytes: int) -> ModelEntry:
        if (existing := self.entries.get(identity)) is not None:
            self.give_back(place)
            return self.lease(existing)
        self.generation += 1
        self.bytes_written += nbytes
        entry = ModelEntry(place, identity, self.generation)
        self.entries[identity] = entry
        return self.lease(entry)

    def lease(self, entry: ModelEntry) -> ModelEntry:
        entry.leases += 1
        self.pinned.add(entry.place)
        if entry in self.idle:
            self.idle.remove(entry)
        return entry

    def release(self, entry: ModelEntry) -> None:
        entry.leases -= 1
        if not entry.leases:
            self.pinned.discard(entry.place)
            self.idle.append(entry)

    def drop(self, entry: ModelEntry) -> None:
        self.idle.remove(entry)
        del self.entries[entry.identity]
        self.give_back(entry.place)

    def offset_of(self, entry: ModelEntry) -> int:
        """Where its payload starts in the arena's file, in bytes."""
        page = 1 + self.space.index(entry.place)  # the first page is the arena's header
        return page * PAGE_BYTES + ENTRY_HEADER_BYTES

    def _gaps(self, counts_as_free: set[str]) -> list[tuple[int, int]]:
        """Length and start of each run of free pages."""
        gaps, start = [], None
        for page, taken_by in enumerate([*self.space, "end"]):
            if taken_by in counts_as_free and start is None:
                start = page
            elif taken_by not in counts_as_free and start is not None:
                gaps.append((page - start, start))
                start = None
        return gaps

    def _longest_run(self, counts_as_free: set[str]) -> int:
        return max((length for length, _ in self._gaps(counts_as_free)), default=0)

    def _best_gap(self, pages: int) -> int | None:
        fitting = sorted(gap for gap in self._gaps({"."}) if gap[0] >= pages)
        return fitting[0][1] if fitting else None

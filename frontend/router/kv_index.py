"""Which workers hold which block, and how much of a prompt's start each one holds.

A table per medium maps a block digest to an integer with one bit per worker, so looking
up a prompt costs one dictionary access per block however many workers there are.

Each worker also keeps the set of its digests. That is some 70 bytes per resident block,
and it is what makes forgetting a worker cost only that worker's blocks: it is done at
once and nothing remains to be swept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# The medium from which the engine serves a prefix without loading or recomputing it.
SERVED_MEDIUM = "GPU"


@dataclass(slots=True)
class _Holdings:
    """What one worker holds. ``bit`` is its place in the masks."""

    bit: int
    by_medium: dict[str, set[bytes]] = field(default_factory=dict)


class KvIndex:
    """Block digest -> workers. Events write it, requests only read it."""

    def __init__(self) -> None:
        self._holdings: dict[str, _Holdings] = {}
        self._worker_at: list[str | None] = []
        self._free_slots: list[int] = []
        self._masks: dict[str, dict[bytes, int]] = {}
        self._served: dict[bytes, int] = self._masks.setdefault(SERVED_MEDIUM, {})

    def __len__(self) -> int:
        """Count the distinct digests held, added up over media."""
        return sum(len(table) for table in self._masks.values())

    def store(
        self, worker: str, digests: Iterable[bytes], medium: str | None = SERVED_MEDIUM
    ) -> None:
        """Note that ``worker`` holds ``digests``; None means the served medium."""
        holdings = self._holdings_of(worker)
        medium = medium or SERVED_MEDIUM
        table = self._masks.setdefault(medium, {})
        held = holdings.by_medium.setdefault(medium, set())
        bit = holdings.bit
        for digest in digests:
            held.add(digest)
            table[digest] = table.get(digest, 0) | bit

    def remove(
        self, worker: str, digests: Iterable[bytes], medium: str | None = SERVED_MEDIUM
    ) -> None:
        """Note that ``worker`` lost ``digests``; those it does not hold are ignored."""
        holdings = self._holdings.get(worker)
        medium = medium or SERVED_MEDIUM
        if holdings is None or medium not in holdings.by_medium:
            return
        held = holdings.by_medium[medium]
        table = self._masks[medium]
        for digest in digests:
            if digest in held:
                held.remove(digest)
                _take_bit(table, digest, holdings.bit)

    def clear(self, worker: str) -> None:
        """Forget all blocks of ``worker``, which stays known."""
        holdings = self._holdings.get(worker)
        if holdings is None:
            return
        for medium, held in holdings.by_medium.items():
            table = self._masks[medium]
            for digest in held:
                _take_bit(table, digest, holdings.bit)
        holdings.by_medium.clear()

    def replace(self, worker: str, blocks_by_medium: Mapping[str, Iterable[bytes]]) -> None:
        """Make ``blocks_by_medium`` all that ``worker`` holds."""
        self.clear(worker)
        self._holdings_of(worker)
        for medium, digests in blocks_by_medium.items():
            self.store(worker, digests, medium)

    def drop_worker(self, worker: str) -> None:
        """Forget ``worker``; its place in the masks may be given to another."""
        self.clear(worker)
        holdings = self._holdings.pop(worker, None)
        if holdings is not None:
            slot = holdings.bit.bit_length() - 1
            self._worker_at[slot] = None
            self._free_slots.append(slot)

    def overlap(self, digests: Sequence[bytes]) -> dict[str, int]:
        """Return for each known worker how many leading blocks it can serve.

        Only the served medium counts: a block elsewhere must be loaded first.
        """
        overlaps = dict.fromkeys(self._holdings, 0)
        table = self._served
        alive: int | None = None
        for position, digest in enumerate(digests):
            holders = table.get(digest, 0)
            still = holders if alive is None else alive & holders
            if alive is not None and still != alive:
                self._note(overlaps, alive ^ still, position)
            alive = still
            if not alive:
                break
        if alive:
            self._note(overlaps, alive, len(digests))
        return overlaps

    def resident(self, worker: str) -> set[bytes]:
        """Return all digests that ``worker`` holds in any medium, for checking."""
        holdings = self._holdings.get(worker)
        return set().union(*holdings.by_medium.values()) if holdings is not None else set()

    def _holdings_of(self, worker: str) -> _Holdings:
        holdings = self._holdings.get(worker)
        if holdings is None:
            if self._free_slots:
                slot = self._free_slots.pop()
                self._worker_at[slot] = worker
            else:
                slot = len(self._worker_at)
                self._worker_at.append(worker)
            holdings = self._holdings[worker] = _Holdings(1 << slot)
        return holdings

    def _note(self, overlaps: dict[str, int], mask: int, blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            worker = self._worker_at[lowest.bit_length() - 1]
            if worker is not None:
                overlaps[worker] = blocks
            mask ^= lowest


def _take_bit(table: dict[bytes, int], digest: bytes, bit: int) -> None:
    rest = table[digest] & ~bit
    if rest:
        table[digest] = rest
    else:
        del table[digest]

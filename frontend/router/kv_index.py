"""Which workers hold which block, and how much of a prompt's start each one holds.

A table per medium maps a block digest to an integer with one bit per worker, so looking
up a prompt costs one dictionary access per block however many workers there are.

Nothing is kept per worker and block. A worker that is lost, or that has lost all its
blocks, gives up its bit at once and counts no more from then on; where the bit is still
set it is swept out later, in slices, and only then given to another worker. To sweep in
slices, and to grow in small steps, a table is made of 256 dictionaries, by the digests'
last byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from transfer.messages import RESUME_POINTS

# The medium from which the engine serves a prefix without loading or recomputing it.
SERVED_MEDIUM = "GPU"

_SHARDS = 256

# Beyond so many bits that wait to be swept, masks grow: then whoever adds one sweeps.
_MAX_RETIRED = 64

_Table = list[dict[bytes, int]]


class KvIndex:
    """Block digest -> workers. Events write it, requests only read it."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._to_resume_points: set[str] = set()
        """Workers whose engines go on behind certain blocks only."""
        self._workers: dict[int, str] = {}
        """By bit."""
        self._slots = 0
        self._free_bits: list[int] = []
        self._live = 0
        """The bits of all known workers."""
        self._retired: deque[tuple[int, int]] = deque()
        """Bits given up, each with the number of sweeps of a shard that ends it."""
        self._shard_sweeps = 0
        self._served = _new_table()
        self._tables: dict[str, _Table] = {SERVED_MEDIUM: self._served}

    def __len__(self) -> int:
        """Count the entries, added up over media, those still to be swept included."""
        return sum(len(shard) for table in self._tables.values() for shard in table)

    @property
    def unswept(self) -> bool:
        """Whether blocks of workers that are gone still take room."""
        return bool(self._retired)

    def store(
        self, worker: str, digests: Iterable[bytes], medium: str | None = SERVED_MEDIUM
    ) -> None:
        """Note that ``worker`` holds ``digests``; None means the served medium."""
        bit = self._bits.get(worker) or self._take_bit(worker)
        table = self._tables.get(medium or SERVED_MEDIUM)
        if table is None:
            table = self._tables[medium or SERVED_MEDIUM] = _new_table()
        for digest in digests:
            shard = table[digest[-1]]
            shard[digest] = shard.get(digest, 0) | bit

    def remove(
        self, worker: str, digests: Iterable[bytes], medium: str | None = SERVED_MEDIUM
    ) -> None:
        """Note that ``worker`` lost ``digests``; those it does not hold are ignored."""
        bit = self._bits.get(worker)
        table = self._tables.get(medium or SERVED_MEDIUM)
        if bit is None or table is None:
            return
        for digest in digests:
            shard = table[digest[-1]]
            holders = shard.get(digest, 0)
            if holders & bit:
                if holders != bit:
                    shard[digest] = holders ^ bit
                else:
                    del shard[digest]
                    if not shard:
                        shard.clear()  # gives back its room, which del does not

    def go_on_at_points(self, worker: str, only_there: bool) -> None:
        """Note whether ``worker`` can go on behind blocks in ``RESUME_POINTS`` only."""
        if only_there and worker in self._bits:
            self._to_resume_points.add(worker)
        else:
            self._to_resume_points.discard(worker)

    def clear(self, worker: str) -> None:
        """Forget all blocks of ``worker``, which stays known."""
        if worker in self._bits:
            self.drop_worker(worker)
            self._take_bit(worker)

    def replace(self, worker: str, blocks_by_medium: Mapping[str, Iterable[bytes]]) -> None:
        """Make ``blocks_by_medium`` all that ``worker`` holds."""
        self.drop_worker(worker)
        self._take_bit(worker)
        for medium, digests in blocks_by_medium.items():
            self.store(worker, digests, medium)

    def drop_worker(self, worker: str) -> None:
        """Forget ``worker``: it counts no more, and ``sweep`` gives back its room."""
        bit = self._bits.pop(worker, None)
        self._to_resume_points.discard(worker)
        if bit is not None:
            self._live ^= bit
            del self._workers[bit]
            self._retired.append((bit, self._shard_sweeps + _SHARDS))
            if len(self._retired) > _MAX_RETIRED:
                self.sweep(len(self))

    def sweep(self, max_blocks: int) -> bool:
        """Take out blocks that only lost workers held; True when there is more to do.

        Stops after the shard in which ``max_blocks`` entries have been looked at.
        """
        seen = 0
        while self._retired and seen < max_blocks:
            seen += self._sweep_shard(self._shard_sweeps % _SHARDS)
            self._shard_sweeps += 1
            while self._retired and self._retired[0][1] <= self._shard_sweeps:
                self._free_bits.append(self._retired.popleft()[0])
        if not self._retired:
            self._forget_empty_tables()
        return bool(self._retired)

    def overlap(self, digests: Sequence[bytes]) -> dict[str, int]:
        """Return for each known worker how many leading blocks it can serve.

        Only the served medium counts: a block elsewhere must be loaded first.
        """
        overlaps = self._leading(digests)
        if self._to_resume_points:
            self._back_to_resume_points(digests, overlaps)
        return overlaps

    def _leading(self, digests: Sequence[bytes]) -> dict[str, int]:
        overlaps = dict.fromkeys(self._bits, 0)
        table, workers = self._served, self._workers
        alive, last, position = self._live, 0, 0
        # This loop is what a decision spends most of its time in.
        try:
            for digest in digests:
                holders = table[digest[-1]][digest]
                if holders != last:
                    last = holders
                    still = holders & alive
                    if still != alive:
                        gone = alive ^ still
                        if gone in workers:  # one, as mostly
                            overlaps[workers[gone]] = position
                        else:
                            self._note(overlaps, gone, position)
                        alive = still
                        if not alive:
                            return overlaps
                position += 1
        except KeyError:  # a block that nobody holds
            pass
        self._note(overlaps, alive, position)
        return overlaps

    def _back_to_resume_points(
        self, digests: Sequence[bytes], overlaps: dict[str, int]
    ) -> None:
        """Shorten overlaps to the last block behind which their worker can go on."""
        reaching: dict[int, int] = {}
        """By overlap, those that have it."""
        for worker in self._to_resume_points:
            blocks = overlaps[worker]
            reaching[blocks] = reaching.get(blocks, 0) | self._bits[worker]
        points = self._tables.get(RESUME_POINTS) or _new_table()
        looking = 0
        for blocks in range(max(reaching), 0, -1):
            looking |= reaching.get(blocks, 0)
            if looking:
                digest = digests[blocks - 1]
                found = points[digest[-1]].get(digest, 0) & looking
                self._note(overlaps, found, blocks)
                looking ^= found
        self._note(overlaps, looking, 0)

    def media(self) -> set[str]:
        """Return the media in which anybody may hold anything."""
        return set(self._tables)

    def resident(self, worker: str, medium: str | None = None) -> set[bytes]:
        """Return what ``worker`` holds in ``medium``, or in any; looks at every entry."""
        bit = self._bits.get(worker, 0)
        tables = self._tables.values() if medium is None else [self._tables.get(medium, [])]
        return {
            digest
            for table in tables
            for shard in table
            for digest, holders in shard.items()
            if holders & bit
        }

    def _take_bit(self, worker: str) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._slots
            self._slots += 1
        self._bits[worker] = bit
        self._workers[bit] = worker
        self._live |= bit
        return bit

    def _sweep_shard(self, number: int) -> int:
        seen, live = 0, self._live
        for table in self._tables.values():
            shard = table[number]
            seen += len(shard)
            table[number] = {
                digest: still for digest, holders in shard.items() if (still := holders & live)
            }
        return seen

    def _forget_empty_tables(self) -> None:
        for medium in [m for m, table in self._tables.items() if not any(table)]:
            if medium != SERVED_MEDIUM:
                del self._tables[medium]

    def _note(self, overlaps: dict[str, int], mask: int, blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            overlaps[self._workers[lowest]] = blocks
            mask ^= lowest


def _new_table() -> _Table:
    return [{} for _ in range(_SHARDS)]

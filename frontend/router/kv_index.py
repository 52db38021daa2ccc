"""Which workers hold which block, and how much of a prompt's start each one holds.

Who holds a block is an integer with one bit per worker, so looking up a prompt takes as
many steps as it has blocks, however many workers there are.

Blocks come in runs: a worker stores a part of a prompt at once, and another prompt that
begins alike goes through it in the same order. What is stored together is therefore kept
together (``block_run``): a look-up finds the run of its next block and compares the blocks
behind, which costs a fraction of looking up each, and what it finds in a run is kept until
something in there changes. Only the time that it takes rests on this: in whatever order
blocks come, what is found is the same. Blocks that came one by one, as those of answers
do, take a few times as long each, blocks that came in no order some 20 times.

Nothing is kept per worker and block. A worker that is lost, or that has lost all its
blocks, gives up its bit at once and counts no more from then on; where the bit is still
set it is swept out later, in slices, and only then given to another worker. To sweep in
slices, and to grow in small steps, a table is made of 256 dictionaries, by the digests'
last byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from frontend.router.block_run import GONE, BlockRun, Summary
from transfer.messages import RESUME_POINTS

# The medium from which the engine serves a prefix without loading or recomputing it.
SERVED_MEDIUM = "GPU"

_SHARDS = 256

# Beyond so many bits that wait to be swept, masks grow: then whoever adds one sweeps.
_MAX_RETIRED = 64

# So many blocks are looked through to find one in a run.
_MAX_RUN = 64

_Shard = dict[bytes, int | BlockRun]
"""Of a block that came alone the holders, else the run that it is in."""
_Table = list[_Shard]


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
        blocks = digests if type(digests) is list else list(digests)
        position = 0
        while position < len(blocks):
            digest = blocks[position]
            held = table[digest[-1]].get(digest)
            if held is None:
                position += _store_new(table, blocks, position, bit)
            elif isinstance(held, int):
                table[digest[-1]][digest] = held | bit
                position += 1
            else:
                start, length = held.match(blocks, position)
                held.add(start, length, bit)
                position += length

    def remove(
        self, worker: str, digests: Iterable[bytes], medium: str | None = SERVED_MEDIUM
    ) -> None:
        """Note that ``worker`` lost ``digests``; those it does not hold are ignored."""
        bit = self._bits.get(worker)
        table = self._tables.get(medium or SERVED_MEDIUM)
        if bit is None or table is None:
            return
        others = ~bit
        own: list[bytes] = []
        place, step = 0, -1
        for digest in digests:
            shard = table[digest[-1]]
            held = shard.get(digest)
            if held is None:
                continue
            if isinstance(held, int):
                left = held & others
                if left:
                    shard[digest] = left
                    continue
            else:
                # Mostly next to the one before: engines evict a prompt from its end.
                near = place + step
                if held.digests is own and 0 <= near < len(own) and own[near] == digest:
                    place = near
                else:
                    own = held.digests
                    near, place = place, own.index(digest)
                    step = 1 if place in (0, near + 1) else -1
                left = held.holders[place] & others
                if left:
                    if left != held.holders[place]:
                        held.set_holders(place, left)
                    continue
                held.holders[place], own[place] = 0, GONE
                held.summary = None
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
        table = self._served
        blocks = digests if isinstance(digests, list) else list(digests)
        alive, position = self._live, 0
        while alive and position < len(blocks):
            digest = blocks[position]
            held = table[digest[-1]].get(digest)
            if held is None:
                break
            if isinstance(held, int):
                still = held & alive
                if still != alive:
                    self._note(overlaps, alive ^ still, position)
                    alive = still
                position += 1
                continue
            start, length = held.match(blocks, position)
            if length == len(held.digests):
                summary = held.summary
                if summary is None or summary.position != position:
                    summary = self._summarize(held, position)
                first = summary.first
                if alive != first:
                    self._note(overlaps, alive & ~first, position)
                    alive &= first
                if alive == first:  # unless a worker misses a block before
                    overlaps.update(summary.ends)
                    alive = summary.every
                    position += length
                    continue
            alive = self._walk(overlaps, alive, held.holders[start : start + length], position)
            position += length
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
                held = points[digest[-1]].get(digest)
                found = _holders(digest, held) & looking if held is not None else 0
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
            for digest, held in shard.items()
            if _holders(digest, held) & bit
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
            kept: _Shard = {}
            for digest, held in shard.items():
                if isinstance(held, int):
                    if held & live:
                        kept[digest] = held & live
                elif held.keep(digest, live):
                    kept[digest] = held
            table[number] = kept
        return seen

    def _forget_empty_tables(self) -> None:
        for medium in [m for m, table in self._tables.items() if not any(table)]:
            if medium != SERVED_MEDIUM:
                del self._tables[medium]

    def _walk(
        self, overlaps: dict[str, int], alive: int, holders: Sequence[int], position: int
    ) -> int:
        """Go through blocks that begin at ``position``; return who of ``alive`` holds all.

        Notes where the others end.
        """
        workers, last = self._workers, 0
        for place, holding in enumerate(holders, position):
            if holding is not last:  # it mostly is
                last = holding
                still = holding & alive
                if still != alive:
                    gone = alive ^ still
                    worker = workers.get(gone)
                    if worker is not None:  # one, as mostly
                        overlaps[worker] = place
                    else:
                        self._note(overlaps, gone, place)
                    alive = still
        return alive

    def _summarize(self, run: BlockRun, position: int) -> Summary:
        first = run.holders[0] & self._live
        ends: dict[str, int] = {}
        every = self._walk(ends, first, run.holders, position)
        run.summary = Summary(position, first, every, ends)
        return run.summary

    def _note(self, overlaps: dict[str, int], mask: int, blocks: int) -> None:
        while mask:
            lowest = mask & -mask
            overlaps[self._workers[lowest]] = blocks
            mask ^= lowest


def _new_table() -> _Table:
    return [{} for _ in range(_SHARDS)]


def _store_new(table: _Table, blocks: list[bytes], position: int, bit: int) -> int:
    """Put a block that nobody holds, and those like it behind it, into a run.

    Returns their number.
    """
    run = BlockRun()
    own = blocks[position : position + _MAX_RUN]
    for place, digest in enumerate(own):
        shard = table[digest[-1]]
        if digest in shard:  # for longer, or by now if it comes twice
            del own[place:]
            break
        shard[digest] = run
    if len(own) == 1:
        table[own[0][-1]][own[0]] = bit
    else:
        run.digests = own
        run.holders = [bit] * len(own)
    return len(own)


def _holders(digest: bytes, held: int | BlockRun) -> int:
    if isinstance(held, int):
        return held
    return held.holders[held.digests.index(digest)]

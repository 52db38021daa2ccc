"""The KV cache of a mock engine: blocks that are counted, shared by digest, and evicted.

Behaves like vLLM's pool: blocks that nobody uses stay cached until their space is
needed, the longest unused first, and of one request the last block before the first. Blocks
without a digest can serve nobody, so they are used up first. A digest may be in several
blocks at once. What is stored and removed is noted as vLLM announces it: block by block,
in order, copies included.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are unused."""


class BlockEvent(NamedTuple):
    """Blocks that became cached or ceased to be, in the order in which they did."""

    stored: bool
    digests: list[bytes]


class BlockPool:
    """A fixed number of blocks, named by integers from 0."""

    def __init__(self, num_blocks: int) -> None:
        """Start with ``num_blocks`` unused blocks, all without a digest.

        Raises:
            ValueError: there are none.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks can hold nothing")
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """First those that are used up first."""
        self._cached: dict[bytes, list[int]] = {}
        self._events: list[BlockEvent] = []

    @property
    def num_unused(self) -> int:
        """How many blocks ``allocate`` can give, cached ones that nobody uses included."""
        return len(self._unused)

    def leading(self, digests: Sequence[bytes]) -> int:
        """Count the digests that are cached, up to the first that is not."""
        cached = self._cached
        for count, digest in enumerate(digests):
            if digest not in cached:
                return count
        return len(digests)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return a block for each digest, up to the first that is not cached."""
        return [self._cached[digest][0] for digest in digests[: self.leading(digests)]]

    def count_unused(self, blocks: Sequence[int]) -> int:
        """Count those of ``blocks`` that nobody uses: to use them leaves fewer to allocate."""
        return sum(not self._users[block] for block in blocks)

    def use(self, blocks: Sequence[int]) -> None:
        """Keep cached blocks from being evicted, until they are released once more."""
        for block in blocks:
            if not self._users[block]:
                del self._unused[block]
            self._users[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks and evict what they held.

        Raises:
            OutOfBlocks: there are not so many unused blocks; none has been taken.
        """
        if count > len(self._unused):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._unused)} unused")
        removed = []
        blocks = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            if (digest := self._digests[block]) is not None:
                self._forget(block, digest)
                removed.append(digest)
            self._users[block] = 1
            blocks.append(block)
        if removed:
            self._events.append(BlockEvent(False, removed))
        return blocks

    def cache(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Let others find full blocks that are in use; the two run in parallel."""
        for block, digest in zip(blocks, digests, strict=True):
            self._digests[block] = digest
            self._cached.setdefault(digest, []).append(block)
        if blocks:
            self._events.append(BlockEvent(True, list(digests)))

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one use of each of a request's blocks, which are in prompt order."""
        without_digest = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            self._unused[block] = None
            if self._digests[block] is None:
                without_digest.append(block)
        for block in reversed(without_digest):
            self._unused.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all digests. False, and nothing is done, while blocks are in use."""
        if len(self._unused) < self.num_blocks:
            return False
        self._digests = [None] * self.num_blocks
        self._cached.clear()
        self._events.clear()
        return True

    def take_events(self) -> list[BlockEvent]:
        """Return what happened since the last call."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: int, digest: bytes) -> None:
        self._digests[block] = None
        holders = self._cached[digest]
        holders.remove(block)
        if not holders:
            del self._cached[digest]

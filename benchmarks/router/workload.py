"""The blocks that the indexes are filled with, the same for ours and its peer.

Nothing but the standard library is used here: the peer runs in a Python of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

CHAIN = 1_000
"""Blocks of one prompt."""

_SHARED, _DEPTHS, _HOLDERS = 7_000_001, 7_000_002, 7_000_003  # seeds

DELTA = 64
"""Blocks that one event tells of: an engine step that computes 1,024 tokens."""


@dataclass(frozen=True)
class Stored:
    """A worker has come to hold these blocks of a prompt, which begin at ``start``."""

    worker: int
    chain: int
    start: int
    digests: list[bytes]


class Workload:
    """Prompts of ``CHAIN`` blocks, each held by ``holders`` of the workers."""

    def __init__(self, workers: int, blocks: int, holders: int = 4) -> None:
        self.workers = workers
        self.blocks = blocks
        self._holders = holders

    def chain(self, number: int) -> list[bytes]:
        """The digests, 32 bytes each, of a prompt."""
        rng = random.Random(number)
        return [rng.randbytes(32) for _ in range(CHAIN)]

    def resident(self) -> Iterator[Stored]:
        """All that is held before anything is measured: ``blocks`` distinct ones."""
        rng = random.Random(_HOLDERS)
        for number in range(self.blocks // CHAIN):
            digests = self.chain(number)
            for worker in rng.sample(range(self.workers), self._holders):
                yield from _in_deltas(worker, number, digests)
        for worker, depth in enumerate(self.depths()):
            yield from _in_deltas(worker, _SHARED, self.shared()[:depth])

    def shared(self) -> list[bytes]:
        """A prompt of which every worker holds a part."""
        return self.chain(_SHARED)

    def depths(self) -> list[int]:
        """How many leading blocks of it each worker holds: 1 to all."""
        rng = random.Random(_DEPTHS)
        return [CHAIN, *(rng.randint(1, CHAIN) for _ in range(self.workers - 1))]

    def news(self, round_number: int, blocks: int) -> list[Stored]:
        """What is stored while it is measured: blocks not seen before."""
        rng = random.Random(1_000_000 + round_number)
        news = []
        for number in range(blocks // CHAIN):
            chain = 10_000_000 + round_number * 10_000 + number
            news += _in_deltas(rng.randrange(self.workers), chain, self.chain(chain))
        return news


def _in_deltas(worker: int, chain: int, digests: list[bytes]) -> Iterator[Stored]:
    for start in range(0, len(digests), DELTA):
        yield Stored(worker, chain, start, digests[start : start + DELTA])

"""Prefixes that a worker was just given to compute, before its events say it holds them.

Without promises, a burst of requests with one new image scatters over all workers, each
of which encodes it. Promises only steer the choice: what a route reports as overlap
comes from the workers' events alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat


@dataclass(frozen=True, slots=True)
class _Promise:
    expires: float
    worker: str
    digests: Sequence[bytes]


class Promises:
    """Block digests per worker that expire by themselves.

    All promises last equally long, so they expire in the order they were made: each
    block is put into one dictionary and taken out of it once.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float], max_blocks: int = 1_000_000
    ) -> None:
        """``clock`` returns seconds and never goes back.

        Beyond ``max_blocks`` promised blocks the oldest promises are forgotten early.
        """
        self._seconds = seconds
        self._clock = clock
        self._max_blocks = max_blocks
        self._queue: deque[_Promise] = deque()
        self._queued_blocks = 0
        self._expiry: dict[str, dict[bytes, float]] = {}

    def __len__(self) -> int:
        """Count the promised blocks, added up over workers."""
        self._expire()
        return sum(len(blocks) for blocks in self._expiry.values())

    def add(self, worker: str, digests: Sequence[bytes]) -> None:
        """Promise that ``worker`` will soon hold ``digests``, which must not change.

        They are all full blocks of one prompt, from its first.
        """
        self._expire()
        if not digests or self._seconds <= 0:
            return
        expires = self._clock() + self._seconds
        self._queue.append(_Promise(expires, worker, digests))
        self._queued_blocks += len(digests)
        promised = self._expiry.setdefault(worker, {})
        promised.update(zip(digests, repeat(expires), strict=False))
        while self._queued_blocks > self._max_blocks:
            self._forget_oldest()

    def leading(self, worker: str, digests: Sequence[bytes], start: int) -> int:
        """Count the promised blocks of ``digests`` from position ``start`` without a gap."""
        return self.all_leading(digests, {worker: start}).get(worker, 0)

    def all_leading(
        self, digests: Sequence[bytes], starts: Mapping[str, int]
    ) -> dict[str, int]:
        """Do so for all workers; those without any are left out.

        ``starts`` names the position from which to count for each; for others it is 0.
        """
        self._expire()
        counts = {}
        end = 0
        for worker, promised in self._expiry.items():
            start = starts.get(worker, 0)
            if start < len(digests) and digests[start] in promised:
                end = _end_of_promised(start, digests, promised, end)
                counts[worker] = end - start
        return counts

    def drop_worker(self, worker: str) -> None:
        """Forget what ``worker`` was to hold."""
        self._expiry.pop(worker, None)

    def _expire(self) -> None:
        now = self._clock()
        while self._queue and self._queue[0].expires <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        promise = self._queue.popleft()
        self._queued_blocks -= len(promise.digests)
        promised = self._expiry.get(promise.worker)
        if promised is None:
            return
        for digest in promise.digests:
            # A later promise of the same block has a later expiry and stays.
            if promised.get(digest) == promise.expires:
                del promised[digest]
        if not promised:
            del self._expiry[promise.worker]


def _end_of_promised(
    start: int, digests: Sequence[bytes], promised: Container[bytes], guess: int
) -> int:
    """Return the place behind the last promised block; the one at ``start`` is promised."""
    # A promise is made of all leading blocks of a prompt, and each digest covers those
    # before it: where one is promised, so are all before it, and for as long. ``bisect``
    # would need a Python call for each comparison.
    low, high = start + 1, len(digests)
    if low <= guess <= high:  # many were promised a prompt that begins alike
        if digests[guess - 1] not in promised:
            high = guess - 1
        elif guess == high or digests[guess] not in promised:
            return guess
        else:
            low = guess + 1
    while low < high:
        middle = (low + high) // 2
        if digests[middle] in promised:
            low = middle + 1
        else:
            high = middle
    return low

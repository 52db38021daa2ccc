"""Blocks that were stored together, in the order in which a prompt has them."""

from __future__ import annotations

from typing import NamedTuple

GONE = b""
"""In the place of a block that nobody holds any more: it may be in another run by now."""


class Summary(NamedTuple):
    """What a look-up found in a run, as long as nothing in it changes."""

    position: int
    """Of its first block in the prompt."""
    first: int
    """Who holds its first block."""
    every: int
    """Who holds all its blocks."""
    ends: dict[str, int]
    """For the workers that hold the first but not all: the place in the prompt of the first
    block that is missing."""


class BlockRun:
    """Digests and who holds each of them, with one bit per worker.

    Neighbours with the same holders have one integer object for them where that costs
    little: whoever goes through a run sees by identity that nothing changes, and memory is
    spared.
    """

    __slots__ = ("digests", "holders", "summary")

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.holders: list[int] = []
        self.summary: Summary | None = None

    def match(self, blocks: list[bytes], position: int) -> tuple[int, int]:
        """Return where ``blocks[position]``, which is in the run, stands in it, and how
        many blocks from there on are those of ``blocks``.
        """
        own = self.digests
        first = blocks[position]
        start = 0 if own[0] == first else own.index(first)
        length = min(len(own) - start, len(blocks) - position)
        # All of it, mostly: lists compare faster than a loop does.
        if own[start : start + length] != blocks[position : position + length]:
            length = 1
            while own[start + length] == blocks[position + length]:
                length += 1
        return start, length

    def add(self, start: int, length: int, bit: int) -> None:
        """Note that the worker with ``bit`` holds ``length`` blocks from ``start`` on."""
        self.summary = None
        holders = self.holders
        last = added = 0
        for place, before in enumerate(holders[start : start + length], start):
            if before is not last:
                last = before
                if added != before | bit:
                    added = before | bit
            holders[place] = added

    def set_holders(self, place: int, holders: int) -> None:
        """Replace the holders of one block."""
        self.summary = None
        own = self.holders
        for neighbour in own[max(0, place - 1) : place + 2]:
            if neighbour == holders:
                holders = neighbour
        own[place] = holders

    def drop(self, place: int) -> None:
        """Take out a block that nobody holds any more."""
        self.summary = None
        self.digests[place] = GONE
        self.holders[place] = 0

    def keep(self, digest: bytes, workers: int) -> bool:
        """Leave only ``workers`` as holders of a block; without any, take it out.

        Returns whether it is still there.
        """
        place = self.digests.index(digest)
        holders = self.holders[place]
        left = holders & workers
        if not left:
            self.drop(place)
        elif left != holders:
            self.set_holders(place, left)
        return left > 0

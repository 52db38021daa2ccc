"""Behind which blocks an engine can go on, where some of its cache groups forget.

A group of full attention needs every block of a prompt's start. One with a sliding window
needs those within the window only, and keeps no more than that; one with states (Mamba,
convolutions) needs the state behind the last block. So such an engine takes from its cache
the longest start of a prompt that its full attention groups hold whole, and that ends in a
block with enough blocks before it in every other group. A block's digest covers all before
it, so this is a property of the digest: a *resume point*.

Enough is the whole window, or all blocks down to the first of the prompt. For each block
the blocks in a row that end there are counted, up to what is needed, and counted anew for
the blocks behind it when one comes or goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Group:
    needed: int
    """Blocks in a row."""
    held: Collection[bytes]
    row: dict[bytes, int] = field(default_factory=dict)
    """For each held block, how many are held in a row that ends there, of those needed."""


class ResumePoints:
    """The resume points of one engine, kept up to date block by block."""

    def __init__(self) -> None:
        self._points: set[bytes] = set()
        self._moved: set[bytes] = set()
        """Those that have become points, or ceased to be, since they were last taken."""
        self._groups: dict[int | None, _Group] = {}
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, set[bytes]] = {}

    def __contains__(self, digest: bytes) -> bool:
        """Whether an engine that has the whole start up to this block can go on behind it."""
        return digest in self._points

    def take_moved(self) -> set[bytes]:
        """Return the blocks that may have become points, or ceased to be, since last time."""
        moved, self._moved = self._moved, set()
        return moved

    def add_group(self, group: int | None, needed: int, held: Collection[bytes]) -> None:
        """Add a group that needs so many blocks in a row; ``held`` is kept by the caller."""
        if group not in self._groups:
            self._groups[group] = _Group(max(1, needed), held)
            self._count(self._parents)

    def link(self, parent: bytes | None, digests: Iterable[bytes]) -> None:
        """Note a row of blocks that follow ``parent``; None where they begin a prompt."""
        for digest in digests:
            if digest not in self._parents:
                self._parents[digest] = parent
                if parent is not None:
                    self._children.setdefault(parent, set()).add(digest)
                self._count([digest])
            parent = digest

    def unlink(self, digest: bytes) -> None:
        """Forget a block that full attention has no more: no prompt can go on there."""
        if digest not in self._parents:
            return
        parent = self._parents.pop(digest)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(digest)
            if not siblings:
                del self._children[parent]
        self._count([digest])

    def changed(self, digest: bytes) -> None:
        """Note that a group holds a block now, or no more."""
        self._count([digest])

    def clear(self) -> None:
        """Forget all blocks; the groups stay, and hold none."""
        self._moved |= self._points
        self._points.clear()
        self._parents.clear()
        self._children.clear()
        for group in self._groups.values():
            group.row.clear()

    def _count(self, digests: Iterable[bytes]) -> None:
        """Count the rows that end at these blocks, and at those behind whose count changes."""
        left = list(digests)
        while left:
            digest = left.pop()
            changed = False
            for group in self._groups.values():
                row = self._row(group, digest)
                if row != group.row.get(digest, 0):
                    changed = True
                    if row:
                        group.row[digest] = row
                    else:
                        del group.row[digest]
            is_point = bool(self._groups) and all(
                group.row.get(digest, 0) == group.needed for group in self._groups.values()
            )
            if is_point != (digest in self._points):
                self._moved.add(digest)
                (self._points.add if is_point else self._points.discard)(digest)
            if changed:
                left += self._children.get(digest, ())

    def _row(self, group: _Group, digest: bytes) -> int:
        if digest not in self._parents or digest not in group.held:
            return 0
        parent = self._parents[digest]
        before = group.needed if parent is None else group.row.get(parent, 0)
        return min(group.needed, before + 1)

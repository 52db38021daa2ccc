"""Where the free space of an arena is. Pure bookkeeping: no memory is touched here."""

from __future__ import annotations

from bisect import bisect_left, insort


class SlotAllocator:
    """Best-fit allocation of byte ranges, with free neighbours merged at once.

    Every slot starts at a multiple of ``alignment`` and takes a multiple of it, so two
    slots never share a page.
    """

    def __init__(self, nbytes: int, alignment: int = 4096) -> None:
        if alignment < 1:
            raise ValueError(f"alignment must be positive, not {alignment}")
        self.alignment = alignment
        self.nbytes = max(nbytes, 0) // alignment * alignment
        self.free_bytes = 0
        self._taken: dict[int, int] = {}
        # One free range, three ways to find it: by size, by its start, by its end.
        self._by_size: list[tuple[int, int]] = []
        self._free_from: dict[int, int] = {}
        self._free_until: dict[int, int] = {}
        if self.nbytes:
            self._add_free(0, self.nbytes)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest range that can be allocated now."""
        return self._by_size[-1][0] if self._by_size else 0

    def slot_bytes(self, nbytes: int) -> int:
        """Return how many bytes a slot for ``nbytes`` takes."""
        return max(-(-nbytes // self.alignment), 1) * self.alignment

    def length_of(self, offset: int) -> int:
        """Return how many bytes the slot at ``offset`` takes."""
        return self._taken[offset]

    def allocate(self, nbytes: int) -> int | None:
        """Take the smallest free range that fits; None when there is none."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        wanted = self.slot_bytes(nbytes)
        place = bisect_left(self._by_size, (wanted, 0))
        if place == len(self._by_size):
            return None
        length, offset = self._by_size[place]
        self._remove_free(offset, length)
        if length > wanted:
            self._add_free(offset + wanted, length - wanted)
        self._taken[offset] = wanted
        return offset

    def free(self, offset: int) -> None:
        """Give a slot back.

        Raises:
            ValueError: no slot starts at ``offset``.
        """
        length = self._taken.pop(offset, None)
        if length is None:
            raise ValueError(f"no slot starts at {offset}")
        start, end = offset, offset + length
        before = self._free_until.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start = before
        after = self._free_from.get(end)
        if after is not None:
            self._remove_free(end, after - end)
            end = after
        self._add_free(start, end - start)

    def _add_free(self, offset: int, length: int) -> None:
        insort(self._by_size, (length, offset))
        self._free_from[offset] = offset + length
        self._free_until[offset + length] = offset
        self.free_bytes += length

    def _remove_free(self, offset: int, length: int) -> None:
        del self._by_size[bisect_left(self._by_size, (length, offset))]
        del self._free_from[offset]
        del self._free_until[offset + length]
        self.free_bytes -= length

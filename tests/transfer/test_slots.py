from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.slots import SlotAllocator

PAGE = 4096


def test_slots_start_on_pages_and_take_whole_pages() -> None:
    slots = SlotAllocator(4 * PAGE)
    assert [slots.allocate(1), slots.allocate(PAGE), slots.allocate(PAGE + 1)] == [
        0,
        PAGE,
        2 * PAGE,
    ]
    assert slots.free_bytes == 0
    assert slots.length_of(2 * PAGE) == 2 * PAGE


def test_an_allocation_of_nothing_still_gets_a_place_of_its_own() -> None:
    slots = SlotAllocator(2 * PAGE)
    assert slots.allocate(0) == 0
    assert slots.allocate(0) == PAGE


def test_a_size_that_is_not_a_multiple_of_the_alignment_is_rounded_down() -> None:
    slots = SlotAllocator(2 * PAGE + 17)
    assert slots.nbytes == slots.free_bytes == 2 * PAGE


@pytest.mark.parametrize("nbytes", [0, PAGE - 1])
def test_without_a_whole_page_nothing_can_be_allocated(nbytes: int) -> None:
    slots = SlotAllocator(nbytes)
    assert slots.allocate(1) is None
    assert slots.largest_free == 0


def test_the_smallest_range_that_fits_is_taken() -> None:
    slots = SlotAllocator(10 * PAGE)
    places = [slots.allocate(n * PAGE) for n in (3, 1, 2, 1, 3)]
    assert None not in places
    slots.free(0)  # three pages
    slots.free(4 * PAGE)  # two pages
    assert slots.allocate(2 * PAGE) == 4 * PAGE
    assert slots.allocate(2 * PAGE) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one_range(order: tuple[int, ...]) -> None:
    slots = SlotAllocator(3 * PAGE)
    for _ in range(3):
        slots.allocate(PAGE)
    for number in order:
        slots.free(number * PAGE)
    assert slots.largest_free == slots.free_bytes == 3 * PAGE
    assert slots.allocate(3 * PAGE) == 0


def test_freeing_what_is_not_taken_is_refused() -> None:
    slots = SlotAllocator(2 * PAGE)
    slots.allocate(2 * PAGE)
    with pytest.raises(ValueError, match="no slot starts at 4096"):
        slots.free(PAGE)
    slots.free(0)
    with pytest.raises(ValueError, match="no slot starts at 0"):
        slots.free(0)
    assert slots.free_bytes == 2 * PAGE


def test_negative_sizes_and_alignments_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        SlotAllocator(PAGE).allocate(-1)
    with pytest.raises(ValueError, match="alignment"):
        SlotAllocator(PAGE, alignment=0)


UNITS = 16


class NaiveSlots:
    """One character per unit of space: the rules, with nothing clever about them."""

    def __init__(self) -> None:
        self.space = ["."] * UNITS
        self.count = 0

    def gaps(self) -> list[tuple[int, int]]:
        """Return (length, start) of each free run."""
        found, start = [], None
        for place, taken_by in enumerate([*self.space, "end"]):
            if taken_by == "." and start is None:
                start = place
            elif taken_by != "." and start is not None:
                found.append((place - start, start))
                start = None
        return found

    def allocate(self, units: int) -> int | None:
        fitting = sorted(gap for gap in self.gaps() if gap[0] >= units)
        if not fitting:
            return None
        start = fitting[0][1]
        self.count += 1
        self.space[start : start + units] = [str(self.count)] * units
        return start

    def free(self, start: int) -> None:
        owner = self.space[start]
        self.space = ["." if unit == owner else unit for unit in self.space]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_it_behaves_like_a_naive_allocator(steps: list[tuple[bool, int]]) -> None:
    slots, naive = SlotAllocator(UNITS * 8, alignment=8), NaiveSlots()
    taken: list[int] = []
    for allocates, number in steps:
        if allocates:
            units = number % 5 + 1
            offset, expected = slots.allocate(units * 8 - number % 8), naive.allocate(units)
            assert offset == (None if expected is None else expected * 8)
            if offset is not None:
                taken.append(offset)
        elif taken:
            offset = taken.pop(number % len(taken))
            slots.free(offset)
            naive.free(offset // 8)
        gaps = naive.gaps()
        assert slots.free_bytes == sum(length for length, _ in gaps) * 8
        assert slots.largest_free == max((length for length, _ in gaps), default=0) * 8

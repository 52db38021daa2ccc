from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import deque

import pytest

from transfer.leases import Lease, Reservation
from transfer.tensor_ref import EntryRef

ENTRY = EntryRef(arena="a", offset=0, nbytes=1, generation=7, identity=b"i" * 16)


def test_a_lease_ends_when_it_is_dropped() -> None:
    released: deque[int] = deque()
    lease = Lease(ENTRY, released)
    assert lease.entry == ENTRY
    assert not released
    del lease
    assert list(released) == [7]


def test_releasing_twice_and_dropping_counts_once() -> None:
    released: deque[int] = deque()
    lease = Lease(ENTRY, released)
    lease.release()
    lease.release()
    del lease
    assert list(released) == [7]


def test_a_lease_in_a_reference_cycle_ends_with_the_cycle() -> None:
    class Item:
        def __init__(self) -> None:
            self.itself = self
            self.lease = Lease(ENTRY, released)

    released: deque[int] = deque()
    Item()
    gc.collect()
    assert list(released) == [7]


def test_threads_that_release_one_lease_at_once_count_once() -> None:
    released: deque[int] = deque()
    for _ in range(50):
        lease = Lease(ENTRY, released)
        threads = [threading.Thread(target=lease.release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(released) == 50


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lease_cannot_be_duplicated(duplicate: object) -> None:
    lease = Lease(ENTRY, deque())
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(lease)  # type: ignore[operator]


def make_reservation(events: list[str]) -> Reservation:
    def publish(_: bytes) -> Lease:
        events.append("publish")
        return Lease(ENTRY, deque())

    return Reservation(memoryview(bytearray(4)), 0, publish, lambda: events.append("abandon"))


def test_a_sealed_reservation_is_published_and_not_abandoned() -> None:
    events: list[str] = []
    reservation = make_reservation(events)
    assert reservation.seal(ENTRY.identity).entry == ENTRY
    reservation.cancel()
    del reservation
    assert events == ["publish"]


def test_a_dropped_reservation_is_abandoned() -> None:
    events: list[str] = []
    make_reservation(events)
    assert events == ["abandon"]


def test_a_cancelled_reservation_is_abandoned_once_and_cannot_be_sealed() -> None:
    events: list[str] = []
    reservation = make_reservation(events)
    reservation.cancel()
    reservation.cancel()
    with pytest.raises(RuntimeError, match="sealed or cancelled"):
        reservation.seal(ENTRY.identity)
    del reservation
    assert events == ["abandon"]


def test_sealing_twice_is_refused() -> None:
    reservation = make_reservation([])
    reservation.seal(ENTRY.identity)
    with pytest.raises(RuntimeError, match="sealed or cancelled"):
        reservation.seal(ENTRY.identity)


def test_memory_cannot_be_written_after_sealing() -> None:
    reservation = make_reservation([])
    memory = reservation.memory
    memory[0] = 1
    reservation.seal(ENTRY.identity)
    with pytest.raises(ValueError, match="released"):
        memory[0] = 2

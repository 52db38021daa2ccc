from __future__ import annotations

from collections.abc import Iterator

import pytest

from transfer.arena import Arena
from transfer.arena_view import ArenaView
from transfer.arena_writer import ArenaWriter
from transfer.errors import ArenaGone, BadMessage
from transfer.tensor_ref import ArenaId

IDENTITY = bytes(range(16))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(1 << 16, populate=False) as arena:
        yield arena


def test_what_is_written_elsewhere_is_what_readers_read(arena: Arena) -> None:
    reservation = arena.reserve(5)
    ArenaWriter(arena.id).memory(reservation.offset, 5)[:] = b"hello"
    assert bytes(reservation.memory) == b"hello"
    lease = reservation.seal(IDENTITY)
    with ArenaView(arena.id) as view:
        assert bytes(view.read(lease.entry)) == b"hello"


def test_the_last_byte_of_the_file_can_be_written(arena: Arena) -> None:
    reservation = arena.reserve((1 << 16) - 64)
    with ArenaWriter(arena.id).memory(reservation.offset, (1 << 16) - 64) as memory:
        memory[-1] = 7
    assert reservation.memory[-1] == 7


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 1), (64, 1), (4096, 1), (4161, 1), (4160, 1 << 16), (4160, -1), (1 << 40, 1)],
)
def test_only_places_of_reservations_can_be_written(
    arena: Arena, offset: int, nbytes: int
) -> None:
    with pytest.raises(BadMessage):
        ArenaWriter(arena.id).memory(offset, nbytes)


def test_another_arena_of_the_same_name_is_refused(arena: Arena) -> None:
    with pytest.raises(ArenaGone):
        ArenaWriter(ArenaId(arena.id.name, bytes(16)))


@pytest.mark.parametrize("name", ["../etc/passwd", "foveal-1-2-xyz!"])
def test_names_that_no_arena_has_are_refused(name: str) -> None:
    with pytest.raises(BadMessage):
        ArenaWriter(ArenaId(name, bytes(16)))

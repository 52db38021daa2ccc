from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer import arena_file
from transfer.arena import Arena
from transfer.arena_file import sweep_dead_arenas
from transfer.arena_view import ArenaView
from transfer.errors import ArenaFull, ArenaGone, StaleRef
from transfer.leases import Lease
from transfer.process import process_start_time
from transfer.tensor_ref import EntryRef

PAGE = 4096
SHM = Path("/dev/shm")


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """Four pages: four small entries."""
    with Arena(4 * PAGE, tmp_path) as arena:
        yield arena


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(arena: Arena, number: int, nbytes: int = 100) -> Lease:
    reservation = arena.reserve(nbytes)
    reservation.memory[:] = bytes([number]) * nbytes
    return reservation.seal(name_of(number))


def test_what_was_written_is_found_by_its_identity(arena: Arena) -> None:
    assert arena.lease(name_of(1)) is None
    assert name_of(1) not in arena
    put(arena, 1)
    lease = arena.lease(name_of(1))
    assert lease is not None
    assert lease.entry.identity == name_of(1)
    assert lease.entry.nbytes == 100
    assert lease.entry.arena == arena.id.name
    assert name_of(1) in arena
    assert arena.view(lease.entry) == b"\1" * 100


def test_a_reservation_is_not_found_before_it_is_sealed(arena: Arena) -> None:
    reservation = arena.reserve(100)
    assert name_of(1) not in arena
    assert arena.lease(name_of(1)) is None
    reservation.seal(name_of(1))
    assert name_of(1) in arena


def test_memory_has_exactly_the_bytes_asked_for(arena: Arena) -> None:
    for nbytes in (0, 1, 4 * PAGE - 64):
        reservation = arena.reserve(nbytes)
        assert reservation.memory.nbytes == nbytes
        assert not reservation.memory.readonly
        reservation.cancel()
    with pytest.raises(ArenaFull):
        arena.reserve(4 * PAGE - 63)


def test_payloads_are_aligned_for_any_dtype(arena: Arena) -> None:
    leases = [put(arena, number) for number in range(3)]
    assert {lease.entry.offset % 64 for lease in leases} == {0}


def test_every_entry_has_a_generation_of_its_own(arena: Arena) -> None:
    generations = []
    for number in range(10):
        generations.append(put(arena, number).entry.generation)
    assert generations == sorted(set(generations))


def test_the_least_recently_used_entry_is_evicted_first(arena: Arena) -> None:
    for number in range(4):
        put(arena, number)
    hit = arena.lease(name_of(0))
    assert hit is not None
    hit.release()
    put(arena, 4)
    assert [name_of(number) in arena for number in range(5)] == [True, False, True, True, True]
    assert arena.stats().evictions == 1


def test_a_full_arena_refuses_without_evicting_leased_entries(arena: Arena) -> None:
    leases = [put(arena, number) for number in range(4)]
    with pytest.raises(ArenaFull, match="at most 0 in a row"):
        arena.reserve(100)
    for number, lease in enumerate(leases):
        assert bytes(arena.view(lease.entry)) == bytes([number]) * 100
    assert arena.stats().full == 1


def test_nothing_is_evicted_when_that_would_not_make_enough_room(arena: Arena) -> None:
    leases = [put(arena, number) for number in range(4)]
    pinned = leases[1]
    del leases
    with pytest.raises(ArenaFull, match=f"at most {2 * PAGE} in a row"):
        arena.reserve(2 * PAGE)
    assert pinned.entry.identity in arena
    assert arena.stats().entries == 4
    assert arena.stats().evictions == 0


def test_evicting_makes_room_between_leased_entries(arena: Arena) -> None:
    leases = [put(arena, number) for number in range(4)]
    pinned = leases[1]
    del leases
    assert arena.reserve(2 * PAGE - 64).memory.nbytes == 2 * PAGE - 64
    assert bytes(arena.view(pinned.entry)) == b"\1" * 100


def test_one_lease_of_several_still_pins(arena: Arena) -> None:
    first = put(arena, 1)
    second = arena.lease(name_of(1))
    assert second is not None
    first.release()
    arena.drop_unleased()
    assert name_of(1) in arena
    assert arena.stats().leased_entries == 1
    second.release()
    assert arena.stats().leased_entries == 0
    arena.drop_unleased()
    assert name_of(1) not in arena


def test_an_open_reservation_is_not_given_away(arena: Arena) -> None:
    held = [arena.reserve(100) for number in range(4)]
    with pytest.raises(ArenaFull):
        arena.reserve(100)
    held[2].cancel()
    assert arena.reserve(100).memory.nbytes == 100


def test_a_reservation_that_is_dropped_gives_its_space_back(arena: Arena) -> None:
    def fail() -> None:
        reservation = arena.reserve(3 * PAGE)
        reservation.memory[0] = 1
        raise OSError

    for _ in range(3):
        with pytest.raises(OSError):
            fail()
    assert arena.stats().bytes_used == 0


def test_the_second_to_seal_one_identity_gets_the_first_one_s_entry(arena: Arena) -> None:
    first, second = arena.reserve(100), arena.reserve(100)
    first.memory[:] = second.memory[:] = b"x" * 100
    leases = [first.seal(name_of(1)), second.seal(name_of(1))]
    assert leases[0].entry == leases[1].entry
    stats = arena.stats()
    assert (stats.entries, stats.bytes_used, stats.bytes_written) == (1, PAGE, 100)
    leases.pop().release()
    arena.drop_unleased()
    assert name_of(1) in arena


def test_the_view_of_an_evicted_entry_is_refused(arena: Arena) -> None:
    gone = put(arena, 1).entry
    arena.drop_unleased()
    with pytest.raises(StaleRef):
        arena.view(gone)
    again = put(arena, 1)
    assert again.entry.offset == gone.offset
    with pytest.raises(StaleRef):
        arena.view(gone)


def test_the_counters_tell_what_happened(arena: Arena) -> None:
    kept = put(arena, 1, 5000)
    put(arena, 2, 10)
    stats = arena.stats()
    assert stats.entries == 2
    assert stats.leased_entries == 1
    assert stats.bytes_used == 3 * PAGE
    assert stats.bytes_total == 4 * PAGE
    assert stats.bytes_written == 5010
    assert (stats.evictions, stats.full) == (0, 0)
    assert kept.entry.nbytes == 5000


@pytest.mark.parametrize("identity", [b"", b"x" * 15, b"x" * 33])
def test_an_identity_of_another_length_is_refused(arena: Arena, identity: bytes) -> None:
    with pytest.raises(ValueError, match="16 to 32 bytes"):
        arena.reserve(1).seal(identity)


def test_threads_share_an_arena_without_losing_space(arena: Arena) -> None:
    problems: list[object] = []

    def churn(seed: int) -> None:
        for step in range(300):
            number = (seed + step) % 6
            lease = arena.lease(name_of(number))
            if lease is None:
                try:
                    lease = put(arena, number)
                except ArenaFull:
                    continue
            if bytes(arena.view(lease.entry)) != bytes([number]) * 100:
                problems.append((seed, step))

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert arena.stats().leased_entries == 0
    arena.drop_unleased()
    assert arena.stats().bytes_used == 0
    assert arena.reserve(4 * PAGE - 64)


def test_the_file_is_only_ours_and_has_all_its_pages(tmp_path: Path) -> None:
    with Arena(64 * PAGE, tmp_path, populate=False) as arena:
        stat = (tmp_path / arena.id.name).stat()
        assert stat.st_mode & 0o777 == 0o600
        assert stat.st_size == 65 * PAGE
        assert stat.st_blocks * 512 >= 65 * PAGE
        start_time = process_start_time(os.getpid())
        assert arena.id.name.startswith(f"foveal-{os.getpid()}-{start_time}-")


def test_two_arenas_have_different_names_and_nonces(tmp_path: Path) -> None:
    with Arena(PAGE, tmp_path) as one, Arena(PAGE, tmp_path) as other:
        assert one.id.name != other.id.name
        assert one.id.nonce != other.id.nonce
        assert len(one.id.nonce) == 16


def test_an_arena_larger_than_what_is_free_is_refused_with_a_remedy() -> None:
    before = set(os.listdir(SHM))
    with pytest.raises(ArenaFull) as caught:
        Arena(2 * shutil.disk_usage(SHM).total)
    message = str(caught.value)
    for remedy in ("--mm-arena-gb", "to 0 to send tensors inline", "--shm-size"):
        assert remedy in message
    assert set(os.listdir(SHM)) - before == set()


def test_space_that_is_lost_after_the_check_is_refused_the_same_way(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    limit = 2**62  # No filesystem has it, though the one of /proc states no limit.
    try:
        with pytest.raises(ArenaFull, match="--mm-arena-gb"):
            arena_file.take_space(fd, limit, Path("/proc"))
    finally:
        os.close(fd)


def test_closing_removes_the_file_once_and_ends_all_use(tmp_path: Path) -> None:
    arena = Arena(4 * PAGE, tmp_path)
    lease = put(arena, 1)
    open_reservation = arena.reserve(10)
    arena.close()
    assert list(tmp_path.iterdir()) == []
    arena.close()
    with pytest.raises(ArenaGone):
        arena.reserve(10)
    with pytest.raises(ArenaGone):
        arena.view(lease.entry)
    with pytest.raises(ArenaGone):
        open_reservation.seal(name_of(2))
    assert arena.lease(name_of(1)) is None
    assert name_of(1) not in arena
    arena.drop_unleased()
    lease.release()
    assert arena.stats().leased_entries == 0


def test_a_view_outlives_the_closing_of_its_arena(tmp_path: Path) -> None:
    arena = Arena(4 * PAGE, tmp_path)
    lease = put(arena, 7)
    view = arena.view(lease.entry)
    arena.close()
    assert bytes(view) == b"\7" * 100


def test_a_forked_child_does_not_remove_the_file(arena: Arena, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            arena.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / arena.id.name).exists()


def run(script: str, *args: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    ).stdout.strip()


MAKE_ARENA = """
import os, sys
from pathlib import Path
from transfer.arena import Arena
arena = Arena(8192, Path(sys.argv[1]))
print(arena.id.name, flush=True)
"""


def test_an_owner_that_exits_without_closing_leaves_nothing(tmp_path: Path) -> None:
    assert run(MAKE_ARENA, str(tmp_path)).startswith("foveal-")
    assert list(tmp_path.iterdir()) == []


def test_the_arena_of_a_killed_owner_is_swept_and_no_other(
    arena: Arena, tmp_path: Path
) -> None:
    name = run(MAKE_ARENA + "os.kill(os.getpid(), 9)", str(tmp_path))
    (tmp_path / "foveal-notes.txt").touch()
    (tmp_path / "psm_1234").touch()
    assert (tmp_path / name).exists()
    assert sweep_dead_arenas(tmp_path) == [name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [arena.id.name, "foveal-notes.txt", "psm_1234"]
    )


def test_the_arena_of_an_owner_whose_id_was_used_again_is_swept(tmp_path: Path) -> None:
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    stale = tmp_path / f"foveal-{os.getpid()}-{start_time - 1}-ab"
    stale.touch()
    assert sweep_dead_arenas(tmp_path) == [stale.name]


def test_the_arena_of_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    living = tmp_path / f"foveal-{os.getpid()}-{process_start_time(os.getpid())}-ab"
    living.touch()
    assert sweep_dead_arenas(tmp_path) == []


def test_the_arena_of_an_owner_in_another_container_is_left_alone(tmp_path: Path) -> None:
    unseen = tmp_path / "foveal-1-1-ab"
    with unseen.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep_dead_arenas(tmp_path) == []
        assert unseen.exists()
    assert sweep_dead_arenas(tmp_path) == [unseen.name]


def test_an_arena_holds_its_lock_while_it_is_open(arena: Arena, tmp_path: Path) -> None:
    with (
        (tmp_path / arena.id.name).open("rb") as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_many_generations_keep_their_bytes_apart(tmp_path: Path) -> None:
    with Arena(64 * PAGE, tmp_path) as arena, ArenaView(arena.id, tmp_path) as view:
        stale: list[EntryRef] = []
        for number in range(1, 200):
            lease = put(arena, number, (number * 977) % (9 * PAGE))
            assert bytes(view.read(lease.entry)) == bytes([number]) * lease.entry.nbytes
            stale.append(lease.entry)
        for ref in stale:
            if ref.identity not in arena:
                with pytest.raises(StaleRef):
                    view.read(ref)
        assert arena.stats().evictions > 100

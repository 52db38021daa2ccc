from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from transfer.arena import Arena
from transfer.arena_layout import ENTRY_HEADER_BYTES, PAGE_BYTES
from transfer.arena_view import ArenaView
from transfer.errors import ArenaGone, BadMessage, StaleRef
from transfer.leases import Lease
from transfer.tensor_ref import ArenaId, EntryRef

READER = """
import sys
from pathlib import Path
import msgspec
from transfer.arena_view import ArenaView
from transfer.errors import StaleRef
from transfer.tensor_ref import ArenaId, EntryRef

arena, directory = sys.argv[1:]
view = ArenaView(msgspec.json.decode(arena, type=ArenaId), Path(directory))
for line in sys.stdin:
    scribbles, ref = msgspec.json.decode(line, type=tuple[bool, EntryRef])
    try:
        memory = view.read(ref)
        print(bytes(memory).hex(), flush=True)
        if scribbles:
            memory[:] = b"!" * memory.nbytes
    except StaleRef:
        print("stale", flush=True)
"""


class OtherProcess:
    """A reader of the arena in a process of its own."""

    def __init__(self, arena: ArenaId, directory: Path) -> None:
        named = msgspec.json.encode(arena).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER, named, str(directory)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def read(self, ref: EntryRef, *, scribbles: bool = False) -> bytes | None:
        """Return what the reader sees, None if stale; it may overwrite it afterwards."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode((scribbles, ref)) + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().decode().strip()
        return None if answer == "stale" else bytes.fromhex(answer)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena(4 * PAGE_BYTES, tmp_path) as arena:
        yield arena


@pytest.fixture
def view(arena: Arena, tmp_path: Path) -> Iterator[ArenaView]:
    with ArenaView(arena.id, tmp_path) as view:
        yield view


@pytest.fixture
def other(arena: Arena, tmp_path: Path) -> Iterator[OtherProcess]:
    other = OtherProcess(arena.id, tmp_path)
    yield other
    other.close()


def put(arena: Arena, number: int, nbytes: int = 100) -> Lease:
    reservation = arena.reserve(nbytes)
    reservation.memory[:] = bytes([number]) * nbytes
    return reservation.seal(bytes([number]) * 16)


def test_another_process_reads_what_was_written(arena: Arena, other: OtherProcess) -> None:
    lease = put(arena, 1, 2 * PAGE_BYTES)
    assert other.read(lease.entry) == b"\1" * 2 * PAGE_BYTES


def test_a_reader_that_writes_harms_neither_the_owner_nor_other_readers(
    arena: Arena, view: ArenaView, other: OtherProcess
) -> None:
    lease = put(arena, 1)
    assert other.read(lease.entry, scribbles=True) == b"\1" * 100
    assert bytes(arena.view(lease.entry)) == b"\1" * 100
    assert bytes(view.read(lease.entry)) == b"\1" * 100


def test_all_who_read_one_entry_share_its_memory(arena: Arena, view: ArenaView) -> None:
    """Reading again must not pull the pages from under the tensors of another request."""
    lease = put(arena, 1, 3 * PAGE_BYTES)
    first = view.read(lease.entry)
    for place in (0, PAGE_BYTES, 3 * PAGE_BYTES - 1):
        first[place] = 2
        second = view.read(lease.entry)
        assert first[place] == second[place] == 2
    assert bytes(arena.view(lease.entry)) == b"\1" * 3 * PAGE_BYTES


def test_what_a_reader_wrote_is_gone_when_the_same_contents_are_put_there_anew(
    arena: Arena, view: ArenaView
) -> None:
    nbytes = 3 * PAGE_BYTES
    first = put(arena, 1, nbytes)
    view.read(first.entry)[:] = b"!" * nbytes
    first.release()
    arena.drop_unleased()
    second = put(arena, 1, nbytes)
    assert second.entry.offset == first.entry.offset
    assert bytes(view.read(second.entry)) == b"\1" * nbytes


def test_a_reader_that_wrote_to_small_entries_sees_a_large_one_in_their_place(
    arena: Arena, view: ArenaView
) -> None:
    small = [put(arena, number) for number in (1, 2, 3)]
    # The first page of the large one was never read, some of the others were.
    for lease in small[1:]:
        view.read(lease.entry)[:] = b"!" * 100
    for lease in small:
        lease.release()
    arena.drop_unleased()
    large = put(arena, 4, 4 * PAGE_BYTES - ENTRY_HEADER_BYTES)
    assert bytes(view.read(large.entry)) == b"\4" * large.entry.nbytes


def test_a_reader_that_wrote_sees_the_next_generation(
    arena: Arena, other: OtherProcess
) -> None:
    old = put(arena, 1, 3 * PAGE_BYTES).entry
    other.read(old, scribbles=True)
    arena.drop_unleased()
    # Each of these has its header where the reader wrote payload bytes before.
    new = [put(arena, number) for number in (2, 3, 4)]
    assert {lease.entry.offset // PAGE_BYTES for lease in new} == {1, 2, 3}
    for number, lease in zip((2, 3, 4), new, strict=True):
        assert other.read(lease.entry) == bytes([number]) * 100
    assert other.read(old) is None


def test_a_reader_that_wrote_cannot_take_an_old_header_for_a_good_one(
    arena: Arena, other: OtherProcess
) -> None:
    old = put(arena, 1)
    ref = old.entry
    # The write leaves the reader with a copy of the page that has the header, too.
    other.read(ref, scribbles=True)
    old.release()
    arena.drop_unleased()
    assert other.read(ref) is None
    put(arena, 2)
    assert other.read(ref) is None


def test_a_reference_to_an_evicted_entry_is_stale_before_its_space_is_used_again(
    arena: Arena, view: ArenaView
) -> None:
    ref = put(arena, 1).entry
    view.check(ref)
    arena.drop_unleased()
    reservation = arena.reserve(100)
    for refuse in (view.check, view.read):
        with pytest.raises(StaleRef, match="no longer"):
            refuse(ref)
    reservation.cancel()


def test_the_same_contents_in_the_same_place_are_another_generation(
    arena: Arena, view: ArenaView
) -> None:
    old = put(arena, 1).entry
    arena.drop_unleased()
    new = put(arena, 1)
    assert new.entry.offset == old.offset
    with pytest.raises(StaleRef):
        view.read(old)
    assert bytes(view.read(new.entry)) == b"\1" * 100


@pytest.mark.parametrize(
    "change",
    [
        {"arena": "foveal-1-1-ff"},
        {"offset": 0},
        {"offset": 64},
        {"offset": -4032},
        {"offset": PAGE_BYTES},
        {"offset": PAGE_BYTES + 65},
        {"offset": 2 * PAGE_BYTES + 64},
        {"offset": 5 * PAGE_BYTES + 64},
        {"offset": 2**63 + 64},
        {"nbytes": 99},
        {"nbytes": 101},
        {"nbytes": -1},
        {"nbytes": 4 * PAGE_BYTES},
        {"nbytes": 2**64},
        {"generation": 0},
        {"generation": 2},
        {"generation": -1},
        {"generation": 2**64},
        {"identity": b""},
        {"identity": b"\1" * 15},
        {"identity": b"\1" * 16 + b"\0"},
        {"identity": b"\1" * 40},
        {"identity": b"\2" * 16},
    ],
    ids=str,
)
def test_a_reference_with_anything_wrong_is_refused(
    arena: Arena, view: ArenaView, change: dict[str, object]
) -> None:
    lease = put(arena, 1)
    view.check(lease.entry)
    wrong = msgspec.structs.replace(lease.entry, **change)
    for refuse in (view.check, view.read):
        with pytest.raises(StaleRef):
            refuse(wrong)


@pytest.mark.parametrize(
    "name", ["../foveal-1-1-ab", "foveal-1-1-ab/x", "psm_12", "", "foveal-1-1-a\0", "foveal-x"]
)
def test_a_name_that_no_arena_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadMessage, match="not the name of an arena"):
        ArenaView(ArenaId(name=name, nonce=bytes(16)), tmp_path)


def test_an_arena_that_is_not_here_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ArenaGone, match="cannot open"):
        ArenaView(ArenaId(name="foveal-1-1-ab", nonce=bytes(16)), tmp_path)


def test_a_link_in_place_of_an_arena_is_not_followed(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "foveal-1-1-ab").symlink_to(tmp_path / arena.id.name)
    with pytest.raises(ArenaGone, match="cannot open"):
        ArenaView(ArenaId(name="foveal-1-1-ab", nonce=arena.id.nonce), tmp_path)


def test_another_host_s_arena_of_the_same_name_is_gone(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(ArenaGone, match="another arena"):
        ArenaView(ArenaId(name=arena.id.name, nonce=bytes(16)), tmp_path)


@pytest.mark.parametrize("contents", [b"", b"short", bytes(8192)])
def test_a_file_that_is_no_arena_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "foveal-1-1-ab").write_bytes(contents)
    with pytest.raises(ArenaGone, match="not an arena"):
        ArenaView(ArenaId(name="foveal-1-1-ab", nonce=bytes(16)), tmp_path)


def test_a_truncated_arena_is_refused(arena: Arena, tmp_path: Path) -> None:
    os.truncate(tmp_path / arena.id.name, 2 * PAGE_BYTES)
    with pytest.raises(ArenaGone, match="size"):
        ArenaView(arena.id, tmp_path)


def test_a_refused_arena_leaves_no_descriptor_open(arena: Arena, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ArenaGone):
        ArenaView(ArenaId(name=arena.id.name, nonce=bytes(16)), tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_view_outlives_its_arena(arena: Arena, view: ArenaView) -> None:
    lease = put(arena, 1)
    memory = view.read(lease.entry)
    arena.close()
    assert bytes(memory) == b"\1" * 100


def test_memory_outlives_the_closing_of_its_view(arena: Arena, view: ArenaView) -> None:
    lease = put(arena, 1)
    memory = view.read(lease.entry)
    view.close()
    view.close()
    assert bytes(memory) == b"\1" * 100
    with pytest.raises(ArenaGone):
        view.read(lease.entry)


def test_a_reader_that_exits_leaves_the_arena_in_place(
    arena: Arena, other: OtherProcess, tmp_path: Path
) -> None:
    lease = put(arena, 1)
    assert other.read(lease.entry) is not None
    other.close()
    with ArenaView(arena.id, tmp_path) as view:
        assert bytes(view.read(lease.entry)) == b"\1" * 100

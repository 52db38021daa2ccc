"""Encoder outputs shared by several processes, whatever happens to any of them."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transfer.embeddings.entry import DTYPES, HEADER_BYTES
from transfer.embeddings.store import LOCK_NAME, PART_PREFIX, EmbeddingStore
from transfer.errors import StaleRef
from transfer.identity import tensor_bytes

KEY = "a1" * 12


def named(number: int) -> str:
    return f"image-{number:032x}"


def output(number: float, tokens: int = 16) -> torch.Tensor:
    return torch.full((tokens, 64), float(number))


ENTRY_BYTES = HEADER_BYTES + output(0).nbytes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
def store(directory: Path) -> Iterator[EmbeddingStore]:
    store = EmbeddingStore(directory, KEY, 4 * ENTRY_BYTES)
    yield store
    store.close()


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(store: EmbeddingStore, name: str):
    bits = torch.randint(0, 256, (5, 3, 8), dtype=torch.uint8)  # every kind of NaN too
    saved = bits.view(DTYPES[name])
    assert store.save(named(1), saved)
    loaded = store.load(named(1))
    assert loaded is not None
    assert (loaded.dtype, loaded.shape) == (saved.dtype, saved.shape)
    assert bytes(tensor_bytes(loaded)) == bytes(tensor_bytes(saved))


def test_a_part_of_a_batch_is_saved_alone(store: EmbeddingStore):
    batch = torch.randn(32, 64)
    part = batch.t()[:16].t()
    store.save(named(1), part)
    assert torch.equal(store.load(named(1)), part)


def test_an_output_without_elements_is_kept(store: EmbeddingStore):
    store.save(named(1), torch.empty(0, 64))
    assert store.load(named(1)).shape == (0, 64)


def test_every_process_finds_what_one_has_saved(store: EmbeddingStore, directory: Path):
    other = EmbeddingStore(directory, KEY, 4 * ENTRY_BYTES)
    store.save(named(1), output(7))
    assert torch.equal(other.load(named(1)), output(7))
    assert not other.save(named(1), output(7))
    assert store.identifiers() == other.identifiers() == [named(1)]


def test_the_longest_unused_goes_first(store: EmbeddingStore):
    for number in range(4):
        store.save(named(number), output(number))
    store.load(named(0))
    assert store.save(named(4), output(4))
    assert store.identifiers() == [named(2), named(3), named(0), named(4)]
    assert store.counts.evicted == 1


def test_what_is_leased_stays(store: EmbeddingStore, directory: Path):
    other = EmbeddingStore(directory, KEY, 4 * ENTRY_BYTES)
    for number in range(4):
        store.save(named(number), output(number))
    leases = [other.lease(named(number)) for number in range(4)]
    assert not store.save(named(4), output(4))
    assert store.counts.without_room == 1
    leases[2].release()
    assert store.save(named(4), output(4))
    assert set(store.identifiers()) == {named(number) for number in (0, 1, 3, 4)}


def test_a_lease_ends_when_it_is_dropped(store: EmbeddingStore):
    for number in range(4):
        store.save(named(number), output(number))
    leases = [store.lease(named(number)) for number in range(4)]
    leases.clear()
    assert store.save(named(4), output(4))


def test_two_leases_of_one_output_end_one_by_one(store: EmbeddingStore):
    small = EmbeddingStore(store.directory, KEY, ENTRY_BYTES)
    small.save(named(1), output(1))
    first, second = small.lease(named(1)), small.lease(named(1))
    first.release()
    assert not small.save(named(2), output(2))
    second.release()
    assert small.save(named(2), output(2))


def test_what_is_larger_than_all_is_not_saved_and_costs_nobody(store: EmbeddingStore):
    store.save(named(1), output(1))
    assert not store.save(named(2), output(2, tokens=100))
    assert store.identifiers() == [named(1)]


def test_cleared_outputs_can_be_read_by_who_leases_them(store: EmbeddingStore):
    store.save(named(1), output(1))
    lease = store.lease(named(1))
    store.clear()
    assert store.lease(named(1)) is None
    assert torch.equal(lease.load(), output(1))
    assert store.save(named(1), output(2))
    assert torch.equal(store.load(named(1)), output(2))


@pytest.mark.parametrize(
    "identifier",
    ["../image-" + "0" * 32, "image-123", "adapter:" + named(1), "lock", "", named(1) + "\n"],
)
def test_names_that_are_no_identity_of_contents_are_not_kept(
    store: EmbeddingStore, identifier: str
):
    assert not store.save(identifier, output(1))
    assert store.load(identifier) is None
    assert [path.name for path in store.directory.iterdir()] == [LOCK_NAME]


@pytest.mark.parametrize(
    "other", [torch.ones(4, dtype=torch.int64), torch.ones(4).to_sparse()]
)
def test_what_is_no_output_of_an_encoder_is_not_kept(
    store: EmbeddingStore, other: torch.Tensor
):
    assert not store.save(named(1), other)
    assert store.identifiers() == []


def test_files_are_for_this_user_only(store: EmbeddingStore):
    store.save(named(1), output(1))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in store.directory.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


class TestWhatIsNotWhole:
    """Is a miss, is removed, and can be saved anew."""

    def refused(self, store: EmbeddingStore) -> bool:
        missed = store.load(named(1)) is None and store.lease_whole(named(1)) is None
        gone = store.identifiers() == []
        anew = store.save(named(1), output(3))
        return missed and gone and anew and torch.equal(store.load(named(1)), output(3))

    @pytest.mark.parametrize("place", [0, 9, 25, 60, HEADER_BYTES, ENTRY_BYTES - 1])
    def test_a_flipped_bit(self, store: EmbeddingStore, place: int):
        store.save(named(1), output(1))
        path = store.directory / named(1)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        assert self.refused(store)
        assert store.counts.refused == 1

    @pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, ENTRY_BYTES - 1, ENTRY_BYTES + 1])
    def test_another_length(self, store: EmbeddingStore, size: int):
        store.save(named(1), output(1))
        os.truncate(store.directory / named(1), size)
        assert self.refused(store)

    def test_another_image_under_this_name(self, store: EmbeddingStore):
        store.save(named(2), output(2))
        (store.directory / named(2)).rename(store.directory / named(1))
        assert self.refused(store)

    def test_another_model(self, store: EmbeddingStore):
        foreign = EmbeddingStore(store.directory, "b2" * 12, store.capacity)
        foreign.save(named(1), output(2))
        assert self.refused(store)

    def test_a_file_that_shrinks_while_it_is_leased(self, store: EmbeddingStore):
        store.save(named(1), output(1))
        lease = store.lease(named(1))
        os.truncate(store.directory / named(1), HEADER_BYTES + 8)
        assert store._load(lease) is None
        assert store.identifiers() == []

    def test_a_link_to_elsewhere(self, store: EmbeddingStore, tmp_path: Path):
        (tmp_path / "elsewhere").write_bytes(b"x" * ENTRY_BYTES)
        (store.directory / named(1)).symlink_to(tmp_path / "elsewhere")
        assert store.load(named(1)) is None


class TestTheBytesOfAFileElsewhere:
    """Are an output like any other, once all that they state has been checked."""

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Iterator[EmbeddingStore]:
        store = EmbeddingStore(tmp_path / "elsewhere", KEY, 4 * ENTRY_BYTES)
        yield store
        store.close()

    def copied(self, elsewhere: EmbeddingStore, identifier: str) -> memoryview:
        lease = elsewhere.lease(identifier)
        assert lease is not None
        memory = memoryview(bytearray(lease.nbytes))
        lease.copy_to(memory)
        return memory

    def test_are_what_the_file_has(self, elsewhere: EmbeddingStore):
        elsewhere.save(named(1), output(7))
        copied = self.copied(elsewhere, named(1))
        assert bytes(copied) == (elsewhere.directory / named(1)).read_bytes()

    def test_are_kept_bit_for_bit(self, store: EmbeddingStore, elsewhere: EmbeddingStore):
        bits = torch.randint(0, 256, (5, 3, 8), dtype=torch.uint8)
        elsewhere.save(named(1), bits.view(torch.bfloat16))
        copied = self.copied(elsewhere, named(1))
        assert store.save_entry(named(1), copied)
        loaded = store.load(named(1))
        assert (loaded.dtype, loaded.shape) == (torch.bfloat16, (5, 3, 4))
        assert torch.equal(loaded.view(torch.uint8), bits)
        assert store.save_entry(named(1), copied)  # it is here
        assert store.counts.saved == 1

    def test_find_no_room_where_all_is_leased(
        self, store: EmbeddingStore, elsewhere: EmbeddingStore
    ):
        for number in range(4):
            store.save(named(number), output(number))
        leases = [store.lease(named(number)) for number in range(4)]
        elsewhere.save(named(9), output(9))
        assert not store.save_entry(named(9), self.copied(elsewhere, named(9)))
        assert len(leases) == len(store.identifiers())

    @pytest.mark.parametrize("place", [0, 9, 25, 60, HEADER_BYTES, ENTRY_BYTES - 1])
    def test_are_refused_with_a_flipped_bit(
        self, store: EmbeddingStore, elsewhere: EmbeddingStore, place: int
    ):
        elsewhere.save(named(1), output(1))
        copied = self.copied(elsewhere, named(1))
        copied[place] ^= 1
        with pytest.raises(StaleRef):
            store.save_entry(named(1), copied)
        assert store.identifiers() == []

    @pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, ENTRY_BYTES - 1])
    def test_are_refused_in_part(
        self, store: EmbeddingStore, elsewhere: EmbeddingStore, size: int
    ):
        elsewhere.save(named(1), output(1))
        with pytest.raises(StaleRef):
            store.save_entry(named(1), self.copied(elsewhere, named(1))[:size])
        assert store.identifiers() == []

    def test_are_refused_under_another_name_or_of_another_model(
        self, store: EmbeddingStore, elsewhere: EmbeddingStore
    ):
        elsewhere.save(named(2), output(2))
        copied = self.copied(elsewhere, named(2))
        with pytest.raises(StaleRef):
            store.save_entry(named(1), copied)
        with pytest.raises(StaleRef):
            EmbeddingStore(store.directory, "b2" * 12, 1 << 20).save_entry(named(2), copied)
        assert not store.save_entry("../image-" + "0" * 32, copied)
        assert store.identifiers() == []

    def test_cannot_be_had_of_a_file_that_has_changed(self, elsewhere: EmbeddingStore):
        elsewhere.save(named(1), output(1))
        lease = elsewhere.lease(named(1))
        path = elsewhere.directory / named(1)
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        with pytest.raises(StaleRef):
            lease.copy_to(memoryview(bytearray(lease.nbytes)))


def killed_after(calls: int, directory: Path, capacity: int) -> bool:
    """Save in a process that is killed before one of its system calls; True if it was."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.WIFSIGNALED(status)
    left = calls

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **kwargs)

        return call

    try:
        for name in ("open", "pwrite", "utime", "posix_fallocate", "unlink", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        fcntl.flock = counted(fcntl.flock)
        EmbeddingStore(directory, KEY, capacity).save(named(90), output(9))
        os._exit(0)
    finally:
        os._exit(1)


def test_a_writer_killed_at_any_point_leaves_what_was_there(directory: Path):
    """Before each of its system calls in turn, until it gets through."""
    capacity = 4 * ENTRY_BYTES
    store = EmbeddingStore(directory, KEY, capacity)
    calls = 0
    while True:
        for number in range(4):  # full, so that the writer must evict
            store.save(named(4 * calls + 100 + number), output(number))
        killed = killed_after(calls, directory, capacity)
        for identifier in store.identifiers():
            loaded = store.load(identifier)
            assert loaded is not None
            assert loaded.unique().numel() == 1  # never half of one and half of another
        if not killed:
            break
        calls += 1
        # Whoever comes next can save: no lock and no space is lost.
        assert store.save(named(1000 + calls), output(calls))
        assert sum(p.stat().st_size for p in directory.iterdir()) <= capacity
        assert not list(directory.glob(f"{PART_PREFIX}*"))
        store.clear()
    assert calls >= 10
    assert torch.equal(store.load(named(90)), output(9))


def test_a_lease_of_a_killed_process_is_no_lease(directory: Path):
    store = EmbeddingStore(directory, KEY, ENTRY_BYTES)
    store.save(named(1), output(1))
    code = (
        "import sys; from pathlib import Path\n"
        "from transfer.embeddings.store import EmbeddingStore\n"
        "store = EmbeddingStore(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))\n"
        "lease = store.lease(sys.argv[4])\n"
        "print(lease is not None, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory), KEY, str(ENTRY_BYTES), named(1)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as lessee:
        assert lessee.stdout.readline() == "True\n"
        assert not store.save(named(2), output(2))
        lessee.kill()
        lessee.wait(10)
    assert store.save(named(2), output(2))


def test_a_stopped_holder_of_the_lock_holds_nobody_up(directory: Path):
    store = EmbeddingStore(directory, KEY, 4 * ENTRY_BYTES)
    other = EmbeddingStore(directory, KEY, 4 * ENTRY_BYTES)
    with other._locked() as locked:
        assert locked
        assert not store.save(named(1), output(1))
    assert store.save(named(1), output(1))


def test_several_processes_at_once_never_load_what_was_not_saved(directory: Path):
    """Each saves, loads and leases at random, for longer than the capacity lasts."""
    capacity = 6 * ENTRY_BYTES
    children = [_child_that_works(directory, capacity, seed) for seed in range(4)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0] * 4
    store = EmbeddingStore(directory, KEY, capacity)
    assert store.counts.refused == 0
    assert sum(p.stat().st_size for p in directory.iterdir()) <= capacity
    assert all(store.load(identifier) is not None for identifier in store.identifiers())


def _child_that_works(directory: Path, capacity: int, seed: int) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        rng = random.Random(seed)
        store = EmbeddingStore(directory, KEY, capacity)
        leases = []
        loads = 0
        for _ in range(300):
            number = rng.randrange(12)
            store.save(named(number), output(number))
            loaded = store.load(named(rng.randrange(12)))
            if loaded is not None:
                loads += 1
                assert loaded.unique().numel() == 1
            lease = store.lease(named(number))
            if lease is not None:
                leases.append((number, lease))
            if len(leases) > 2:
                leased, lease = leases.pop(rng.randrange(3))
                assert torch.equal(lease.load(), output(leased))
                lease.release()
        assert loads > 30
        assert store.counts.refused == 0
        status = 0
    finally:
        os._exit(status)

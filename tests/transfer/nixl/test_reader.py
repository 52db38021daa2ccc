"""Entries of another process's arena, read by real NIXL agents in two processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from tests.fakes_nixl import PATIENCE, cpu_seconds, identity_of
from tests.nixl_owner import Owner
from transfer.arena import Arena
from transfer.errors import ArenaFull, ReadFailed, StaleRef
from transfer.nixl.reader import ArenaReader
from transfer.tensor_ref import ArenaId, EntryRef

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = pytest.mark.nixl


@pytest.fixture
def connected(owner: Owner, reader: ArenaReader) -> ArenaReader:
    reader.connect(owner.remote).result(PATIENCE)
    return reader


def fetch(reader: ArenaReader, owner: Owner, entry: EntryRef) -> bytes:
    return bytes(reader.read(owner.remote, entry).result(PATIENCE).memory)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("nbytes", [1, 4096, 5_000_001])
def test_what_is_read_is_what_was_written(
    connected: ArenaReader, owner: Owner, arena: Arena, nbytes: int
) -> None:
    contents = os.urandom(nbytes)
    entry = owner.put(contents)
    lease = connected.read(owner.remote, entry).result(PATIENCE).seal(entry.identity)
    assert arena.view(lease.entry) == contents


def test_many_reads_at_once_keep_apart(connected: ArenaReader, owner: Owner) -> None:
    contents = [os.urandom(50_000 + n) for n in range(64)]
    entries = [owner.put(one) for one in contents]
    reads = [connected.read(owner.remote, entry) for entry in entries]
    assert [bytes(read.result(PATIENCE).memory) for read in reads] == contents


def test_an_entry_that_was_replaced_is_gone(connected: ArenaReader, owner: Owner) -> None:
    owner.do("forget")
    entry = owner.put(b"first" * 1000)
    owner.do("forget")
    with pytest.raises(StaleRef):
        fetch(connected, owner, entry)
    assert owner.put(b"other" * 1000).offset == entry.offset
    with pytest.raises(StaleRef):
        fetch(connected, owner, entry)


def test_references_that_are_corrupt_truncated_or_foreign_are_refused(
    connected: ArenaReader, owner: Owner, arena: Arena
) -> None:
    entry = owner.put(os.urandom(4096))
    before = arena.stats().bytes_used
    changes: tuple[dict[str, object], ...] = (
        {"identity": b"x" * 16},
        {"identity": b""},
        {"generation": entry.generation + 1},
        {"generation": -1},
        {"nbytes": 4000},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": 1 << 40},
        {"offset": 64},
        {"offset": 0},
        {"offset": -4096},
        {"offset": 1 << 50},
        {"arena": "foveal-1-2-ab"},
    )
    for change in changes:
        with pytest.raises(StaleRef):
            fetch(connected, owner, msgspec.structs.replace(entry, **change))
    until(lambda: arena.stats().bytes_used <= before)
    assert identity_of(fetch(connected, owner, entry)) == entry.identity


def test_an_arena_that_is_not_the_one_named_is_not_used(
    owner: Owner, reader: ArenaReader
) -> None:
    other = ArenaId(owner.remote.arena.name, b"another nonce...")
    with pytest.raises(ReadFailed, match="is not arena"):
        reader.connect(msgspec.structs.replace(owner.remote, arena=other)).result(PATIENCE)


def test_metadata_that_is_not_the_agents_is_refused(
    doomed: Owner, reader: ArenaReader
) -> None:
    remote = doomed.remote
    for change in (
        {"agent": "somebody"},
        {"metadata": b""},
        {"metadata": b"junk" * 50},
        {"metadata": remote.metadata[:-5]},
    ):
        with pytest.raises(ReadFailed):
            reader.connect(msgspec.structs.replace(remote, **change)).result(PATIENCE)


def test_a_restarted_owner_is_another_agent_and_the_old_one_is_dropped(
    reader: ArenaReader, doomed: Owner
) -> None:
    reader.connect(doomed.remote).result(PATIENCE)
    reader.disconnect(doomed.remote)
    doomed.kill()
    with Owner() as restarted:
        assert restarted.remote.agent != doomed.remote.agent
        restarted.do("progress_for", "test", 600.0)
        reader.connect(restarted.remote).result(PATIENCE)
        assert fetch(reader, restarted, restarted.put(b"again")) == b"again"
        until(lambda: doomed.remote.agent not in reader._known)
        reader.disconnect(restarted.remote)


def test_connecting_again_is_connecting_anew(connected: ArenaReader, owner: Owner) -> None:
    connected.connect(owner.remote).result(PATIENCE)
    assert fetch(connected, owner, owner.put(b"anew")) == b"anew"


def test_a_read_that_nobody_waits_for_keeps_its_target_until_its_end(
    transport: str, reader: ArenaReader, doomed: Owner, arena: Arena
) -> None:
    if transport != "tcp":
        pytest.skip("over shared memory a READ needs nobody's help")
    reader.connect(doomed.remote).result(PATIENCE)
    entry = doomed.put(os.urandom(1 << 20))
    before = arena.stats().bytes_used
    doomed.stop()
    read = reader.read(doomed.remote, entry)
    with pytest.raises(TimeoutError):
        read.result(0.3)
    done: list[bytes] = []
    read.add_done_callback(lambda read: done.append(bytes(read.result().memory)))
    del read
    assert arena.stats().bytes_used >= before + entry.nbytes
    doomed.go_on()
    until(lambda: bool(done))
    assert identity_of(done[0]) == entry.identity
    until(lambda: arena.stats().bytes_used <= before)


def test_connecting_again_does_not_end_what_is_under_way(
    transport: str, reader: ArenaReader, doomed: Owner
) -> None:
    if transport != "tcp":
        pytest.skip("over shared memory a READ needs nobody's help")
    reader.connect(doomed.remote).result(PATIENCE)
    entry = doomed.put(os.urandom(1 << 20))
    doomed.stop()
    read, again = reader.read(doomed.remote, entry), reader.connect(doomed.remote)
    with pytest.raises(TimeoutError):
        read.result(0.3)
    doomed.go_on()
    again.result(PATIENCE)
    assert identity_of(bytes(read.result(PATIENCE).memory)) == entry.identity


def test_an_owner_killed_while_it_is_read_from_ends_the_read(
    transport: str, reader: ArenaReader, doomed: Owner, arena: Arena
) -> None:
    reader.connect(doomed.remote).result(PATIENCE)
    entry = doomed.put(os.urandom(8 << 20))
    before = arena.stats().bytes_used
    if transport == "tcp":
        doomed.stop()
        read = reader.read(doomed.remote, entry)
        doomed.kill()
        with pytest.raises(ReadFailed):
            read.result(PATIENCE)
        del read
    doomed.kill()
    with pytest.raises((ReadFailed, StaleRef)):
        fetch(reader, doomed, entry)
    until(lambda: arena.stats().bytes_used <= before)


def test_reading_lets_other_threads_run(connected: ArenaReader, owner: Owner) -> None:
    owner.do("forget")
    entry = owner.put(os.urandom(8 << 20))
    ticks, stop = [time.perf_counter()], threading.Event()

    def tick() -> None:
        while not stop.wait(0.0005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(5):
        fetch(connected, owner, entry)
    stop.set()
    thread.join()
    gaps = sorted(b - a for a, b in pairwise(ticks))
    assert gaps[len(gaps) * 9 // 10] < 0.02


def test_nobody_uses_the_processor_while_nothing_is_read(
    connected: ArenaReader, owner: Owner
) -> None:
    fetch(connected, owner, owner.put(b"x" * 10_000))
    owner.do("progress_for", "tests", 0.0)
    try:
        assert owner.do("cpu_seconds", 1.0) < 0.05
        assert cpu_seconds(1.0) < 0.05
    finally:
        owner.do("progress_for", "tests", 600.0)


def test_what_does_not_fit_is_not_begun(connected: ArenaReader, owner: Owner) -> None:
    owner.do("forget")
    entry = owner.put(b"x" * (10 << 20))
    read = connected.read(owner.remote, entry)
    with pytest.raises(ArenaFull):
        connected.read(owner.remote, entry)
    assert len(read.result(PATIENCE).memory) == 10 << 20

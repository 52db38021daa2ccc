"""The side that is read from works while others read, and rests otherwise."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from tests.fakes_nixl import PATIENCE, cpu_seconds, identity_of
from tests.nixl_owner import Owner
from transfer.arena import Arena
from transfer.arena_file import sweep_dead_arenas
from transfer.arena_layout import SHM
from transfer.nixl.export import ArenaExport
from transfer.nixl.reader import ArenaReader
from transfer.tensor_ref import EntryRef, RemoteArena

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = pytest.mark.nixl


@pytest.fixture(scope="module")
def export(transport: str) -> Iterator[ArenaExport]:
    with Arena(1 << 20, populate=False) as arena:
        export = ArenaExport(arena)
        yield export
        export.close()


def test_it_offers_the_whole_arena(export: ArenaExport) -> None:
    assert export.remote.nbytes == (1 << 20) + 4096
    assert export.remote.metadata and export.remote.address


def test_it_works_while_somebody_reads(export: ArenaExport) -> None:
    export.progress_for("one", 600.0)
    export.progress_for("other", 600.0)
    export.progress_for("one", 0.0)
    assert export.busy
    assert cpu_seconds(0.5) > 0.001
    export.progress_for("other", 0.0)
    assert not export.busy
    assert cpu_seconds(0.5) < 0.025


def test_a_reader_that_never_says_it_has_ended_is_not_waited_for(
    export: ArenaExport,
) -> None:
    export.progress_for("one", 0.05)
    assert export.busy
    cpu_seconds(0.2)
    assert not export.busy


def test_an_arena_may_be_closed_before_its_export(transport: str) -> None:
    arena = Arena(1 << 20, populate=False)
    export = ArenaExport(arena)
    arena.close()
    export.progress_for("one", 600.0)
    cpu_seconds(0.1)
    export.close()


def read_without_end(remote: RemoteArena, entry: EntryRef, begun: Connection) -> None:
    """A process that reads the same entry again and again."""
    with Arena(1 << 24, populate=False) as arena:
        reader = ArenaReader(arena)
        reader.start().result(PATIENCE)
        reader.connect(remote).result(PATIENCE)
        while True:
            begun.send(entry.nbytes)
            reader.read(remote, entry).result(PATIENCE)


def test_a_reader_killed_while_it_reads_harms_nobody(
    owner: Owner, reader: ArenaReader
) -> None:
    entry = owner.put(os.urandom(8 << 20))
    context = multiprocessing.get_context("spawn")
    begun, theirs = context.Pipe()
    for _ in range(2):
        process = context.Process(target=read_without_end, args=(owner.remote, entry, theirs))
        process.start()
        assert begun.poll(PATIENCE)
        begun.recv()
        process.kill()
        process.join(PATIENCE)
        while begun.poll():
            begun.recv()
    for end in (begun, theirs):
        end.close()
    reader.connect(owner.remote).result(PATIENCE)
    space = reader.read(owner.remote, entry).result(PATIENCE)
    assert identity_of(bytes(space.memory)) == entry.identity
    sweep_dead_arenas()
    assert not list(SHM.glob(f"foveal-{process.pid}-*"))


def test_a_reader_that_is_gone_is_not_waited_for(owner: Owner) -> None:
    owner.do("progress_for", "killed", 0.05)
    owner.do("progress_for", "tests", 0.0)
    try:
        cpu_seconds(0.2)
        assert not owner.do("busy")
    finally:
        owner.do("progress_for", "tests", 600.0)

"""The side that is read from works while others read, and rests otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes_nixl import cpu_seconds
from transfer.arena import Arena
from transfer.nixl.export import ArenaExport

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

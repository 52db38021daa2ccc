"""The index is swept while there is something to sweep."""

from __future__ import annotations

import pytest

from frontend.index_sweeper import SLICE_BLOCKS, IndexSweeper
from frontend.router.kv_index import KvIndex
from tests.fakes import eventually

pytestmark = pytest.mark.anyio


def filled(blocks: int) -> KvIndex:
    index = KvIndex()
    index.store("w", [n.to_bytes(4, "big") for n in range(blocks)])
    return index


async def test_a_lost_workers_blocks_go_slice_by_slice() -> None:
    index = filled(3 * SLICE_BLOCKS)
    sweeper = IndexSweeper(index)
    index.drop_worker("w")
    sweeper.wake()
    sweeper.wake()
    seen = set()
    await eventually(lambda: seen.add(len(index)) or not index.unswept)
    assert len(index) == 0
    assert len(seen) > 2
    assert sweeper._timer is None


async def test_nothing_runs_where_nothing_is_to_be_swept() -> None:
    sweeper = IndexSweeper(filled(10))
    sweeper.wake()
    assert sweeper._timer is None


async def test_closed_it_stops() -> None:
    index = filled(10)
    sweeper = IndexSweeper(index)
    index.drop_worker("w")
    sweeper.wake()
    sweeper.close()
    assert sweeper._timer is None

"""What Prometheus is told of the fleet, the index and the arena."""

from __future__ import annotations

import pytest

from tests.fakes import make_item, make_request
from tests.frontend.fleets import Fleet
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


async def test_requests_are_counted_by_worker_and_transfer(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start()
        for number in range(3):
            items = [make_item(1.0)] if number == 0 else []
            await fleet.client.add_request_async(make_request(f"r{number}", items=items))
            await fleet.answer(f"r{number}")
        for transfer, count in (("shm", 1.0), ("none", 2.0)):
            labels = {"worker": "worker-1", "transfer": transfer}
            assert (
                fleet.metrics.get_sample_value("foveal_requests_routed_total", labels) == count
            )
        assert fleet.count("prompt_blocks") == 3 * 2
        assert fleet.count("overlap_blocks") == 0


async def test_the_state_of_the_fleet_is_read_when_asked_for(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        fleet.collect()
        labels = {"worker": "worker-1", "transfer": "shm"}
        assert fleet.metrics.get_sample_value("foveal_worker_ready", labels) is None
        await fleet.start()
        assert fleet.metrics.get_sample_value("foveal_worker_ready", labels) == 1
        item = fleet.cache.store(make_item(1.0))
        value = fleet.metrics.get_sample_value
        assert value("foveal_arena_entries") == value("foveal_arena_entries_leased") == 1
        assert value("foveal_arena_bytes") == 1 << 20
        assert fleet.count("arena_bytes_written") == 3200
        del item
        assert value("foveal_arena_entries_leased") == 0


async def test_without_an_arena_nothing_is_said_of_it(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        fleet.collect(arena=None)
        assert fleet.metrics.get_sample_value("foveal_arena_bytes") is None
        assert fleet.count("items_without_room") == 0

"""Whatever goes wrong between worker and frontend, the index ends as the worker's truth.

A frontend and fake workers over real sockets; the faults are made at the worker's end.
"""

from __future__ import annotations

import pytest

from tests.fakes import FakeWorker, eventually, within
from tests.frontend.fleets import Fleet
from transfer.messages import Call, KvDelta, LoadReport
from transfer.payload import encode_payload
from transfer.registry import Registry

pytestmark = pytest.mark.anyio

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


@pytest.fixture
async def worker(fleet: Fleet) -> FakeWorker:
    worker = await fleet.start()
    worker.hold([A])
    await until_held(fleet, {A})
    return worker


async def until_held(fleet: Fleet, digests: set[bytes], name: str = "worker-1") -> None:
    router = fleet.client.router
    await eventually(
        lambda: router.plane.caught_up(name) and router.index.resident(name) == digests
    )


def lose_deltas(worker: FakeWorker, *, deltas: int) -> None:
    """Have the next ones vanish on their way."""
    publish, left = worker.kv_publisher.publish, deltas

    def drop(news: KvDelta | LoadReport) -> None:
        nonlocal left
        if isinstance(news, KvDelta) and left > 0:
            left -= 1
            return
        publish(news)

    worker.kv_publisher.publish = drop  # type: ignore[method-assign]


async def test_the_last_delta_is_lost_and_none_follows(
    fleet: Fleet, worker: FakeWorker
) -> None:
    lose_deltas(worker, deltas=1)
    worker.hold([B])
    await until_held(fleet, {A, B})
    assert fleet.client.router.plane.gaps == 1


async def test_a_delta_in_the_middle_is_lost(fleet: Fleet, worker: FakeWorker) -> None:
    lose_deltas(worker, deltas=1)
    worker.hold([B])
    worker.hold([C])
    await until_held(fleet, {A, B, C})


async def test_nothing_that_is_published_arrives_any_more(
    fleet: Fleet, worker: FakeWorker
) -> None:
    worker.kv_publisher.publish = lambda news: None  # type: ignore[method-assign]
    worker.hold([B])
    # Heartbeats travel on another line, a second apart.
    await until_held(fleet, {A, B})


async def test_an_idle_workers_cache_is_cleared(fleet: Fleet, worker: FakeWorker) -> None:
    worker.engine.answers["reset_prefix_cache"] = True
    link = fleet.pool.ready_workers()["worker-1"].link
    link.send(Call(99, "reset_prefix_cache"), encode_payload([False, False]))
    await until_held(fleet, set())


async def test_a_worker_restarted_on_its_address_begins_anew(
    fleet: Fleet, worker: FakeWorker, registry: Registry
) -> None:
    address = worker.address
    await worker.stop()
    async with FakeWorker(registry, "worker-1", address=address, epoch="epoch-2") as again:
        again.hold([B])
        await until_held(fleet, {B})
        lose_deltas(again, deltas=1)
        again.hold([C])
        await until_held(fleet, {B, C})


async def test_the_index_is_checked_on_demand(fleet: Fleet, worker: FakeWorker) -> None:
    worker.hold([B])
    await until_held(fleet, {A, B})
    assert await within(fleet.client.check_index()) == {
        "worker-1": {"equal": True, "held": 2, "missing": 0, "phantom": 0}
    }


async def test_a_check_that_finds_a_difference_mends_it(
    fleet: Fleet, worker: FakeWorker
) -> None:
    fleet.client.router.index.remove("worker-1", [A])
    fleet.client.router.index.store("worker-1", [B, C])
    assert await within(fleet.client.check_index()) == {
        "worker-1": {"equal": False, "held": 1, "missing": 1, "phantom": 2}
    }
    await until_held(fleet, {A})
    assert (await within(fleet.client.check_index()))["worker-1"]["equal"]


async def test_two_frontends_see_the_same_load(registry: Registry, fleet: Fleet) -> None:
    worker = await fleet.start("worker-2")
    worker.engine.stalled = True
    worker_load = fleet.client.router.load.load
    await worker_busy_for(worker, "frontend-9")
    await eventually(lambda: worker_load("worker-2").requests == 1)
    assert worker_load("worker-2")[:3] == (1, 500, 32)
    assert fleet.client.router.load.own("worker-2").requests == 0
    worker.frontends.computed("r")
    await eventually(lambda: worker_load("worker-2")[:3] == (1, 0, 32))
    worker.frontends.end("r")
    await eventually(lambda: worker_load("worker-2").requests == 0)


async def worker_busy_for(worker: FakeWorker, name: str) -> None:
    other = worker.frontends.connect(name, 0.0)
    worker.frontends.begin(other, "r")
    worker.frontends.charge("r", 500, 32)


async def test_a_lost_workers_blocks_are_swept(fleet: Fleet, worker: FakeWorker) -> None:
    await worker.leave()
    await fleet.until_gone("worker-1")
    await eventually(lambda: len(fleet.client.router.index) == 0)

"""A frontend and workers that share no memory: real NIXL agents, over TCP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput

from tests.fakes import FakeWorker, eventually, make_item, make_request, within
from tests.frontend.fleets import Fleet
from transfer.errors import NixlUnavailable
from transfer.registry import Registry
from workers import nixl_transfer

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.usefixtures("over_tcp")]

CACHE_GIB = 1 / 128
"""8 MiB."""


@pytest.fixture
async def fleet(registry: Registry) -> AsyncIterator[Fleet]:
    async with Fleet(registry, arena_bytes=1 << 23, transfer="nixl") as fleet:
        yield fleet


def transfer_to(fleet: Fleet, name: str = "worker-1") -> tuple[str, str]:
    worker = fleet.pool.ready_workers()[name]
    return worker.transfer, worker.transfer_reason


def leased_by(worker: FakeWorker) -> int:
    assert worker.nixl._arena is not None
    return worker.nixl._arena.stats().leased_entries


def stop_progress(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on READs from this frontend hang, until the patch is undone."""
    assert fleet.nixl._export is not None
    monkeypatch.setattr(fleet.nixl._export._agent, "progress", lambda: None)


async def ask(
    fleet: Fleet, request_id: str, *pixels: torch.Tensor
) -> list[EngineCoreOutput]:
    items = [make_item(each) for each in pixels]
    await fleet.client.add_request_async(make_request(request_id, items=items))
    return await fleet.answer(request_id)


async def test_tensors_are_pulled_once_and_read_from_the_workers_own_arena(
    fleet: Fleet,
) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB)
    assert transfer_to(fleet) == ("nixl", "the worker reads the arena by NIXL")
    pixels, more = torch.rand(400, 500), torch.rand(40, 50)
    for request_id in ("first", "again"):
        await ask(fleet, request_id, pixels, more, pixels)
        seen = worker.engine.pixels[request_id]
        wanted = (pixels, more, pixels)
        assert all(torch.equal(*pair) for pair in zip(seen, wanted, strict=True))
        added = await within(worker.engine.added.get())
        items = [f.data for f in added.mm_features or () if f.data]
        assert [item["pixel_values"].data for item in items] == [None] * 3
    assert worker.nixl._arena is not None
    assert list(worker.engine.reader._arenas) == [worker.nixl._arena.id.name]
    pulled = fleet.nixl.pulls["worker-1"]
    nbytes = pixels.nbytes + more.nbytes
    assert (pulled.pulls, pulled.nbytes, pulled.failures) == (2, nbytes, 0)
    assert worker.nixl.cache is not None and worker.nixl.cache.counts.pulls == 2
    await eventually(fleet.at_rest)
    await eventually(lambda: leased_by(worker) == 0)
    assert fleet.nixl._export is not None and not fleet.nixl._export.busy
    assert fleet.count("tensors_missing") == 0


async def test_many_requests_at_once_need_no_fallback(fleet: Fleet) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB)
    pictures = [torch.full((64, 200), float(n)) for n in range(64)]
    for n, picture in enumerate(pictures):
        await fleet.client.add_request_async(
            make_request(f"r{n}", items=[make_item(picture)], max_tokens=1)
        )
    await eventually(lambda: len(worker.engine.pixels) == 64)
    for n, picture in enumerate(pictures):
        assert torch.equal(worker.engine.pixels[f"r{n}"][0], picture)
    await eventually(fleet.at_rest)
    assert fleet.count("tensors_missing") == 0
    assert fleet.nixl.pulls["worker-1"].pulls == 64


async def test_what_cannot_be_pulled_in_time_is_sent_and_the_path_is_tried_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transfer, "RETRY_SECONDS", 0.2)
    worker = await fleet.start(cache_gib=CACHE_GIB, transfer_timeout=0.3)
    pixels = torch.rand(40, 50)
    with pytest.MonkeyPatch.context() as patch:
        stop_progress(fleet, patch)
        await ask(fleet, "r", pixels)
        assert torch.equal(worker.engine.pixels["r"][0], pixels)
        assert fleet.count("tensors_missing") == 1
        await eventually(lambda: transfer_to(fleet)[0] == "inline")
        assert "no tensors within 0.3 s" in transfer_to(fleet)[1]
    await eventually(lambda: transfer_to(fleet)[0] == "nixl")
    # The late READ has arrived meanwhile, and is good.
    await eventually(lambda: fleet.nixl.pulls["worker-1"].pulls == 1)
    await ask(fleet, "s", pixels)
    assert fleet.count("tensors_missing") == 1
    assert fleet.nixl.pulls["worker-1"].pulls == 1


async def test_a_request_aborted_while_it_waits_is_never_added(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB)
    stop_progress(fleet, monkeypatch)
    await fleet.client.add_request_async(
        make_request("r", items=[make_item(torch.rand(40, 50))])
    )
    await eventually(lambda: worker.frontends.owner("r"))
    assert fleet.arena.stats().leased_entries == 1
    await fleet.client.abort_requests_async(["r"])
    await eventually(fleet.at_rest)
    monkeypatch.undo()
    await eventually(lambda: worker.nixl.cache and worker.nixl.cache.counts.pulls)
    await ask(fleet, "s")
    assert worker.engine.pixels.keys() == {"s"}
    assert leased_by(worker) == 0


async def test_a_thousand_aborted_requests_leave_nothing(fleet: Fleet) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB)
    worker.engine.stalled = True
    for n in range(1000):
        await fleet.client.add_request_async(
            make_request(f"r{n}", items=[make_item(torch.full((40, 50), float(n)))])
        )
        await fleet.client.abort_requests_async([f"r{n}"])
        worker.engine.pixels.clear()
        if n % 50 == 0:
            await eventually(fleet.at_rest)
    await eventually(fleet.at_rest)
    await eventually(lambda: leased_by(worker) == 0)


async def test_a_worker_that_leaves_while_it_pulls_leaves_no_lease(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB)
    stop_progress(fleet, monkeypatch)
    pixels = torch.rand(40, 50)
    await fleet.client.add_request_async(make_request("r", items=[make_item(pixels)]))
    await eventually(lambda: worker.frontends.owner("r"))
    await worker.leave()
    other = await fleet.start("worker-2")
    await fleet.answer("r")
    assert torch.equal(other.engine.pixels["r"][0], pixels)
    assert transfer_to(fleet, "worker-2")[0] == "inline"
    await eventually(fleet.at_rest)
    await eventually(lambda: fleet.nixl._export and not fleet.nixl._export.busy)


async def test_input_that_streams_in_keeps_its_order_when_pulls_fail(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB, transfer_timeout=0.2)
    worker.engine.stalled = True
    stop_progress(fleet, monkeypatch)
    for number in range(5):
        items = [make_item(torch.full((40, 50), float(number)))] if number in (1, 3) else []
        request = make_request("r", tokens=range(number, number + 4), items=items)
        request.resumable = number < 4
        await fleet.client.add_request_async(request)
        del request
    added = [await within(worker.engine.added.get()) for _ in range(5)]
    assert [(a.prompt_token_ids or [9])[0] for a in added] == [0, 1, 2, 3, 4]
    assert worker.engine.added.empty()
    worker.engine.say("r", 1, finished=True)
    await fleet.answer("r")
    await eventually(fleet.at_rest)


async def test_a_full_worker_cache_is_no_failure_of_the_path(fleet: Fleet) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB / 8)
    worker.engine.stalled = True
    pictures = [torch.full((100, 1000), float(n)) for n in range(3)]
    for n, picture in enumerate(pictures):
        await fleet.client.add_request_async(
            make_request(f"r{n}", items=[make_item(picture)])
        )
    await eventually(lambda: len(worker.engine.pixels) == 3)
    for n, picture in enumerate(pictures):
        assert torch.equal(worker.engine.pixels[f"r{n}"][0], picture)
    assert fleet.count("tensors_missing") == 1
    assert transfer_to(fleet)[0] == "nixl"


async def test_resetting_the_image_cache_empties_the_workers_too(fleet: Fleet) -> None:
    worker = await fleet.start(cache_gib=CACHE_GIB)
    await ask(fleet, "r", torch.rand(40, 50))
    await eventually(fleet.at_rest)
    assert worker.nixl._arena is not None and worker.nixl._arena.stats().entries == 1
    await fleet.client.reset_mm_cache_async()
    assert worker.nixl._arena.stats().entries == 0
    await ask(fleet, "s", torch.rand(40, 50))
    assert fleet.count("tensors_missing") == 0


async def test_where_memory_is_shared_no_agent_is_made(registry: Registry) -> None:
    async with Fleet(registry, transfer="auto") as fleet:
        worker = await fleet.start(cache_gib=CACHE_GIB)
        await ask(fleet, "r", torch.rand(40, 50))
        assert transfer_to(fleet)[0] == "shm"
        assert fleet.nixl.agents == 0
        assert worker.nixl.cache is None


@pytest.mark.parametrize("transfer", ["shm", "inline"])
async def test_where_nixl_was_not_asked_for_nothing_is_offered(
    registry: Registry, transfer: str
) -> None:
    async with Fleet(registry, transfer=transfer) as fleet:
        await fleet.start(cache_gib=CACHE_GIB)
        assert transfer_to(fleet)[0] == transfer
        assert fleet.nixl.agents == 0


async def test_a_worker_without_nixl_is_sent_tensors_and_says_why(fleet: Fleet) -> None:
    await fleet.start(cache_gib=0.0)
    assert transfer_to(fleet) == (
        "inline", "NIXL was asked for; no NIXL: --mm-worker-cache-gb is 0",
    )
    assert fleet.nixl.agents == 0


async def test_a_frontend_whose_nixl_does_not_work_says_so_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    worker = await fleet.start(cache_gib=CACHE_GIB)
    await fleet.start("worker-2", cache_gib=CACHE_GIB)
    for name in ("worker-1", "worker-2"):
        assert transfer_to(fleet, name)[0] == "inline"
        assert "no NIXL: " in transfer_to(fleet, name)[1]
    assert sum("switched off" in record.message for record in caplog.records) == 1
    fleet.collect()
    assert fleet.metrics.get_sample_value("foveal_nixl_switched_off") == 1
    await ask(fleet, "r", torch.rand(40, 50))
    assert worker.nixl.cache is None


async def test_a_worker_whose_nixl_does_not_work_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transfer, "ArenaReader", _NoReader)
    worker = await fleet.start(cache_gib=CACHE_GIB)
    assert transfer_to(fleet) == ("inline", "no transport")
    assert worker.nixl.unusable == "no transport"
    assert worker.nixl._arena is None
    await ask(fleet, "r", torch.rand(40, 50))
    assert fleet.count("tensors_missing") == 0


class _NoReader:
    def __init__(self, arena: object) -> None:
        raise NixlUnavailable("no transport")


async def test_tensors_of_several_frontends_are_kept_once(registry: Registry) -> None:
    async with (
        Fleet(registry, arena_bytes=1 << 20, transfer="nixl") as one,
        Fleet(registry, arena_bytes=1 << 20, transfer="nixl", frontend="frontend-2") as other,
    ):
        worker = await one.start(cache_gib=CACHE_GIB)
        await other.until_ready("worker-1")
        pixels = torch.rand(40, 50)
        await asyncio.gather(ask(one, "r", pixels), ask(other, "s", pixels))
        assert worker.nixl.cache is not None and worker.nixl.cache.counts.pulls == 1
        for request_id in ("r", "s"):
            assert torch.equal(worker.engine.pixels[request_id][0], pixels)
        worker.engine.pixels.clear()

"""Whatever breaks off a request, and wherever: all that it held is there again.

What is measured: leases, charges and other notes of requests, tasks, open files, and the
memory of the process, which would grow by each request's tensors.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from aiohttp import web
from prometheus_client import CollectorRegistry

from frontend.admission import Admission, AdmissionLimits, FleetLoad
from frontend.media.remote_media import RemoteMedia
from frontend.media.url_cache import UrlCache
from frontend.media.url_policy import UrlPolicy
from tests.fakes import FakeWorker, eventually, make_item, make_request, within
from tests.frontend.fleets import Fleet
from tests.frontend.media.web import running_site
from tests.frontend.test_admission import Engine
from tests.worker_process import WorkerProcess
from transfer.arena_file import sweep_dead_arenas
from transfer.arena_layout import SHM
from transfer.registry import Registry

pytestmark = pytest.mark.anyio

MIB = 1 << 20
ROUNDS = 48
WARM_UP = 8
GROWTH_BYTES = 24 * MIB
"""Half of what the rounds would leave if each left its tensors."""


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def leaves_nothing(
    round_: Callable[[int], Awaitable[None]], at_rest: Callable[[], bool]
) -> None:
    """Check that many rounds of something take no more than few."""
    for number in range(WARM_UP):
        await round_(number)
        await eventually(at_rest)
    tasks, files, nbytes = len(asyncio.all_tasks()), open_files(), resident_bytes()
    for number in range(WARM_UP, WARM_UP + ROUNDS):
        await round_(number)
        await eventually(at_rest)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
    await eventually(lambda: open_files() <= files)
    assert resident_bytes() - nbytes < GROWTH_BYTES


def picture(number: int) -> torch.Tensor:
    """One MiB that no other round has."""
    return torch.full((1024, 256), float(number))


@pytest.fixture(params=["shm", "inline"])
async def fleet(registry: Registry, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with Fleet(registry, arena_bytes=8 * MIB, transfer=request.param) as fleet:
        yield fleet


async def ask(fleet: Fleet, request_id: str, number: int) -> None:
    request = make_request(request_id, items=[make_item(picture(number))])
    await within(fleet.client.add_request_async(request))


async def test_a_client_that_leaves_before_a_worker_is_found(fleet: Fleet) -> None:
    async def round_(number: int) -> None:
        asking = asyncio.create_task(ask(fleet, f"r{number}", number))
        await eventually(lambda: fleet.arena.stats().leased_entries)
        asking.cancel()
        await asyncio.wait([asking])

    await leaves_nothing(round_, fleet.at_rest)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_in_prefill_or_decode(fleet: Fleet, tokens: int) -> None:
    worker = await fleet.start()
    worker.engine.stalled = True

    async def round_(number: int) -> None:
        name = f"r{number}"
        await ask(fleet, name, number)
        await within(worker.engine.added.get())
        worker.engine.step_over.clear()
        for token in range(tokens):
            worker.engine.say(name, token)
            await within(fleet.client.get_output_async())
        await fleet.client.abort_requests_async([name])
        # The step that is under way still reads them.
        assert fleet.arena.stats().leased_entries == 1
        worker.engine.step_over.set()
        await within(worker.engine.aborted.get())
        worker.engine.pixels.clear()

    await leaves_nothing(round_, lambda: fleet.at_rest() and not worker.frontends.num_requests)
    assert not any(worker.frontends.get(name).leases for name in worker.frontends.names())


@pytest.mark.parametrize("tokens", [0, 2])
async def test_workers_that_are_lost_in_prefill_or_decode(
    registry: Registry, tokens: int
) -> None:
    async with Fleet(registry, arena_bytes=8 * MIB, wait=0.0) as fleet:

        async def round_(number: int) -> None:
            name = f"r{number}"
            async with FakeWorker(registry, f"worker-{number}") as worker:
                await fleet.until_ready(worker.name)
                worker.engine.stalled = True
                await ask(fleet, name, number)
                await within(worker.engine.added.get())
                for token in range(tokens):
                    worker.engine.say(name, token)
                    await within(fleet.client.get_output_async())
                await worker.leave()
            await fleet.answer(name)
            await eventually(lambda: not fleet.pool.workers)

        await leaves_nothing(round_, fleet.at_rest)
        assert not len(fleet.client.requests.parked)


async def test_a_client_that_leaves_while_its_picture_is_fetched() -> None:
    limits = AdmissionLimits(request_bytes=1, requests=1, body_bytes=4 * MIB, body_seconds=1.0)
    admission = Admission(limits, Engine(), FleetLoad, CollectorRegistry())
    remote = RemoteMedia(UrlPolicy([], allow_private=True), UrlCache(0))
    begun = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(bytes(MIB))
        begun.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.005)
        return response

    async with running_site() as site:
        site.pages["/a"] = endless

        async def fetch(number: int) -> None:
            with admission.body():
                url = site.url(f"/a?{number}")
                await remote.fetch(url, timeout=600.0, max_bytes=None)

        async def round_(number: int) -> None:
            begun.clear()
            fetching = asyncio.create_task(fetch(number))
            await within(begun.wait())
            fetching.cancel()
            await asyncio.wait([fetching])
            site.requests.clear()

        await leaves_nothing(round_, lambda: admission.body_bytes == 0)
        await remote.close()


@pytest.mark.nixl
async def test_a_worker_process_that_is_killed_while_it_pulls(
    registry: Registry, over_tcp: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("nixl") is None:
        pytest.skip("NIXL is not installed, so NOT TESTED")
    async with Fleet(registry, arena_bytes=8 * MIB, transfer="nixl") as fleet:
        registered = fleet.arena.stats().bytes_total
        with WorkerProcess(registry, "doomed", cache_gib=1 / 64) as doomed:
            async with asyncio.timeout(120):  # it imports vLLM
                while "doomed" not in fleet.pool.ready_workers():
                    await asyncio.sleep(0.05)
            assert fleet.pool.ready_workers()["doomed"].transfer == "nixl"
            export = fleet.nixl._export
            assert export is not None
            with monkeypatch.context() as patch:
                patch.setattr(export._agent, "progress", lambda: None)  # READs hang
                await ask(fleet, "r", 1)
                await eventually(lambda: export.busy)
                assert fleet.arena.stats().leased_entries == 1
                doomed.kill()
                await fleet.until_gone("doomed")
            # Nobody reads any more, so nobody is driven for it.
            await eventually(lambda: not export.busy)
            assert fleet.in_flight == 1
        other = await fleet.start("other")
        assert len(await fleet.answer("r")) == 3
        assert torch.equal(other.engine.pixels["r"][0], picture(1))
        await eventually(fleet.at_rest)
        assert not len(fleet.client.requests.parked)
        assert fleet.arena.stats().bytes_total == registered
        fleet.arena.drop_unleased()
        assert fleet.arena.stats().bytes_used == 0
    sweep_dead_arenas()  # as every process does that starts
    assert not list(SHM.glob(f"foveal-{doomed.pid}-*"))


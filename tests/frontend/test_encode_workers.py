"""Images that nobody has encoded go to encode workers, and requests wait no longer for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine import EngineCoreRequest, FinishReason

from frontend.admission import FleetLoad
from frontend.encode_workers import PREFIX
from frontend.receipt import Receipt, current_receipt
from frontend.server import fleet_load
from tests.fakes import FakeWorker, eventually, make_facts, make_item, make_request, within
from tests.frontend.fleets import Fleet
from transfer.embeddings.home import EmbeddingHome
from transfer.embeddings.store import EmbeddingStore
from transfer.messages import TensorsMissing
from transfer.registry import Registry
from workers.embedding_cache import HostEmbeddings

pytestmark = pytest.mark.anyio


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddingStore]:
    store = EmbeddingStore(tmp_path / "outputs", "key", 1 << 16)
    yield store
    store.close()


@pytest.fixture
def shared(store: EmbeddingStore, tmp_path: Path) -> HostEmbeddings:
    return HostEmbeddings(EmbeddingHome(bytes(32), "ns", tmp_path), store)


async def generator(fleet: Fleet, shared: HostEmbeddings | None) -> FakeWorker:
    worker = await fleet.start("worker-1", embeddings=shared)
    await told(fleet, "worker-1", shared)
    return worker


async def encoder(
    fleet: Fleet,
    shared: HostEmbeddings | None,
    name: str = "encoder-1",
    *,
    stalled: bool = False,
    **settings: Any,
) -> FakeWorker:
    facts = make_facts(role="encode")
    worker = await fleet.introduce(name, facts=facts, embeddings=shared, **settings)
    await eventually(lambda: name in {w.name for w in fleet.pool.encode_workers()})
    await told(fleet, name, shared)
    worker.engine.stalled = stalled
    return worker


async def asked(
    fleet: Fleet, shared: HostEmbeddings
) -> tuple[FakeWorker, asyncio.Task[Receipt], EngineCoreRequest]:
    """A request waits for an encode worker: that one, the request, and what it was sent."""
    await generator(fleet, shared)
    helper = await encoder(fleet, shared, stalled=True)
    task = asyncio.create_task(routed(fleet, "r", 1.0))
    return helper, task, await within(helper.engine.added.get())


async def told(fleet: Fleet, name: str, shared: HostEmbeddings | None) -> None:
    """Wait until the frontend knows whose outputs a worker shares."""
    if shared is not None:
        await eventually(lambda: fleet.client.router.images.cache_of(name) == shared.name)


def forget_images(fleet: Fleet) -> None:
    """As if no request had shown any image to a worker."""
    router = fleet.client.router
    for part in (router.images, router.promises):
        part.drop_worker("worker-1")


async def routed(fleet: Fleet, request_id: str, *pixels: float) -> Receipt:
    """Send a request and return its receipt."""
    receipt = Receipt()
    token = current_receipt.set(receipt)
    try:
        items = [make_item(value) for value in pixels]
        await within(fleet.client.add_request_async(make_request(request_id, items=items)))
    finally:
        current_receipt.reset(token)
    return receipt


async def test_a_new_image_is_encoded_there_and_the_request_goes_elsewhere(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    worker, helper = await generator(fleet, shared), await encoder(fleet, shared)
    [route] = (await routed(fleet, "r", 1.0, 2.0)).routed
    assert (route.worker, route.embeddings_held, route.embeddings_needed) == ("worker-1", 2, 2)
    await fleet.answer("r")
    assert set(worker.engine.pixels) == {"r"}
    jobs = [await within(helper.engine.added.get()) for _ in range(2)]
    for job, value in zip(jobs, (1.0, 2.0), strict=True):
        assert job.request_id.startswith(PREFIX)
        [feature] = job.mm_features or ()
        assert (feature.mm_position.offset, feature.mm_position.length) == (0, 4)
        assert len(job.prompt_token_ids or ()) == 4
        [pixels] = helper.engine.pixels[job.request_id]
        assert torch.equal(pixels, torch.full((8, 100), value))
    assert fleet.metrics.get_sample_value(
        "foveal_encode_jobs_total", {"outcome": "encoded"}
    ) == 2
    await eventually(fleet.at_rest)


async def test_what_is_held_is_not_encoded_again(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    helper = await encoder(fleet, shared)
    await routed(fleet, "first", 1.0)
    await routed(fleet, "second", 1.0)
    assert len(helper.engine.pixels) == 1


async def test_an_image_that_several_wait_for_is_encoded_once(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    helper = await encoder(fleet, shared, stalled=True)
    waiting = [asyncio.create_task(routed(fleet, f"r{n}", 1.0)) for n in range(4)]
    job = await within(helper.engine.added.get())
    assert not any(task.done() for task in waiting)
    helper.engine.say(job.request_id, finished=True)
    await within(asyncio.gather(*waiting))
    assert len(helper.engine.pixels) == 1


async def test_images_go_to_the_encode_worker_with_the_least_to_do(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    helpers = [await encoder(fleet, shared, f"encoder-{n}") for n in range(2)]
    for helper in helpers:
        helper.engine.stalled = True
    task = asyncio.create_task(routed(fleet, "r", 1.0, 2.0, 3.0, 4.0))
    for helper in helpers:
        for _ in range(2):
            job = await within(helper.engine.added.get())
            helper.engine.say(job.request_id, finished=True)
    await within(task)


async def test_when_the_last_encode_worker_is_lost_images_are_encoded_in_place(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    worker, helper = await generator(fleet, shared), await encoder(fleet, shared)
    helper.engine.stalled = True
    task = asyncio.create_task(routed(fleet, "r", 1.0))
    await within(helper.engine.added.get())
    await helper.leave()
    receipt = await within(task)
    assert receipt.routed[0].embeddings_held == 0
    await fleet.answer("r")
    assert torch.equal(worker.engine.pixels["r"][0], torch.full((8, 100), 1.0))
    await routed(fleet, "s", 2.0)
    await fleet.answer("s")
    await eventually(fleet.at_rest)


async def test_an_image_that_cannot_be_encoded_there_is_encoded_in_place(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    helper, task, job = await asked(fleet, shared)
    helper.outbox.fail("frontend-1", job.request_id, "no")
    assert (await within(task)).routed[0].embeddings_held == 0
    await fleet.answer("r")


async def test_tensors_that_one_cannot_read_are_sent_along_and_that_is_counted(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    helper, task, job = await asked(fleet, shared)
    helper.frontends.end(job.request_id)  # as if it had not got so far
    for request_id in ("encode-unknown", job.request_id):
        helper.link.send("frontend-1", TensorsMissing(request_id, "gone"))
    again = await within(helper.engine.added.get())
    assert again.request_id == job.request_id
    assert fleet.count("tensors_missing") == 1
    assert fleet.counted.inline_bytes > 8 * 100 * 4
    helper.engine.say(job.request_id, finished=True)
    assert (await within(task)).routed[0].embeddings_held == 1


async def test_prompts_that_wait_count_as_work_to_be_done(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    worker, helper = await generator(fleet, shared), await encoder(fleet, shared)
    worker.engine.stalled = helper.engine.stalled = True
    asking = [asyncio.create_task(routed(fleet, f"r{n}", 1.0)) for n in range(2)]
    job = await within(helper.engine.added.get())
    assert fleet_load(fleet.client) == FleetLoad(workers=1, prefill_tokens=2 * 40)
    helper.engine.say(job.request_id, finished=True)
    await within(asyncio.gather(*asking))
    assert fleet.client.waiting_tokens == 0
    assert fleet_load(fleet.client).own_requests == 2


async def test_who_waits_too_long_goes_on(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    await encoder(fleet, shared, stalled=True)
    fleet.client._encoders._seconds = 0.05
    receipt = await routed(fleet, "r", 1.0)
    assert receipt.routed[0].embeddings_held == 0
    assert len(fleet.client._encoders) == 1  # it may still be of use to others
    await fleet.answer("r")


async def test_one_that_hangs_is_waited_for_once(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    helper = await encoder(fleet, shared, stalled=True)
    fleet.client._encoders._seconds = 0.05
    await routed(fleet, "r", 1.0)
    job = await within(helper.engine.added.get())
    fleet.client._encoders._seconds = 1000.0
    await within(routed(fleet, "s", 2.0))  # not sent there
    helper.engine.say(job.request_id, finished=True)  # there it is again
    await eventually(lambda: not len(fleet.client._encoders))
    helper.engine.stalled = False
    assert (await within(routed(fleet, "t", 3.0))).routed[0].embeddings_held == 1


async def test_an_image_that_one_hangs_with_is_encoded_by_another(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    helpers = [await encoder(fleet, shared, f"encoder-{n}") for n in range(2)]
    for helper in helpers:
        helper.engine.stalled = True
    fleet.client._encoders._seconds = 0.05
    await routed(fleet, "r", 1.0)
    for helper in helpers:
        helper.engine.stalled = False
    fleet.client._encoders._seconds = 1000.0
    forget_images(fleet)
    assert (await within(routed(fleet, "s", 1.0))).routed[0].embeddings_held == 1
    assert sum(len(helper.engine.pixels) for helper in helpers) == 2


async def test_what_a_lost_encode_worker_may_be_reading_stays_in_place(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    _, task, _ = await asked(fleet, shared)
    (seen,) = fleet.pool.encode_workers()
    seen.process, seen.last_heard = None, seen.last_heard - 1000.0
    await within(task)
    await fleet.answer("r")
    assert not len(fleet.client._encoders)
    assert len(fleet.client.requests.parked) == 1
    assert fleet.arena.stats().leased_entries == 1
    # Once it answers anew it is done with what it had.
    await eventually(lambda: not len(fleet.client.requests.parked))
    await eventually(fleet.at_rest)


async def test_a_client_that_leaves_ends_nobody_elses_wait(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    await generator(fleet, shared)
    helper = await encoder(fleet, shared, stalled=True)
    leaves, stays = (asyncio.create_task(routed(fleet, n, 1.0)) for n in ("a", "b"))
    job = await within(helper.engine.added.get())
    leaves.cancel()
    await asyncio.wait([leaves])
    helper.engine.say(job.request_id, finished=True)
    assert (await within(stays)).routed[0].embeddings_held == 1


async def test_what_is_aborted_while_it_waits_is_not_sent(
    fleet: Fleet, shared: HostEmbeddings
) -> None:
    worker, helper = await generator(fleet, shared), await encoder(fleet, shared)
    helper.engine.stalled = True
    task = asyncio.create_task(routed(fleet, "r", 1.0))
    job = await within(helper.engine.added.get())
    await fleet.client.abort_requests_async(["r"])
    helper.engine.say(job.request_id, finished=True)
    assert (await within(task)).routed == []
    await routed(fleet, "s", 1.0)
    await fleet.answer("s")
    assert set(worker.engine.pixels) == {"s"}
    await eventually(fleet.at_rest)


async def test_without_nixl_an_encode_worker_of_another_host_is_of_no_use(
    fleet: Fleet, shared: HostEmbeddings, tmp_path: Path
) -> None:
    other = HostEmbeddings(
        EmbeddingHome(bytes(32), "ns", tmp_path),
        EmbeddingStore(tmp_path / "elsewhere", "key", 1 << 16),
    )
    await generator(fleet, shared)
    helper = await encoder(fleet, other)
    await routed(fleet, "r", 1.0)
    assert helper.engine.pixels == {}


async def test_an_encode_worker_alone_answers_nothing(
    registry: Registry, shared: HostEmbeddings
) -> None:
    async with Fleet(registry, wait=0.2) as fleet:
        await encoder(fleet, shared)
        assert not await fleet.pool.wait_until_ready(0.1)
        assert fleet.client.callable_workers() == []
        await generator(fleet, shared)
        await routed(fleet, "r", 1.0)
        answer = await fleet.answer("r")
        assert answer[-1].finish_reason is FinishReason.LENGTH

"""Encode workers of another host help: real NIXL agents, over TCP, and two caches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontend import embedding_moves
from frontend.receipt import Receipt
from tests.fakes import PATIENCE, FakeWorker, eventually, within
from tests.fakes_nixl import cpu_seconds
from tests.frontend.fleets import Fleet
from tests.frontend.test_encode_workers import encoder, routed, told
from transfer.embeddings.home import EmbeddingHome
from transfer.embeddings.store import EmbeddingLease, EmbeddingStore
from transfer.messages import EmbeddingExported, EmbeddingPulled, Message
from transfer.registry import Registry
from workers.embedding_cache import HostEmbeddings
from workers.embedding_exports import EmbeddingExports

pytest.importorskip("nixl", reason="NIXL is not installed, so NOT TESTED")
pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.usefixtures("over_tcp")]

CACHE_GIB = 1 / 256
OUTPUT = torch.rand(4, 64)


@pytest.fixture(autouse=True)
def a_busy_machine_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_moves, "MOVE_SECONDS", PATIENCE)


class Host:
    """A cache that workers of one host share."""

    def __init__(self, directory: Path, model: str = "key", capacity: int = 1 << 14) -> None:
        self.store = EmbeddingStore(directory / "outputs", model, capacity)
        self.shared = HostEmbeddings(EmbeddingHome(bytes(32), "ns", directory), self.store)

    @property
    def held(self) -> list[str]:
        return self.store.identifiers()


@pytest.fixture
def here(tmp_path: Path) -> Host:
    """Where the workers that generate are."""
    (tmp_path / "here").mkdir()
    return Host(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Host:
    """Where the encode workers are."""
    (tmp_path / "there").mkdir()
    return Host(tmp_path / "there")


async def generator(
    fleet: Fleet, host: Host, name: str = "worker-1", **settings: Any
) -> FakeWorker:
    settings = {"cache_gib": CACHE_GIB, "transfer_timeout": PATIENCE, **settings}
    worker = await fleet.start(name, embeddings=host.shared, **settings)
    await told(fleet, name, host.shared)
    return worker


async def helper(
    fleet: Fleet, host: Host, name: str = "encoder-1", **settings: Any
) -> FakeWorker:
    settings.setdefault("cache_gib", CACHE_GIB)
    worker = await encoder(fleet, host.shared, name, **settings)
    worker.engine.stalled = True
    return worker


async def encode(helper: FakeWorker, host: Host, output: torch.Tensor = OUTPUT) -> str:
    """Do what an encode worker's engine does with the next image; returns its identifier."""
    job = await within(helper.engine.added.get())
    [feature] = job.mm_features or ()
    host.store.save(feature.identifier, output)
    helper.engine.say(job.request_id, finished=True)
    return feature.identifier


async def asked(
    fleet: Fleet, helper: FakeWorker, there: Host, pixels: float, **options: Any
) -> Receipt:
    """Ask about a new image, which the encode worker encodes."""
    asking = asyncio.create_task(routed(fleet, f"r{pixels}", pixels))
    await encode(helper, there, **options)
    return await within(asking)


def held(receipt: Receipt) -> tuple[str, int]:
    [route] = receipt.routed
    return route.worker, route.embeddings_held


def moves(fleet: Fleet) -> tuple[float, float]:
    """How many were moved, and how many failed to be."""
    counts = [
        fleet.metrics.get_sample_value("foveal_embedding_moves_total", {"outcome": outcome})
        for outcome in ("moved", "failed")
    ]
    return counts[0] or 0.0, counts[1] or 0.0


def exports_of(helper: FakeWorker) -> EmbeddingExports:
    assert helper.inbox._exports is not None
    return helper.inbox._exports


def unheard(worker: FakeWorker, *kinds: type[Message]) -> list[Message]:
    """From here on what a worker says of these kinds gets lost; returns it."""
    lost: list[Message] = []
    send = worker.link.send

    def say(frontend: str, message: Message, payload: Any = ()) -> None:
        if isinstance(message, kinds):
            lost.append(message)
        else:
            send(frontend, message, payload)

    worker.link.send = say  # type: ignore[method-assign]
    return lost


async def is_encoded_in_place(fleet: Fleet, worker: FakeWorker, request_id: str) -> None:
    await fleet.answer(request_id)
    assert request_id in worker.engine.pixels
    await eventually(fleet.at_rest)
    assert len(fleet.client._moves) == 0 and not fleet.client._encoders._deliveries


async def test_an_image_is_encoded_there_and_its_output_comes_here(
    fleet: Fleet, here: Host, there: Host
) -> None:
    await generator(fleet, here)
    encodes = await helper(fleet, there)
    receipt = await asked(fleet, encodes, there, 1.0)
    assert held(receipt) == ("worker-1", 1)
    [identifier] = here.held
    moved = here.store.load(identifier)
    assert moved is not None and torch.equal(moved, OUTPUT)
    assert moves(fleet) == (1, 0)
    await fleet.answer("r1.0")
    await eventually(fleet.at_rest)
    await eventually(lambda: len(exports_of(encodes)) == 0)
    export = exports_of(encodes)._export
    assert export is not None and not export.busy
    assert await asyncio.to_thread(cpu_seconds, 1.0) < 0.3  # the workers' own reports
    # It is held now: nobody is asked to encode it.
    assert held(await routed(fleet, "again", 1.0)) == ("worker-1", 1)
    assert len(encodes.engine.pixels) == 1


async def test_without_pixels_in_sight_none_are_sent(
    registry: Registry, here: Host, there: Host
) -> None:
    async with Fleet(registry, transfer="nixl") as fleet:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        receipt = await asked(fleet, encodes, there, 1.0)
        assert held(receipt) == ("worker-1", 1)
        await fleet.answer("r1.0")
        assert "worker-1" not in fleet.nixl.pulls or not fleet.nixl.pulls["worker-1"].pulls
        assert fleet.nixl.pulls["encoder-1"].pulls == 1
        assert worker.engine.pixels["r1.0"] == [None]


async def test_what_is_held_there_is_moved_without_being_encoded_again(
    fleet: Fleet, here: Host, there: Host
) -> None:
    await generator(fleet, here)
    encodes = await helper(fleet, there)
    await asked(fleet, encodes, there, 1.0)
    here.store.clear()
    router = fleet.client.router
    images = router.images
    for part in (images, router.promises):
        part.drop_worker("worker-1")
    await eventually(lambda: not images._shared.get(here.shared.name))
    await eventually(lambda: images._shared.get(there.shared.name))
    assert held(await routed(fleet, "again", 1.0)) == ("worker-1", 1)
    assert len(encodes.engine.pixels) == 1
    assert moves(fleet) == (2, 0)


async def test_an_output_that_several_wait_for_is_moved_once(
    fleet: Fleet, here: Host, there: Host
) -> None:
    await generator(fleet, here)
    await generator(fleet, here, "worker-2")
    encodes = await helper(fleet, there)
    asking = [asyncio.create_task(routed(fleet, f"r{n}", 1.0)) for n in range(4)]
    await encode(encodes, there)
    for receipt in await within(asyncio.gather(*asking)):
        assert held(receipt)[1] == 1
    assert moves(fleet) == (1, 0)
    assert len(encodes.engine.pixels) == 1


async def test_many_at_once_wait_for_their_turn(
    fleet: Fleet, here: Host, there: Host
) -> None:
    await generator(fleet, here)
    pages = embedding_moves.MOST_AT_ONCE + 1
    encodes = await helper(fleet, there, cache_gib=pages * 4096 / (1 << 30))
    here.store.capacity = there.store.capacity = 1 << 20
    numbers = range(3 * pages)
    asking = [asyncio.create_task(routed(fleet, f"r{n}", float(n))) for n in numbers]
    for _ in numbers:
        await encode(encodes, there)
    for receipt in await within(asyncio.gather(*asking)):
        assert held(receipt) == ("worker-1", 1)
    assert moves(fleet) == (len(numbers), 0)


async def test_a_request_goes_on_when_the_worker_it_is_meant_for_is_another_meanwhile(
    registry: Registry, here: Host, there: Host
) -> None:
    elsewhere = Registry(registry.path.parent, "elsewhere")
    address = f"ipc://{elsewhere.path}/w"
    settings: dict[str, Any] = {
        "embeddings": here.shared, "cache_gib": CACHE_GIB, "address": address,
    }
    async with Fleet(registry, addresses=[address]) as fleet:
        async with FakeWorker(elsewhere, **settings):
            await fleet.until_ready("worker-1")
            await told(fleet, "worker-1", here.shared)
            encodes = await helper(fleet, there)
            asking = asyncio.create_task(routed(fleet, "r", 1.0))
            job = await within(encodes.engine.added.get())
        async with FakeWorker(elsewhere, "worker-2", epoch="epoch-2", **settings):
            await fleet.until_ready("worker-2")
            encodes.outbox.fail("frontend-1", job.request_id, "no")
            assert held(await within(asking)) == ("worker-2", 0)
            assert fleet.client._encoders._coming == {}


async def test_encode_workers_of_the_same_host_come_first(
    fleet: Fleet, here: Host, there: Host
) -> None:
    await generator(fleet, here)
    far, near = await helper(fleet, there, "far"), await helper(fleet, here, "near")
    assert held(await asked(fleet, near, here, 1.0)) == ("worker-1", 1)
    assert moves(fleet) == (0, 0) and far.engine.pixels == {}
    await near.leave()
    await eventually(lambda: len(fleet.pool.encode_workers()) == 1)
    assert held(await asked(fleet, far, there, 2.0)) == ("worker-1", 1)
    assert moves(fleet) == (1, 0)


async def test_requests_that_wait_count_where_they_are_meant_to_go(
    fleet: Fleet, here: Host, there: Host, tmp_path: Path
) -> None:
    (tmp_path / "third").mkdir()
    third = Host(tmp_path / "third")
    await generator(fleet, here)
    await generator(fleet, third, "worker-2")
    encodes = await helper(fleet, there)
    asking = [asyncio.create_task(routed(fleet, f"r{n}", float(n))) for n in (1, 2)]
    for _ in asking:
        await encode(encodes, there)
    routes = [held(receipt) for receipt in await within(asyncio.gather(*asking))]
    assert sorted(routes) == [("worker-1", 1), ("worker-2", 1)]
    assert (len(here.held), len(third.held)) == (1, 1)
    assert fleet.client._encoders._coming == {}


@pytest.mark.parametrize("without", ["here", "there"])
async def test_without_nixl_images_are_encoded_in_place(
    fleet: Fleet, here: Host, there: Host, without: str
) -> None:
    off = {"cache_gib": 0.0}
    worker = await generator(fleet, here, **(off if without == "here" else {}))
    encodes = await helper(fleet, there, **(off if without == "there" else {}))
    assert held(await routed(fleet, "r", 1.0)) == ("worker-1", 0)
    assert encodes.engine.pixels == {}
    await is_encoded_in_place(fleet, worker, "r")


@pytest.mark.parametrize("transfer", ["shm", "inline"])
async def test_where_nixl_is_not_wanted_nothing_is_moved(
    registry: Registry, here: Host, there: Host, transfer: str
) -> None:
    async with Fleet(registry, transfer=transfer) as fleet:
        await generator(fleet, here)
        encodes = await helper(fleet, there)
        assert held(await routed(fleet, "r", 1.0)) == ("worker-1", 0)
        assert encodes.engine.pixels == {}


async def test_outputs_of_another_model_are_of_no_use_and_that_is_said_once(
    fleet: Fleet, here: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "foreign").mkdir()
    await generator(fleet, here)
    encodes = await helper(fleet, Host(tmp_path / "foreign", "another"))
    for request_id in ("r", "s"):
        await routed(fleet, request_id, float(ord(request_id)))
    assert encodes.engine.pixels == {}
    assert caplog.text.count("is of no use to worker-1") == 1


class TestAMoveThatFails:
    """Has the image encoded in place, is counted, and another is tried later."""

    async def test_because_the_output_is_gone(
        self, fleet: Fleet, here: Host, there: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        asking = asyncio.create_task(routed(fleet, "r", 1.0))
        job = await within(encodes.engine.added.get())
        encodes.engine.say(job.request_id, finished=True)  # and nothing was saved
        assert held(await within(asking)) == ("worker-1", 0)
        await is_encoded_in_place(fleet, worker, "r")
        assert moves(fleet) == (0, 1)
        await routed(fleet, "s", 2.0)  # not at once again
        await fleet.answer("s")
        assert len(encodes.engine.pixels) == 1
        monkeypatch.setattr(embedding_moves, "time", SimpleNamespace(monotonic=later(31.0)))
        assert held(await asked(fleet, encodes, there, 3.0)) == ("worker-1", 1)
        assert moves(fleet) == (1, 1)

    async def test_because_the_image_could_not_be_encoded(
        self, fleet: Fleet, here: Host, there: Host
    ) -> None:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        asking = asyncio.create_task(routed(fleet, "r", 1.0))
        job = await within(encodes.engine.added.get())
        encodes.outbox.fail("frontend-1", job.request_id, "no")
        assert held(await within(asking)) == ("worker-1", 0)
        await is_encoded_in_place(fleet, worker, "r")
        assert moves(fleet) == (0, 0)

    async def test_because_the_output_is_too_large(
        self, fleet: Fleet, here: Host, there: Host
    ) -> None:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there, cache_gib=1e-5)
        there.store.capacity = 1 << 20
        receipt = await asked(fleet, encodes, there, 1.0, output=torch.rand(100, 64))
        assert held(receipt) == ("worker-1", 0)
        await is_encoded_in_place(fleet, worker, "r1.0")
        assert moves(fleet) == (0, 1)

    async def test_because_the_cache_here_is_in_use(
        self, fleet: Fleet, here: Host, there: Host
    ) -> None:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        here.store.save("image-" + "0" * 32, torch.rand(60, 64))
        lease = here.store.lease("image-" + "0" * 32)
        assert lease is not None
        here.store.capacity = lease.nbytes + 100
        assert held(await asked(fleet, encodes, there, 1.0)) == ("worker-1", 0)
        await is_encoded_in_place(fleet, worker, "r1.0")
        assert moves(fleet) == (0, 1)
        lease.release()
        here.store.capacity = 1 << 14

    async def test_because_what_comes_is_spoiled(
        self, fleet: Fleet, here: Host, there: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        copy_to = EmbeddingLease.copy_to

        def spoil(lease: EmbeddingLease, memory: memoryview) -> None:
            copy_to(lease, memory)
            memory[-1] ^= 1

        monkeypatch.setattr(EmbeddingLease, "copy_to", spoil)
        assert held(await asked(fleet, encodes, there, 1.0)) == ("worker-1", 0)
        await is_encoded_in_place(fleet, worker, "r1.0")
        assert moves(fleet) == (0, 1) and here.held == []

    @pytest.mark.parametrize("silent", ["the encode worker", "the worker"])
    async def test_because_one_of_the_two_says_nothing(
        self, fleet: Fleet, here: Host, there: Host, silent: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(embedding_moves, "MOVE_SECONDS", 0.5)
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        lost = unheard(
            encodes if silent == "the encode worker" else worker,
            EmbeddingExported, EmbeddingPulled,
        )
        assert held(await asked(fleet, encodes, there, 1.0))[0] == "worker-1"
        assert moves(fleet) == (0, 1)
        await is_encoded_in_place(fleet, worker, "r1.0")
        if silent == "the encode worker":  # what it says too late is let go at once
            await eventually(lambda: lost)
            [seen] = fleet.pool.encode_workers()
            fleet.client.on_message(seen, lost[0], ())
            await eventually(lambda: len(exports_of(encodes)) == 0)

    async def test_because_its_turn_does_not_come(
        self, fleet: Fleet, here: Host, there: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(embedding_moves, "MOST_AT_ONCE", 1)
        monkeypatch.setattr(embedding_moves, "TURN_SECONDS", 0.2)
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        said = unheard(worker, EmbeddingPulled)
        first = asyncio.create_task(routed(fleet, "r", 1.0))
        await encode(encodes, there)
        await eventually(lambda: said)
        assert held(await asked(fleet, encodes, there, 2.0)) == ("worker-1", 0)
        assert moves(fleet) == (0, 1) and not first.done()
        [seen] = fleet.client.callable_workers()
        fleet.client.on_message(seen, said[0], ())
        assert held(await within(first)) == ("worker-1", 1)
        assert moves(fleet) == (1, 1)
        await is_encoded_in_place(fleet, worker, "r2.0")

    @pytest.mark.parametrize("lost", ["the encode worker", "the worker"])
    async def test_because_one_of_the_two_is_lost(
        self, fleet: Fleet, here: Host, there: Host, lost: str
    ) -> None:
        target = await generator(fleet, here)
        encodes = await helper(fleet, there)
        unheard(encodes if lost == "the encode worker" else target,
                EmbeddingExported, EmbeddingPulled)
        asking = asyncio.create_task(routed(fleet, "r", 1.0))
        await encode(encodes, there)
        await eventually(lambda: len(exports_of(encodes)) == 1)
        await eventually(lambda: len(fleet.client._moves) == 1)
        if lost == "the encode worker":
            await encodes.leave()
            assert held(await within(asking)) == ("worker-1", 0)
            await is_encoded_in_place(fleet, target, "r")
        else:
            await eventually(lambda: here.held)
            await target.leave()
            other = await fleet.start("worker-2")
            assert held(await within(asking)) == ("worker-2", 0)
            await is_encoded_in_place(fleet, other, "r")
        assert moves(fleet) == (0, 1)


async def test_when_the_frontend_goes_nothing_stays_leased(
    registry: Registry, here: Host, there: Host
) -> None:
    async with Fleet(registry) as fleet:
        worker = await generator(fleet, here)
        encodes = await helper(fleet, there)
        unheard(worker, EmbeddingPulled)
        asking = asyncio.create_task(routed(fleet, "r", 1.0))
        await encode(encodes, there)
        await eventually(lambda: len(exports_of(encodes)) == 1)
        asking.cancel()
        await asyncio.wait([asking])
        fleet.client.shutdown()
        await within(fleet.client.closed())
        await eventually(lambda: len(exports_of(encodes)) == 0)
        assert not fleet.client._encoders._deliveries


def later(seconds: float) -> Callable[[], float]:
    """A clock that is ahead."""
    now = time.monotonic
    return lambda: now() + seconds

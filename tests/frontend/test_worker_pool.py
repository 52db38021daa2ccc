"""Which workers are taken, refused, lost and taken again."""

from __future__ import annotations

import time

import pytest

from frontend.router.router import Router
from frontend.worker import Worker
from frontend.worker_pool import GREETINGS, WATCH_SECONDS
from tests.fakes import PATIENCE, FakeWorker, eventually, make_request, within
from tests.frontend.fleets import Fleet
from transfer.messages import (
    Bye,
    Frame,
    Hello,
    LoadReport,
    Outputs,
    Refused,
    encode,
)
from transfer.registry import Registry, WorkerRecord

pytestmark = pytest.mark.anyio


async def test_workers_are_found_in_the_registry_and_by_address(registry: Registry) -> None:
    elsewhere = FakeWorker(registry, "by-address", address="tcp://127.0.0.1:*")
    elsewhere.start()
    async with Fleet(registry, addresses=[elsewhere.address]) as fleet:
        await fleet.until_ready("by-address")
        await fleet.start("by-registry")
        assert {w.name for w in fleet.pool.workers} == {"by-address", "by-registry"}
    await elsewhere.stop()


async def test_a_worker_both_announced_and_named_is_one_worker(registry: Registry) -> None:
    worker = FakeWorker(registry, "both", address="tcp://127.0.0.1:*")
    async with worker, Fleet(registry, addresses=[worker.address]) as fleet:
        await fleet.until_ready("both")
        assert len(fleet.pool.workers) == 1


async def test_a_worker_that_discovery_names_by_another_address_is_left_alone(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(registry, "twice", address="tcp://127.0.0.1:*")
    address = worker.address.replace("127.0.0.1", "localhost")
    read = registry.records
    seen: list[str] = []

    def read_and_note() -> dict[str, WorkerRecord]:
        records = read()
        seen.extend(records)
        return records

    monkeypatch.setattr(registry, "records", read_and_note)
    worker.start()
    async with Fleet(registry, addresses=[address]) as fleet:
        await fleet.until_ready("twice")
        await fleet.hold_request(worker)
        worker.announce()
        await eventually(lambda: seen)
        worker.announce()  # read when the pool is done with the first
        await eventually(lambda: len(seen) > 1)
        assert [w.address for w in fleet.pool.workers] == [address]
        assert worker.frontends.owner("r")
    await worker.stop()
    registry.withdraw("twice")


async def test_a_worker_that_answers_at_two_addresses_loses_no_request(
    registry: Registry,
) -> None:
    worker = FakeWorker(registry, "twice", address="tcp://127.0.0.1:*")
    first = worker.address
    second = first.replace("127.0.0.1", "localhost")
    worker.start()
    async with Fleet(registry, addresses=[first]) as fleet:
        await fleet.until_ready("twice")
        await fleet.hold_request(worker, max_tokens=1)
        fleet.pool._addresses = [first, second]
        fleet.pool._add(second, None)
        assert (await within(worker.engine.added.get())).request_id == "r"
        assert [w.address for w in fleet.pool.workers] == [second]
        worker.engine.say("r", 7, finished=True)
        assert [t for o in await fleet.answer("r") for t in o.new_token_ids] == [7]
        await eventually(fleet.at_rest)
        await worker.stop()
        await eventually(lambda: {w.address for w in fleet.pool.workers} == {first, second})


async def test_a_worker_that_leaves_is_gone_at_once(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await worker.leave()
        await eventually(lambda: not fleet.pool.workers)
        assert not await fleet.pool.wait_until_ready(0)


async def test_a_worker_that_discovery_has_lost_goes_on_as_long_as_it_answers(
    registry: Registry,
) -> None:
    """It may be that only etcd and the worker cannot reach each other."""
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker, max_tokens=1)
        (seen,) = fleet.pool.workers
        registry.withdraw_record("worker-1")
        await eventually(lambda: not seen.listed)
        assert list(fleet.pool.ready_workers()) == ["worker-1"]
        worker.engine.say("r", 7, finished=True)
        assert [o.new_token_ids for o in await fleet.answer("r")] == [[7]]
        worker.announce()
        await eventually(lambda: seen.listed)
        registry.withdraw_record("worker-1")
        await worker.stop()  # without a word
        await eventually(lambda: not fleet.pool.workers)


async def test_a_silent_worker_is_missed_within_three_seconds_unless_it_is_starved(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start()
        (worker,) = fleet.pool.workers
        heard = worker.last_heard
        # Its process is this one, which runs at this moment.
        assert not worker.is_silent(heard + 10)
        assert worker.is_silent(heard + 16)
        worker.process = None
        assert not worker.is_silent(heard + 2)
        assert worker.is_silent(heard + 3 - WATCH_SECONDS)


async def test_a_worker_that_falls_silent_is_lost_and_greeted_again(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        fake = await fleet.start()
        (worker,) = fleet.pool.workers

        def is_missed() -> bool:
            # It does answer: this has to be seen before the next answer is.
            worker.process, worker.last_heard = None, time.monotonic() - 3.0
            return "worker-1" not in fleet.pool.ready_workers()

        await eventually(is_missed)
        await fleet.until_ready("worker-1")
        await fleet.client.add_request_async(make_request("r"))
        assert len(await fleet.answer("r")) == 3
        assert fake.frontends.names() == ["frontend-1"]


async def test_a_draining_worker_is_taken_back_when_it_has_been_started_anew(
    registry: Registry,
) -> None:
    old = FakeWorker(registry, "old", address="tcp://127.0.0.1:*")
    old.start()
    async with Fleet(registry, addresses=[old.address]) as fleet:
        await fleet.until_ready("old")
        old.inbox.begin_draining(5.0)
        await fleet.until_gone("old")
        assert fleet.client.describe()["workers"][0]["draining"]
        assert set(fleet.pool.reachable_workers()) == {"old"}
        await old.stop()
        new = FakeWorker(registry, "new", address=old.address, epoch="epoch-2")
        new.start()
        await fleet.until_ready("new")
        await new.stop()


async def test_a_worker_restarted_on_its_address_is_taken_again(registry: Registry) -> None:
    old = FakeWorker(registry, "old", address="tcp://127.0.0.1:*")
    old.start()
    async with Fleet(registry, addresses=[old.address]) as fleet:
        await fleet.until_ready("old")
        await old.stop()
        new = FakeWorker(registry, "new", address=old.address, epoch="epoch-2")
        new.start()
        # It does not know this frontend, says so when pinged, and is greeted anew.
        await fleet.until_ready("new")
        assert set(fleet.pool.ready_workers()) == {"new"}
        await fleet.client.add_request_async(make_request("r"))
        assert len(await fleet.answer("r")) == 3
        await new.stop()


@pytest.mark.parametrize("frames", [[*encode(Outputs(), [b"\xc1"])], [b"\xc1"]])
async def test_a_worker_that_sends_nonsense_is_lost_and_greeted_again(
    registry: Registry, frames: list[Frame]
) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        await fleet.hold_request(worker)
        worker.link._put([b"frontend-1", *frames])
        await fleet.until_gone("worker-1")
        worker.engine.stalled = False
        await fleet.until_ready("worker-1")
        assert len(await fleet.answer("r")) == 3


async def test_a_goodbye_out_of_turn_changes_nothing(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        worker.link.send("frontend-1", Refused(worker="worker-1", reason="changed my mind"))
        worker.link.send("frontend-1", Bye())
        worker.link.send("frontend-1", Bye())
        await fleet.until_gone("worker-1")
        await fleet.until_ready("worker-1")


async def test_greetings_that_nobody_reads_do_not_pile_up(
    registry: Registry, elsewhere: Registry
) -> None:
    address = f"ipc://{elsewhere.path}/w"
    async with Fleet(registry, addresses=[address]) as fleet:
        (worker,) = fleet.pool.workers
        first = worker.link
        for _ in range(GREETINGS):
            fleet.pool._greet(worker)
        assert worker.link is not first
        heard = 0
        async with FakeWorker(elsewhere, "late", address=address) as late:
            greet = late.inbox._handshake.greet

            def counted(name: str, hello: Hello) -> None:
                nonlocal heard
                heard += 1
                greet(name, hello)

            late.inbox._handshake.greet = counted  # type: ignore[method-assign]
            assert await fleet.pool.wait_until_ready(3 * PATIENCE)
        assert heard < GREETINGS


class Stumbling(Router):
    """A router that stumbles over what workers publish."""

    stumbled = 0

    def on_report(self, worker: str, report: LoadReport) -> bool:
        self.stumbled += 1
        raise RuntimeError("stumbled")


async def test_news_that_cannot_be_used_do_not_end_the_listening(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        router = fleet.client.router
        router.__class__ = Stumbling
        assert isinstance(router, Stumbling)
        worker.kv_publisher.publish(worker.load.report())
        await eventually(lambda: router.stumbled)  # then it is listened to
        worker.hold([b"digest"])
        await eventually(lambda: router.plane.deltas)
        assert list(fleet.pool.ready_workers()) == ["worker-1"]


class Failing(Router):
    """A router that cannot let go of one worker."""

    def drop_worker(self, worker: str) -> list[str]:
        if worker == "worker-1":
            raise RuntimeError("stumbled")
        return super().drop_worker(worker)


async def test_workers_are_watched_whatever_became_of_another(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        workers = {name: await fleet.start(name) for name in ("worker-1", "worker-2")}
        fleet.client.router.__class__ = Failing
        seen = {worker.name: worker for worker in fleet.pool.workers}

        async def is_found_again(worker: Worker) -> None:
            worker.process, worker.last_heard = None, time.monotonic() - 1000.0
            await eventually(lambda: worker.last_heard > time.monotonic() - 100.0)
            await fleet.until_ready(worker.name)

        for name in workers:
            await is_found_again(seen[name])

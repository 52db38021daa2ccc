"""Which workers are taken, refused, lost and taken again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from frontend import worker_pool
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
from transfer.process import process_start_time, wants_to_run
from transfer.registry import Registry, WorkerRecord
from transfer.socket_reader import MESSAGES_AT_ONCE

pytestmark = pytest.mark.anyio


class OtherProcess(subprocess.Popen[bytes]):
    """Does nothing. A fake worker may say that it is this one."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        start_time = process_start_time(self.pid)
        assert start_time is not None
        self.identity = self.pid, start_time


@pytest.fixture
def other_process() -> Iterator[OtherProcess]:
    with OtherProcess() as process:
        yield process
        process.kill()


@pytest.fixture
def elsewhere(registry: Registry) -> Registry:
    """Where no frontend looks for workers: they are known by address alone."""
    return Registry(registry.path.parent, "elsewhere")


async def hold_request(fleet: Fleet, worker: FakeWorker, max_tokens: int = 3) -> None:
    """Have the worker's engine keep request ``r`` and say nothing of it."""
    worker.engine.stalled = True
    await fleet.client.add_request_async(make_request("r", max_tokens=max_tokens))
    await within(worker.engine.added.get())


def burials(fleet: Fleet) -> list[asyncio.Task[None]]:
    """What the frontend is doing about workers whose process has ended."""
    return [t for t in fleet.pool._tasks if t.get_name() == "end of a worker"]


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
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r"))
        await within(worker.engine.added.get())
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
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r", max_tokens=1))
        await within(worker.engine.added.get())
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
        await hold_request(fleet, worker, max_tokens=1)
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


async def test_the_end_of_a_workers_process_is_noticed_at_once(
    registry: Registry, other_process: OtherProcess
) -> None:
    async with (
        FakeWorker(registry, process=other_process.identity) as worker,
        # Named as well, so that its record alone does not decide; and it still answers.
        Fleet(registry, addresses=[worker.address]) as fleet,
    ):
        await fleet.until_ready("worker-1")
        other_process.kill()
        await fleet.until_gone("worker-1")
        await eventually(lambda: not registry.records())


async def test_the_end_of_a_process_is_not_waited_for_once_its_connection_is_broken(
    registry: Registry, other_process: OtherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that it said can come behind that."""
    monkeypatch.setattr(worker_pool, "LAST_WORDS_SECONDS", 10 * PATIENCE)
    async with Fleet(registry) as fleet:
        worker = await fleet.start(process=other_process.identity)
        await hold_request(fleet, worker)
        other_process.kill()
        await fleet.until_gone("worker-1")
        [burial] = burials(fleet)
        assert fleet.in_flight == 1 and not len(fleet.client.requests.parked)
        worker.link.close()
        await within(burial)
        assert fleet.in_flight == 1 and not len(fleet.client.requests.parked)


async def test_what_a_worker_known_by_address_held_is_free_when_its_process_ends(
    registry: Registry, elsewhere: Registry, other_process: OtherProcess
) -> None:
    """Though discovery says nothing of it, neither that it is there nor that it left."""
    async with (
        FakeWorker(elsewhere, process=other_process.identity) as worker,
        Fleet(registry, addresses=[worker.address]) as fleet,
    ):
        await fleet.until_ready("worker-1")
        await hold_request(fleet, worker)
        worker.link.close()
        await fleet.until_gone("worker-1")
        assert len(fleet.client.requests.parked) == 1
        other_process.kill()
        await eventually(lambda: not len(fleet.client.requests.parked))


async def test_what_a_worker_held_is_free_when_its_successor_is_heard_of_first(
    registry: Registry, elsewhere: Registry, other_process: OtherProcess
) -> None:
    address = f"ipc://{elsewhere.path}/w"
    async with Fleet(registry, addresses=[address]) as fleet:
        async with FakeWorker(
            elsewhere, address=address, process=other_process.identity
        ) as worker:
            await fleet.until_ready("worker-1")
            await hold_request(fleet, worker)
        await fleet.until_gone("worker-1")
        assert len(fleet.client.requests.parked) == 1
        (seen,) = fleet.pool.workers
        assert seen.process_watch is not None
        seen.process_watch.close()  # its news comes too late
        other_process.kill()
        other_process.wait()
        async with FakeWorker(elsewhere, "worker-2", address=address):
            await fleet.until_ready("worker-2")
            assert not len(fleet.client.requests.parked)


async def test_the_end_of_a_process_costs_its_successor_nothing(
    registry: Registry, elsewhere: Registry, other_process: OtherProcess
) -> None:
    """Though it is heard of when that one is here."""
    address = f"ipc://{elsewhere.path}/w"
    async with Fleet(registry, addresses=[address]) as fleet:
        async with FakeWorker(elsewhere, address=address, process=other_process.identity):
            await fleet.until_ready("worker-1")
            (seen,) = fleet.pool.workers
            assert seen.process_watch is not None
            tell = seen.process_watch._ended
        async with FakeWorker(elsewhere, "worker-2", address=address, epoch="epoch-2"):
            await fleet.until_ready("worker-2")
            epoch = seen.epoch
            tell()
            [burial] = burials(fleet)
            await within(burial)
            assert seen.ready and seen.epoch == epoch


@pytest.mark.parametrize("notice", ["connection", "process"])
async def test_what_a_worker_said_before_its_end_is_used(
    registry: Registry, other_process: OtherProcess, notice: str
) -> None:
    """Also by a frontend that was too busy to listen until then."""
    tokens = 3 * MESSAGES_AT_ONCE
    async with Fleet(registry) as fleet:
        worker = await fleet.start(process=other_process.identity)
        await hold_request(fleet, worker, max_tokens=tokens)
        await eventually(lambda: worker.frontends.owner("r"))
        for number in range(tokens):
            last = number == tokens - 1
            output = EngineCoreOutput(
                "r", [number], finish_reason=FinishReason.LENGTH if last else None
            )
            worker.outbox.deliver(EngineCoreOutputs(outputs=[output]))
        if notice == "connection":
            worker.link.close()
        else:
            other_process.kill()
        other_process.poll()
        time.sleep(0.3)  # the loop of the frontend stands still
        answer = await fleet.answer("r")
        assert [t for o in answer for t in o.new_token_ids] == list(range(tokens))
        await eventually(lambda: not fleet.pool.ready_workers())
        assert fleet.count("requests_moved") == 0
        assert fleet.at_rest()


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


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_process_that_does_not_want_to_run_is_not_starved(
    registry: Registry, other_process: OtherProcess, stopped: bool
) -> None:
    if stopped:
        other_process.send_signal(signal.SIGSTOP)
    await eventually(lambda: not wants_to_run(other_process.pid))
    async with Fleet(registry) as fleet:
        await fleet.start(process=other_process.identity)
        (worker,) = fleet.pool.workers
        assert worker.is_silent(worker.last_heard + 2.6)


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
        await hold_request(fleet, worker)
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

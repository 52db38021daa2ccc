"""What the process of a worker on this host tells: that it has ended, or does not run."""

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
from tests.fakes import PATIENCE, FakeWorker, eventually, within
from tests.frontend.fleets import Fleet
from transfer.process import process_start_time, wants_to_run
from transfer.registry import Registry
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


def burials(fleet: Fleet) -> list[asyncio.Task[None]]:
    """What the frontend is doing about workers whose process has ended."""
    return [t for t in fleet.pool._tasks if t.get_name() == "end of a worker"]


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
        await fleet.hold_request(worker)
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
        await fleet.hold_request(worker)
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
            await fleet.hold_request(worker)
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
        await fleet.hold_request(worker, max_tokens=tokens)
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

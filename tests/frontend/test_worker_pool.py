"""Which workers are taken, refused, lost and taken again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from frontend.router.router import Router
from frontend.worker import Worker
from frontend.worker_pool import GREETINGS, WATCH_SECONDS
from tests.fakes import FakeWorker, eventually, make_facts, make_request, within
from tests.frontend.fleets import Fleet
from transfer.messages import (
    PROTOCOL_VERSION,
    Bye,
    Frame,
    LoadReport,
    Outputs,
    Refused,
    encode,
)
from transfer.process import process_start_time, wants_to_run
from transfer.registry import Registry
from transfer.socket_reader import MESSAGES_AT_ONCE

pytestmark = pytest.mark.anyio


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def refusal_of(fleet: Fleet, name: str) -> str:
    return next((w.refused for w in fleet.pool.workers if w.name == name), "")


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
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r", max_tokens=1))
        await within(worker.engine.added.get())
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
    registry: Registry, other_process: subprocess.Popen[bytes]
) -> None:
    start_time = process_start_time(other_process.pid)
    assert start_time is not None
    process = (other_process.pid, start_time)
    async with (
        FakeWorker(registry, process=process) as worker,
        # Named as well, so that its record alone does not decide; and it still answers.
        Fleet(registry, addresses=[worker.address]) as fleet,
    ):
        await fleet.until_ready("worker-1")
        other_process.kill()
        await fleet.until_gone("worker-1")
        await eventually(lambda: not registry.records())


async def test_what_a_worker_known_by_address_held_is_free_when_its_process_ends(
    registry: Registry, other_process: subprocess.Popen[bytes]
) -> None:
    """Though discovery says nothing of it, neither that it is there nor that it left."""
    start_time = process_start_time(other_process.pid)
    assert start_time is not None
    elsewhere = Registry(registry.path.parent, "elsewhere")
    async with (
        FakeWorker(elsewhere, process=(other_process.pid, start_time)) as worker,
        Fleet(registry, addresses=[worker.address]) as fleet,
    ):
        await fleet.until_ready("worker-1")
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r"))
        await within(worker.engine.added.get())
        worker.link.close()
        await fleet.until_gone("worker-1")
        assert len(fleet.client.requests.parked) == 1
        other_process.kill()
        await eventually(lambda: not len(fleet.client.requests.parked))


async def test_what_a_worker_held_is_free_when_its_successor_is_heard_of_first(
    registry: Registry, other_process: subprocess.Popen[bytes]
) -> None:
    start_time = process_start_time(other_process.pid)
    assert start_time is not None
    elsewhere = Registry(registry.path.parent, "elsewhere")
    process = (other_process.pid, start_time)
    async with Fleet(registry, addresses=[f"ipc://{elsewhere.path}/w"]) as fleet:
        async with FakeWorker(
            elsewhere, address=f"ipc://{elsewhere.path}/w", process=process
        ) as worker:
            await fleet.until_ready("worker-1")
            worker.engine.stalled = True
            await fleet.client.add_request_async(make_request("r"))
            await within(worker.engine.added.get())
        await fleet.until_gone("worker-1")
        assert len(fleet.client.requests.parked) == 1
        (seen,) = fleet.pool.workers
        assert seen.process_watch is not None
        seen.process_watch.close()  # its news comes too late
        other_process.kill()
        other_process.wait()
        async with FakeWorker(elsewhere, "worker-2", address=f"ipc://{elsewhere.path}/w"):
            await fleet.until_ready("worker-2")
            assert not len(fleet.client.requests.parked)


async def test_workers_need_not_agree_on_logits_processors(registry: Registry) -> None:
    """One that only encodes has none. What any has counts for all."""
    encoder = FakeWorker(registry, "encoder", facts=make_facts(role="encode"))
    async with encoder, Fleet(registry) as fleet:
        await eventually(lambda: fleet.pool.encode_workers())
        assert not fleet.pool.own_logits_processors()
        await fleet.start("generator", facts=make_facts(own_logits_processors=True))
        assert fleet.pool.own_logits_processors()


async def test_the_end_of_a_process_costs_its_successor_nothing(
    registry: Registry, other_process: subprocess.Popen[bytes]
) -> None:
    """Though it is heard of when that one is here."""
    start_time = process_start_time(other_process.pid)
    assert start_time is not None
    elsewhere = Registry(registry.path.parent, "elsewhere")
    address = f"ipc://{elsewhere.path}/w"
    process = (other_process.pid, start_time)
    async with Fleet(registry, addresses=[address]) as fleet:
        async with FakeWorker(elsewhere, address=address, process=process):
            await fleet.until_ready("worker-1")
            (seen,) = fleet.pool.workers
            assert seen.process_watch is not None
            tell = seen.process_watch._ended
        async with FakeWorker(elsewhere, "worker-2", address=address, epoch="epoch-2"):
            await fleet.until_ready("worker-2")
            epoch = seen.epoch
            tell()
            burials = [t for t in fleet.pool._tasks if t.get_name() == "end of a worker"]
            assert burials
            await within(asyncio.gather(*burials))
            assert seen.ready and seen.epoch == epoch


@pytest.mark.parametrize("notice", ["connection", "process"])
async def test_what_a_worker_said_before_its_end_is_used(
    registry: Registry, other_process: subprocess.Popen[bytes], notice: str
) -> None:
    """Also by a frontend that was too busy to listen until then."""
    start_time = process_start_time(other_process.pid)
    assert start_time is not None
    tokens = 3 * MESSAGES_AT_ONCE
    async with Fleet(registry) as fleet:
        worker = await fleet.start(process=(other_process.pid, start_time))
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r", max_tokens=tokens))
        await within(worker.engine.added.get())
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
    registry: Registry, other_process: subprocess.Popen[bytes], stopped: bool
) -> None:
    start_time = process_start_time(other_process.pid)
    assert start_time is not None
    if stopped:
        other_process.send_signal(signal.SIGSTOP)
    await eventually(lambda: not wants_to_run(other_process.pid))
    async with Fleet(registry) as fleet:
        await fleet.start(process=(other_process.pid, start_time))
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


DIFFERENT: dict[str, Any] = {
    "protocol": PROTOCOL_VERSION + 1,
    "vllm_version": "0.31.0",
    "model": "other",
    "revision": "other",
    "dtype": "bfloat16",
    "block_size": 32,
    "hash_algorithm": "xxhash_cbor",
    "root_hash": "00" * 32,
    "max_model_len": 4096,
    "encoder_cache_tokens": 1,
    "mm_device_do_normalize": False,
    "mm_processor_kwargs": '{"max_pixels": 1}',
    "lora": "{}",
    "reasoning_parser": "qwen3",
    "identity_seed_fingerprint": "other",
}


@pytest.mark.parametrize("field", DIFFERENT)
async def test_a_worker_unlike_the_first_is_refused_by_name_of_what_differs(
    registry: Registry, field: str
) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start("first")
        # It takes this frontend whatever its seed: who refuses here is the frontend.
        second = await fleet.introduce("second", facts=make_facts(**{field: DIFFERENT[field]}))
        second.inbox._seed_fingerprint = ""
        await eventually(lambda: refusal_of(fleet, "second"))
        assert f"its {field} is" in refusal_of(fleet, "second")
        assert set(fleet.pool.ready_workers()) == {"first"}


@pytest.mark.parametrize("field", ["num_kv_blocks", "max_num_seqs", "max_num_batched_tokens"])
async def test_workers_may_differ_in_size(registry: Registry, field: str) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start("first")
        await fleet.start("second", facts=make_facts(**{field: 7}))


async def test_a_worker_unlike_the_frontends_settings_is_refused(registry: Registry) -> None:
    async with Fleet(registry, expected={"dtype": "float32", "model": "mine"}) as fleet:
        await fleet.introduce("worker-1")
        await eventually(lambda: refusal_of(fleet, "worker-1"))
        assert refusal_of(fleet, "worker-1") == (
            "its model is 'demo', this frontend's is 'mine'"
        )
        assert not fleet.learned


async def test_hashes_from_another_root_are_refused(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        await fleet.introduce("worker-1", facts=make_facts(root_hash="00" * 32))
        await eventually(lambda: refusal_of(fleet, "worker-1"))
        assert "PYTHONHASHSEED" in refusal_of(fleet, "worker-1")


async def test_a_worker_that_refuses_the_frontend_gets_no_requests(
    registry: Registry,
) -> None:
    async with Fleet(registry) as fleet:
        facts = make_facts(identity_seed_fingerprint="another")
        await fleet.introduce("worker-1", facts=facts)
        await eventually(lambda: refusal_of(fleet, "worker-1"))
        assert "another image identity seed" in refusal_of(fleet, "worker-1")
        assert not fleet.pool.ready_workers()


async def test_a_refused_worker_is_taken_once_it_comes_back_as_it_should_be(
    registry: Registry,
) -> None:
    wrong = FakeWorker(
        registry, "wrong", address="tcp://127.0.0.1:*", facts=make_facts(model="other")
    )
    wrong.start()
    expected: dict[str, object] = {"model": "demo"}
    async with Fleet(registry, addresses=[wrong.address], expected=expected) as fleet:
        await eventually(lambda: refusal_of(fleet, "wrong"))
        await wrong.stop()
        right = FakeWorker(registry, "right", address=wrong.address, epoch="epoch-2")
        right.start()
        await fleet.until_ready("right")
        assert refusal_of(fleet, "right") == ""
        await right.stop()


@pytest.mark.parametrize("frames", [[*encode(Outputs(), [b"\xc1"])], [b"\xc1"]])
async def test_a_worker_that_sends_nonsense_is_lost_and_greeted_again(
    registry: Registry, frames: list[Frame]
) -> None:
    async with Fleet(registry) as fleet:
        worker = await fleet.start()
        worker.engine.stalled = True
        await fleet.client.add_request_async(make_request("r"))
        await within(worker.engine.added.get())
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


async def test_events_are_listened_to_where_the_worker_was_reached(
    registry: Registry,
) -> None:
    worker = FakeWorker(registry, "everywhere", address="tcp://127.0.0.1:*")
    worker.ready.kv_address = "tcp://0.0.0.0:5999"
    worker.start()
    async with Fleet(registry, addresses=[worker.address]) as fleet:
        await fleet.until_ready("everywhere")
        (seen,) = fleet.pool.workers
        assert seen.kv is not None
        assert seen.kv.address == "tcp://127.0.0.1:5999"
    await worker.stop()


async def test_greetings_that_nobody_reads_do_not_pile_up(registry: Registry) -> None:
    away = FakeWorker(registry, "away", address="tcp://127.0.0.1:*")
    address = away.address
    await away.stop()
    async with Fleet(registry, addresses=[address]) as fleet:
        (worker,) = fleet.pool.workers
        first = worker.link
        for _ in range(GREETINGS):
            fleet.pool._greet(worker)
        assert worker.link is not first
        late = FakeWorker(registry, "late", address=address)
        late.start()
        await fleet.until_ready("late")
        await late.stop()


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

"""A worker's load is told by frontend, when it changes, and ends at nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from tests.fakes import FakeWorker, make_request, within
from tests.workers.lines import Line
from transfer.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    FrontendShare,
    KvDelta,
    LoadReport,
)
from transfer.payload import encode_payload

pytestmark = pytest.mark.anyio


@pytest.fixture
def worker(worker: FakeWorker) -> FakeWorker:
    worker.engine.stalled = True
    return worker


@pytest.fixture
async def lines(worker: FakeWorker) -> AsyncIterator[list[Line]]:
    async with Line(worker, "one") as one, Line(worker, "two") as two:
        await one.greet()
        await two.greet()
        yield [one, two]


async def add(worker: FakeWorker, line: Line, name: str, tokens: int, blocks: int) -> None:
    message = AddRequest(name, prefill_tokens=tokens, blocks=blocks)
    line.say(message, encode_payload(make_request(name)))
    await within(worker.engine.added.get())
    await asyncio.sleep(0)  # the charge is noted behind the request


def published(worker: FakeWorker) -> asyncio.Queue[KvDelta | LoadReport]:
    said: asyncio.Queue[KvDelta | LoadReport] = asyncio.Queue()
    worker.kv_publisher.publish = said.put_nowait  # type: ignore[method-assign]
    return said


async def test_what_each_frontend_has_in_flight_is_told(
    worker: FakeWorker, lines: list[Line]
) -> None:
    one, two = lines
    assert worker.load.report().shares == {}
    await add(worker, one, "a", 100, 4)
    await add(worker, one, "b", 50, 2)
    await add(worker, two, "c", 7, 1)
    assert worker.load.report().shares == {
        "one": FrontendShare(2, 150, 6),
        "two": FrontendShare(1, 7, 1),
    }


async def test_a_first_token_ends_the_prefill_and_the_last_the_request(
    worker: FakeWorker, lines: list[Line]
) -> None:
    one, _ = lines
    await add(worker, one, "a", 100, 4)
    worker.load.note(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [5])]))
    assert worker.load.report().shares == {"one": FrontendShare(1, 0, 4)}
    worker.engine.say("a", 6, finished=True)
    await one.hear_output()
    assert worker.load.report().shares == {}


async def test_an_aborted_request_is_no_load(worker: FakeWorker, lines: list[Line]) -> None:
    one, _ = lines
    await add(worker, one, "a", 100, 4)
    stats = SchedulerStats(num_running_reqs=1, kv_cache_usage=0.04)
    worker.load.note(EngineCoreOutputs(outputs=[], scheduler_stats=stats))
    assert worker.load.report().running == 1
    one.say(AbortRequests(["a"]))
    await within(worker.engine.aborted.get())
    # The engine has nothing more to do, and so says nothing more.
    report = worker.load.report()
    assert (report.shares, report.running, report.kv_blocks) == ({}, 0, 0)


async def test_the_engines_own_figures_are_told(worker: FakeWorker, lines: list[Line]) -> None:
    await add(worker, lines[0], "a", 100, 4)
    stats = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25
    )
    worker.load.note(EngineCoreOutputs(outputs=[], scheduler_stats=stats))
    report = worker.load.report()
    # Of the 100 blocks that it has.
    assert (report.running, report.waiting, report.kv_blocks) == (3, 3, 25)


async def test_a_report_states_how_far_the_deltas_have_come(worker: FakeWorker) -> None:
    worker.hold([b"a" * 32])
    worker.hold([b"b" * 32])
    report = worker.load.report()
    assert (report.epoch, report.seq) == ("epoch-1", 2)


@pytest.mark.parametrize(
    ("method", "resets"),
    [("reset_encoder_cache", 1), ("reset_mm_cache", 1), ("sleep", 1), ("is_sleeping", 0)],
)
async def test_an_engine_told_to_forget_images_says_so(
    worker: FakeWorker, lines: list[Line], method: str, resets: int
) -> None:
    lines[0].say(Call(1, method), encode_payload([]))
    await lines[0].hear(CallResult)
    assert worker.load.report().encoder_resets == resets


async def test_changes_are_told_at_once_and_the_rest_once_a_second(
    worker: FakeWorker, lines: list[Line]
) -> None:
    said = published(worker)
    loop = asyncio.get_running_loop()
    steady = [await within(said.get())]
    began = loop.time()
    steady.append(await within(said.get()))
    assert steady[0] == steady[1]
    assert loop.time() - began > 0.5
    await add(worker, lines[0], "a", 100, 4)
    began = loop.time()
    changed = await within(said.get())
    assert isinstance(changed, LoadReport)
    assert changed.shares == {"one": FrontendShare(1, 100, 4)}
    assert loop.time() - began < 0.5

"""What an engine says reaches whom it concerns; aborts are confirmed when it is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from vllm import envs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from frontend.parked_requests import PARK_SECONDS
from tests.fakes import FakeWorker, make_request, within
from tests.workers.lines import Line
from transfer.messages import AbortRequests, Call, CallResult, Outputs, Ping, Pong, Released
from transfer.payload import decode_outputs, encode_payload
from workers import outbox
from workers.frontends import SILENT_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
def worker(worker: FakeWorker) -> FakeWorker:
    worker.engine.stalled = True
    return worker


@pytest.fixture
async def lines(worker: FakeWorker) -> AsyncIterator[list[Line]]:
    async with Line(worker, "frontend-1") as one, Line(worker, "frontend-2") as two:
        await one.greet()
        await two.greet()
        yield [one, two]


async def running(worker: FakeWorker, line: Line, *request_ids: str) -> None:
    for request_id in request_ids:
        line.add(make_request(request_id))
        await within(worker.engine.added.get())


async def test_a_batch_is_split_by_owner(worker: FakeWorker, lines: list[Line]) -> None:
    one, two = lines
    await running(worker, one, "a", "b")
    await running(worker, two, "c")
    batch = EngineCoreOutputs(
        outputs=[EngineCoreOutput(name, [n]) for n, name in enumerate("acbx")],
        scheduler_stats=SchedulerStats(num_running_reqs=3),
        timestamp=1.5,
        weight_version="v",
    )
    worker.engine.put(batch)
    for line, expected in ((one, [("a", [0]), ("b", [2])]), (two, [("c", [1])])):
        _, payload = await line.hear(Outputs)
        outputs = decode_outputs(payload)
        assert [(o.request_id, o.new_token_ids) for o in outputs.outputs] == expected
        assert outputs.scheduler_stats == batch.scheduler_stats
        assert (outputs.timestamp, outputs.weight_version) == (1.5, "v")


async def test_a_finished_request_is_nobodys(worker: FakeWorker, lines: list[Line]) -> None:
    await running(worker, lines[0], "a")
    worker.engine.say("a", 1, finished=True)
    assert (await lines[0].hear_output()).finish_reason is FinishReason.LENGTH
    assert worker.frontends.owner("a") is None
    frontend = worker.frontends.get("frontend-1")
    assert frontend is not None and not frontend.requests


async def test_an_abort_is_confirmed_only_when_the_step_is_over(
    worker: FakeWorker, lines: list[Line]
) -> None:
    line = lines[0]
    await running(worker, line, "a")
    worker.engine.step_over.clear()
    line.say(AbortRequests(["a"]))
    assert await within(worker.engine.aborted.get()) == ["a"]
    # Not before what is said later:
    line.say(Ping())
    await line.hear(Pong)
    worker.engine.step_over.set()
    released, _ = await line.hear(Released)
    assert released.request_ids == ["a"]


async def test_one_question_serves_all_aborts_so_far(
    worker: FakeWorker, lines: list[Line]
) -> None:
    one, two = lines
    await running(worker, one, "a", "b", "c")
    await running(worker, two, "d")
    asked = 0
    ask = worker.engine.collective_rpc_async

    async def counted(method: str, *args: object, **kwargs: object) -> list[object]:
        nonlocal asked
        asked += method == "synchronize_device"
        return await ask(method, *args, **kwargs)  # type: ignore[arg-type]

    worker.engine.collective_rpc_async = counted  # type: ignore[assignment]
    worker.engine.step_over.clear()
    one.say(AbortRequests(["a"]))
    await within(worker.engine.aborted.get())
    two.say(AbortRequests(["d"]))
    one.say(AbortRequests(["b", "c"]))
    for _ in range(2):
        await within(worker.engine.aborted.get())
    worker.engine.step_over.set()
    assert (await one.hear(Released))[0].request_ids == ["a"]
    assert (await one.hear(Released))[0].request_ids == ["b", "c"]
    assert (await two.hear(Released))[0].request_ids == ["d"]
    assert asked == 2


async def test_what_ended_by_itself_is_confirmed_too(
    worker: FakeWorker, lines: list[Line]
) -> None:
    line = lines[0]
    await running(worker, line, "a")
    worker.engine.say("a", 1, finished=True)
    await line.hear_output()
    line.say(AbortRequests(["a", "never"]))
    assert (await line.hear(Released))[0].request_ids == ["a", "never"]
    assert await within(worker.engine.aborted.get()) == []


async def test_nothing_more_is_said_of_an_aborted_request(
    worker: FakeWorker, lines: list[Line]
) -> None:
    line = lines[0]
    await running(worker, line, "a", "b")
    line.say(AbortRequests(["a"]))
    await line.hear(Released)
    worker.engine.say("a", 1, finished=True)
    worker.engine.say("b", 2)
    assert (await line.hear_output()).request_id == "b"


async def test_a_frontend_cannot_abort_anothers_request(
    worker: FakeWorker, lines: list[Line]
) -> None:
    one, two = lines
    await running(worker, one, "a")
    two.say(AbortRequests(["a"]))
    await two.hear(Released)
    assert await within(worker.engine.aborted.get()) == []
    worker.engine.say("a", 1)
    assert (await one.hear_output()).new_token_ids == [1]


async def test_an_engine_that_does_not_answer_counts_as_dead(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.outbox.RELEASE_SECONDS", 0.01)
    worker.engine.step_over.clear()
    with pytest.raises(EngineDeadError):
        await within(worker.outbox.engine_is_past())
    worker.engine.step_over.set()


async def test_the_end_of_the_engine_ends_the_outbox(worker: FakeWorker) -> None:
    sending = next(t for t in worker._tasks if "follow" in repr(t))
    worker.engine.die()
    with pytest.raises(EngineDeadError):
        await within(asyncio.shield(sending))
    with pytest.raises(EngineDeadError):
        await within(worker.outbox.engine_is_past())


async def test_an_engine_that_is_stuck_over_requests_is_taken_for_dead(
    worker: FakeWorker, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.outbox.STUCK_SECONDS", 0.01)
    monkeypatch.setattr("workers.outbox.ASKED_SECONDS", 0.01)
    worker.engine.step_over.clear()
    watching = asyncio.ensure_future(worker.outbox.watch_engine())
    with pytest.raises(TimeoutError):
        await within(asyncio.shield(watching), 0.1)  # it has nothing to do
    await running(worker, lines[0], "a")
    with pytest.raises(EngineDeadError):
        await within(watching)


async def test_an_engine_that_gives_up_its_requests_unasked_has_died(
    worker: FakeWorker, lines: list[Line]
) -> None:
    await running(worker, lines[0], "a")
    given_up = EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)
    with pytest.raises(EngineDeadError):
        worker.outbox.deliver(EngineCoreOutputs(outputs=[given_up]))
    # Its frontend is not told that it has been aborted: it sends the request elsewhere.
    lines[0].say(Ping())
    await lines[0].hear(Pong)


async def test_requests_that_a_frontend_has_had_given_up_are_told_so(
    worker: FakeWorker, lines: list[Line]
) -> None:
    await running(worker, lines[0], "a")
    lines[0].say(Call(1, "pause_scheduler"), encode_payload(["abort", True]))
    await lines[0].hear(CallResult)
    worker.engine.put(
        EngineCoreOutputs(
            outputs=[EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)]
        )
    )
    assert (await lines[0].hear_output()).finish_reason is FinishReason.ABORT


def test_an_abort_waits_as_long_as_vllm_lets_a_step_take() -> None:
    assert outbox.RELEASE_SECONDS >= envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    # What a lost worker may be reading stays until it has given up.
    assert SILENT_SECONDS + outbox.RELEASE_SECONDS < PARK_SECONDS

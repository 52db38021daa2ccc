"""Calls that vLLM makes of its engine reach every worker, also those that come later."""

from __future__ import annotations

import asyncio

import pytest
from vllm.lora.request import LoRARequest

from frontend.adapters import fleet_number
from tests.fakes import FakeWorker, eventually, make_facts, within
from tests.frontend.fleets import Fleet
from transfer.errors import BadMessage
from transfer.messages import CallResult

pytestmark = pytest.mark.anyio


@pytest.fixture
async def workers(fleet: Fleet) -> list[FakeWorker]:
    return [await fleet.start(f"worker-{i}") for i in range(2)]


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, f"/adapters/{number}")


async def called(worker: FakeWorker) -> tuple[object, ...]:
    return await within(worker.engine.called.get())


async def test_a_call_goes_to_all_workers_with_its_arguments(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    for worker in workers:
        worker.engine.answers["reset_prefix_cache"] = True
    assert await within(fleet.client.reset_prefix_cache_async(True, False))
    for worker in workers:
        assert await called(worker) == ("reset_prefix_cache", True, False)
    await eventually(fleet.at_rest)


@pytest.mark.parametrize(
    ("method", "arguments", "told"),
    [
        ("reset_encoder_cache_async", (), True),
        ("sleep_async", (1, "abort"), True),
        ("sleep_async", (0, "abort"), False),
        ("pause_scheduler_async", ("abort", True), True),
        ("pause_scheduler_async", ("keep", False), False),
        ("reset_prefix_cache_async", (), False),
    ],
)
async def test_encode_workers_are_told_to_forget_and_nothing_else(
    fleet: Fleet, workers: list[FakeWorker], method: str, arguments: tuple[object, ...],
    told: bool,
) -> None:
    encoder = await fleet.introduce("encoder-1", facts=make_facts(role="encode"))
    await eventually(fleet.pool.encode_workers)
    await within(getattr(fleet.client, method)(*arguments))
    for worker in workers:
        assert (await called(worker))[1:] == arguments or not arguments
    if told:
        assert await called(encoder) == ("reset_encoder_cache",)
    assert encoder.engine.called.empty()
    await eventually(fleet.at_rest)


async def test_all_must_have_done_it(fleet: Fleet, workers: list[FakeWorker]) -> None:
    workers[0].engine.answers["wake_up"] = True
    workers[1].engine.answers["wake_up"] = False
    assert not await within(fleet.client.wake_up_async(["weights"]))
    workers[1].engine.answers["is_sleeping"] = True
    assert await within(fleet.client.is_sleeping_async())


async def test_what_a_worker_raises_is_the_answer(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    workers[1].engine.answers["sleep"] = ValueError("too tired")
    with pytest.raises(RuntimeError, match="sleep: too tired"):
        await within(fleet.client.sleep_async())
    # The line to it still works.
    await within(fleet.client.reset_mm_cache_async())


async def test_results_of_all_workers_are_put_together(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    for number, worker in enumerate(workers):
        worker.engine.answers["collective_rpc"] = [number, [number]]
    results = await within(fleet.client.collective_rpc_async("reset_weights", args=(1,)))
    assert sorted(results, key=str) == [0, 1, [0], [1]]
    assert (await called(workers[0]))[1:] == ("reset_weights", None, [1], None)


async def test_only_methods_with_a_name_can_be_called(fleet: Fleet) -> None:
    with pytest.raises(TypeError, match="name of a method"):
        await fleet.client.collective_rpc_async(lambda worker: worker)


async def test_workers_that_disagree_about_their_weights_are_reported(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    for worker in workers:
        worker.engine.answers["get_weight_version"] = "one"
    assert await within(fleet.client.get_weight_version_async()) == "one"
    workers[1].engine.answers["get_weight_version"] = "two"
    with pytest.raises(RuntimeError, match="different weight versions"):
        await within(fleet.client.get_weight_version_async())


async def test_adapters_are_given_to_workers_that_come_later(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    for worker in workers:
        worker.engine.answers["add_lora"] = True
    for number in (1, 2, 3):
        assert await within(fleet.client.add_lora_async(adapter(number)))
    await within(fleet.client.remove_lora_async(2))
    assert await fleet.client.list_loras_async() == {1, 3}
    late = await fleet.start("worker-late")
    given = [await called(late), await called(late)]
    assert [(method, lora[:2]) for method, lora in given] == [
        ("add_lora", ["adapter-1", fleet_number(adapter(1))]),
        ("add_lora", ["adapter-3", fleet_number(adapter(3))]),
    ]
    assert late.engine.called.empty()


async def test_workers_know_an_adapter_by_the_number_of_the_fleet(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    for method in ("add_lora", "pin_lora", "remove_lora"):
        for worker in workers:
            worker.engine.answers[method] = True
    number = fleet_number(adapter(7))
    assert await within(fleet.client.add_lora_async(adapter(7)))
    assert await within(fleet.client.pin_lora_async(7))
    assert await within(fleet.client.remove_lora_async(7))
    for worker in workers:
        method, lora = await called(worker)
        assert (method, lora[1]) == ("add_lora", number)  # type: ignore[index]
        assert await called(worker) == ("pin_lora", number)
        assert await called(worker) == ("remove_lora", number)
    assert not await within(fleet.client.remove_lora_async(7))
    assert not await within(fleet.client.pin_lora_async(8))


async def test_an_adapter_added_while_a_worker_is_brought_up_to_date_is_not_missed(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    await within(fleet.client.add_lora_async(adapter(1)))
    late = await fleet.introduce("worker-late")
    late.engine.answers["add_lora"] = True
    adding = asyncio.Event()
    answer = late.engine.call_utility_async

    async def slow_call(method: str, *args: object) -> object:
        if not adding.is_set():
            adding.set()
            await within(fleet.client.add_lora_async(adapter(2)))
        return await answer(method, *args)

    late.engine.call_utility_async = slow_call  # type: ignore[method-assign]
    await fleet.until_ready("worker-late")
    given = [await called(late), await called(late)]
    assert [lora[0] for _, lora in given] == ["adapter-1", "adapter-2"]


def never_answering(worker: FakeWorker) -> asyncio.Event:
    """Have a worker's engine answer no call; returns what is set when one has come."""
    reached = asyncio.Event()

    async def no_answer(method: str, *args: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    worker.engine.call_utility_async = no_answer  # type: ignore[method-assign]
    return reached


async def test_a_call_to_a_worker_that_is_lost_fails(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    reached = never_answering(workers[1])
    calling = asyncio.ensure_future(fleet.client.reset_encoder_cache_async())
    await within(reached.wait())
    await workers[1].leave()
    with pytest.raises(ConnectionError, match="worker-1 was lost"):
        await within(calling)
    await eventually(fleet.at_rest)


async def test_an_answer_that_does_not_decode_fails_its_call_alone(
    fleet: Fleet, workers: list[FakeWorker]
) -> None:
    reached = never_answering(workers[1])
    calling = asyncio.ensure_future(fleet.client.reset_mm_cache_async())
    await within(reached.wait())
    (call_id,) = [i for i, (name, _) in fleet.client._calls.items() if name == "worker-1"]
    workers[1].link.send("frontend-1", CallResult(call_id), [b"\xc1"])
    with pytest.raises(BadMessage):
        await within(calling)
    assert set(fleet.pool.ready_workers()) == {"worker-0", "worker-1"}


async def test_an_answer_nobody_waits_for_is_dropped(fleet: Fleet) -> None:
    worker = await fleet.start()
    worker.link.send("frontend-1", CallResult(12345))
    await within(fleet.client.reset_mm_cache_async())

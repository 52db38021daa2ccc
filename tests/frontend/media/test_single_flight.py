from __future__ import annotations

import asyncio

import pytest

from frontend.media.single_flight import SingleFlight

pytestmark = pytest.mark.anyio


class Work:
    """Ends when told to; knows how often it was started and cancelled."""

    def __init__(self) -> None:
        self.started = self.cancelled = 0
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.started += 1
        try:
            return await asyncio.shield(self.result)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def ask(flights: SingleFlight[str, str], key: str, work: Work) -> asyncio.Task[str]:
    return asyncio.create_task(flights.do(key, work))


async def test_many_who_ask_at_once_share_one_result() -> None:
    flights, work = SingleFlight[str, str](), Work()
    asked = [ask(flights, "a", work) for _ in range(64)]
    await settled()
    work.result.set_result("done")
    assert await asyncio.gather(*asked) == ["done"] * 64
    assert work.started == 1
    assert len(flights) == 0


async def test_keys_do_not_share() -> None:
    flights, one, other = SingleFlight[str, str](), Work(), Work()
    asked = [ask(flights, "a", one), ask(flights, "b", other)]
    one.result.set_result("one")
    other.result.set_result("other")
    assert await asyncio.gather(*asked) == ["one", "other"]


async def test_an_error_goes_to_all_and_is_not_kept() -> None:
    flights, work = SingleFlight[str, str](), Work()
    asked = [ask(flights, "a", work) for _ in range(3)]
    await settled()
    work.result.set_exception(ValueError("broken"))
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(result) for result in results] == ["broken"] * 3
    again = Work()
    again.result.set_result("done")
    assert await flights.do("a", again) == "done"


async def test_who_leaves_does_not_disturb_the_others() -> None:
    flights, work = SingleFlight[str, str](), Work()
    first, second = ask(flights, "a", work), ask(flights, "a", work)
    await settled()
    first.cancel()
    await settled()
    assert first.cancelled()
    work.result.set_result("done")
    assert await second == "done"
    assert work.cancelled == 0


async def test_when_all_have_left_the_work_is_cancelled() -> None:
    flights, work = SingleFlight[str, str](), Work()
    asked = [ask(flights, "a", work) for _ in range(2)]
    await settled()
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await settled()
    assert work.cancelled == 1
    assert len(flights) == 0


async def test_work_that_is_being_cancelled_is_not_joined() -> None:
    flights, slow = SingleFlight[str, str](), asyncio.Event()

    async def slow_to_end() -> str:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            await slow.wait()

    leaving = asyncio.create_task(flights.do("a", slow_to_end))
    await settled()
    leaving.cancel()
    await settled()
    work = Work()
    work.result.set_result("done")
    assert await flights.do("a", work) == "done"
    slow.set()
    await settled()

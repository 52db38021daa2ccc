"""Large bodies take turns."""

from __future__ import annotations

import asyncio

import pytest

from frontend.large_bodies import LargeBodies, Turn
from tests.fakes import eventually, within

pytestmark = pytest.mark.anyio


async def test_turns_are_given_in_order() -> None:
    bodies = LargeBodies(at_a_time=2, most_seconds=60)
    first, second = await within(bodies.turn()), await within(bodies.turn())
    begun: list[int] = []

    async def begin(number: int) -> Turn:
        turn = await bodies.turn()
        begun.append(number)
        return turn

    waiting = [asyncio.create_task(begin(number)) for number in range(3)]
    await eventually(lambda: bodies.waiting == 3)
    assert begun == []
    second.end()
    await within(waiting[0])
    first.end()
    await within(waiting[1])
    assert (begun, bodies.waiting) == ([0, 1], 1)
    waiting[0].result().end()
    waiting[0].result().end()  # no turn ends twice
    await within(waiting[2])
    with pytest.raises(TimeoutError):
        await within(bodies.turn(), 0.01)
    assert bodies.waiting == 0


async def test_who_is_slow_keeps_nobody_waiting() -> None:
    bodies = LargeBodies(at_a_time=1, most_seconds=0.01)
    slow = await within(bodies.turn())
    next_one = await within(bodies.turn())
    slow.end()  # of a turn that another has by now
    waiting = asyncio.create_task(bodies.turn())
    await eventually(lambda: bodies.waiting == 1)
    next_one.end()
    (await within(waiting)).end()


async def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    bodies = LargeBodies(at_a_time=1, most_seconds=60)
    turn = await within(bodies.turn())
    gone = asyncio.create_task(bodies.turn())
    await eventually(lambda: bodies.waiting == 1)
    gone.cancel()
    next_one = asyncio.create_task(bodies.turn())
    turn.end()
    (await within(next_one)).end()
    assert bodies.waiting == 0

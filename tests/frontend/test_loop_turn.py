from __future__ import annotations

import asyncio
import time

import pytest

from frontend.loop_turn import LoopTurn

pytestmark = pytest.mark.anyio


def spend(turn: LoopTurn, seconds: float) -> None:
    turn.spend()
    time.sleep(seconds)


async def test_there_is_time_until_it_is_spent() -> None:
    turn = LoopTurn(0.05)
    assert turn.has_time()
    spend(turn, 0.0)
    assert turn.has_time()
    spend(turn, 0.06)
    assert not turn.has_time()


async def test_many_small_pieces_add_up() -> None:
    turn = LoopTurn(0.05)
    pieces = 0
    while turn.has_time():
        spend(turn, 0.01)
        pieces += 1
    assert pieces <= 5


async def test_tasks_that_are_ready_share_a_turn() -> None:
    turn = LoopTurn(0.002)
    had_time = []

    async def work() -> None:
        had_time.append(turn.has_time())
        if had_time[-1]:
            spend(turn, 0.003)

    await asyncio.gather(*(work() for _ in range(5)))
    assert had_time == [True, False, False, False, False]


async def test_the_next_turn_has_time_again() -> None:
    turn = LoopTurn(0.002)
    for _ in range(3):
        spend(turn, 0.003)
        assert not turn.has_time()
        await asyncio.sleep(0)
        assert turn.has_time()


async def test_what_else_is_done_meanwhile_counts() -> None:
    turn = LoopTurn(0.002)
    time.sleep(0.003)
    assert turn.has_time()  # nothing has been done at once yet
    spend(turn, 0.0)
    time.sleep(0.003)
    assert not turn.has_time()


def test_a_turn_that_its_loop_did_not_end_is_over_with_it() -> None:
    turn = LoopTurn(0.002)

    async def use_up() -> bool:
        had_time = turn.has_time()
        spend(turn, 0.003)
        asyncio.get_running_loop().stop()  # before the turn ends
        return had_time

    for _ in range(2):
        loop = asyncio.new_event_loop()
        task = loop.create_task(use_up())
        loop.run_forever()
        assert task.result()
        loop.close()

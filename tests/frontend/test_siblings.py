"""Frontend processes of one port ask each other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from frontend.siblings import Siblings, meeting_place

pytestmark = pytest.mark.anyio


async def test_each_has_a_number_and_answers_the_others(tmp_path: Path) -> None:
    three = [Siblings(tmp_path) for _ in range(3)]
    assert [each.number for each in three] == [0, 1, 2]
    for each in three:

        async def answer(question: str, number: int = each.number) -> bytes:
            return f"{number} heard {question}".encode()

        await each.serve(answer)
    assert await three[0].ask_all("this") == {1: b"1 heard this", 2: b"2 heard this"}
    assert await three[2].ask(0, "that") == b"0 heard that"
    for each in three:
        each.close()
    assert not list(tmp_path.glob("*.sock"))


async def test_a_number_is_taken_over_by_the_next(tmp_path: Path) -> None:
    first, second = Siblings(tmp_path), Siblings(tmp_path)
    first.close()
    third = Siblings(tmp_path)
    assert (second.number, third.number) == (1, 0)
    second.close()
    third.close()


async def test_one_that_died_or_fails_is_left_out(tmp_path: Path) -> None:
    asking, failing = Siblings(tmp_path), Siblings(tmp_path)

    async def fail(question: str) -> bytes:
        raise ValueError("no such question")

    await failing.serve(fail)
    (tmp_path / "7.sock").touch()  # as a killed process leaves it
    assert await asking.ask_all("anything") == {1: b""}
    failing.close()
    asking.close()


async def test_one_that_is_silent_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.siblings.ANSWER_SECONDS", 0.05)
    asking, silent = Siblings(tmp_path), Siblings(tmp_path)

    async def never(question: str) -> bytes:
        await asyncio.Event().wait()
        return b""

    await silent.serve(never)
    answers = await asking.ask_all("anything")
    assert not answers.get(1)
    silent.close()
    asking.close()


async def test_alone_there_is_nobody_to_ask() -> None:
    alone = Siblings(None)
    assert (alone.number, await alone.ask_all("anything")) == (0, {})
    alone.close()


def test_where_they_meet_is_private_and_what_a_killed_one_left_is_removed(
    tmp_path: Path,
) -> None:
    nobody = 2**22 + 1  # above the highest process id
    (tmp_path / f"foveal-frontends-{nobody}-abc").mkdir()
    (tmp_path / f"foveal-frontends-{os.getpid()}-abc").mkdir()
    with meeting_place(tmp_path) as place:
        assert place.stat().st_mode & 0o777 == 0o700
        (place / "0.sock").touch()
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {f"foveal-frontends-{os.getpid()}-abc", place.name}
    assert not place.exists()

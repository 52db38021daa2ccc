"""A frontend is told when it is read from, no longer than it must know."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import eventually, within
from transfer.messages import Pulling
from transfer.tensor_ref import ArenaId, RemoteArena
from workers import nixl_source
from workers.nixl_source import ANNOUNCED_SECONDS, NixlSource

pytestmark = pytest.mark.anyio

ARENA = RemoteArena(ArenaId("foveal-1-2-ab", b"n" * 16), "agent", b"", 0, 4096)


@pytest.fixture
def said() -> list[Pulling]:
    return []


@pytest.fixture
def source(said: list[Pulling]) -> NixlSource:
    return NixlSource(ARENA, said.append)


async def test_the_first_begins_and_the_last_ends(
    source: NixlSource, said: list[Pulling]
) -> None:
    with source.reading() as one:
        with source.reading() as other:
            other.pulls, other.nbytes = 1, 100
        one.failures = 1
        assert said == [Pulling(ANNOUNCED_SECONDS)]
    assert said[1:] == [Pulling(0.0, pulls=1, nbytes=100, failures=1)]


async def test_what_was_told_is_not_told_again(
    source: NixlSource, said: list[Pulling]
) -> None:
    for _ in range(2):
        with source.reading() as outcome:
            outcome.pulls = 1
    assert [news.pulls for news in said] == [0, 1, 0, 1]


async def test_a_read_that_raises_has_ended_too(
    source: NixlSource, said: list[Pulling]
) -> None:
    with pytest.raises(ValueError), source.reading():
        raise ValueError
    assert said[-1].seconds == 0.0


async def test_a_long_read_is_announced_again(
    source: NixlSource, said: list[Pulling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_source, "ANNOUNCED_SECONDS", 0.02)
    with source.reading():
        await eventually(lambda: len(said) >= 3)
    assert all(news.seconds == 0.02 for news in said[:-1])
    count = len(said)
    await asyncio.sleep(0.05)
    assert len(said) == count


async def test_a_frontend_that_has_gone_is_told_nothing(
    source: NixlSource, said: list[Pulling]
) -> None:
    with source.reading():
        said.clear()
        source.close()
    assert said == []


async def test_a_failure_is_told_once_to_whoever_waits(source: NixlSource) -> None:
    source.fail("before it worked")
    waiting = asyncio.create_task(source.failure())
    await asyncio.sleep(0)
    assert not waiting.done()
    source.works = True
    source.fail("gone")
    source.fail("gone once more")
    assert await within(waiting) == "gone"
    assert not source.works

"""Requests that wait for their tensors, whatever comes of those."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from frontend.arena_cache import ArenaProcessorCache
from frontend.request_items import identify
from tests.fakes import HASHER, FakeEngine, make_item, make_request, within
from transfer.arena import Arena
from transfer.leases import Lease
from transfer.tensor_ref import ArenaId, EntryRef, RemoteArena
from workers.engine_inputs import EngineInputs
from workers.frontends import Frontend, Frontends
from workers.nixl_source import NixlSource
from workers.tensor_cache import Pull, TensorCache
from workers.waiting_requests import WaitingRequests

pytestmark = pytest.mark.anyio


class Broken(TensorCache):
    """Finds nothing, and fails as nobody foresaw."""

    def __init__(self) -> None:
        pass

    def find(self, entry: EntryRef) -> Lease | None:
        return None

    def pull(self, source: NixlSource, entry: EntryRef) -> Pull:
        task: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        return Pull(entry, source, cast("asyncio.Task[Lease]", task))

    async def wait(self, pulls: Sequence[Pull]) -> list[Lease]:
        raise RuntimeError("unforeseen")


async def test_the_sender_hears_of_a_failure_that_nobody_foresaw() -> None:
    told: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()

    def missing(frontend: Frontend, request_id: str, part: int, reason: str) -> None:
        told.put_nowait((request_id, part, reason))

    frontends, engine = Frontends(), FakeEngine()
    waiting = WaitingRequests(frontends, cast("EngineInputs", engine), missing)
    frontend = frontends.connect("f", 0.0)
    remote = RemoteArena(ArenaId("a", b"n"), "agent", b"", 0, 0)
    frontend.source = NixlSource(remote, lambda _: None)
    with Arena(1 << 16, populate=False) as arena:
        request = make_request("r", items=[make_item(1.0)])
        identify(request, ArenaProcessorCache(arena, HASHER, "demo"))
        assert frontends.begin(frontend, "r")
        assert waiting.take(frontend, request, 0, Broken())
        request_id, part, reason = await within(told.get())
    assert (request_id, part) == ("r", 0) and "unforeseen" in reason
    assert frontends.num_requests == 0  # it is to come again
    assert engine.added.empty()
    engine.close()

"""What ``GET /v1/fleet`` says."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from frontend.fleet_api import fleet_routes
from tests.frontend.fleets import Fleet
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


async def test_the_fleet_is_shown_as_it_is(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        app = FastAPI()
        app.include_router(fleet_routes(fleet.client))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            shown = (await http.get("/v1/fleet")).json()
            assert shown["router_mode"] == "kv"
            assert (shown["requests"], shown["workers"]) == (0, [])
            assert shown["arena"]["bytes_total"] == 1 << 20
            assert shown["arena"]["items_without_room"] == 0

            worker = await fleet.start()
            await fleet.hold_request(worker)
            shown = (await http.get("/v1/fleet")).json()
        assert shown["requests"] == 1
        (only,) = shown["workers"]
        assert only["id"] == "worker-1"
        assert only["address"] == worker.address
        assert (only["ready"], only["refused"], only["requests"]) == (True, None, 1)
        assert (only["transfer"], only["transfer_reason"]) == (
            "shm",
            "the worker sees the segment",
        )
        assert only["facts"] == msgspec.to_builtins(worker.facts)
        assert only["kv_seq"] == 0

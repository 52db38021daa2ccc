"""What the dashboard is told of a frontend."""

from __future__ import annotations

import json

import pytest

from frontend.dashboard import state as state_module
from frontend.dashboard.state import FrontendState
from frontend.receipt import Receipt, current_receipt
from tests.fakes import make_item, make_request
from tests.frontend.fleets import Fleet
from transfer.registry import Registry

pytestmark = pytest.mark.anyio


async def test_workers_and_requests_are_described(registry: Registry) -> None:
    async with Fleet(registry) as fleet:
        for name in ("worker-1", "worker-2"):
            await fleet.start(name)
        state = FrontendState(fleet.client, 3, thumbnails=True)
        token = current_receipt.set(Receipt(pictures=[b"one", b"two"]))
        await fleet.client.add_request_async(make_request("r", items=[make_item(1.0)]))
        current_receipt.reset(token)
        await fleet.answer("r")
        told = json.loads(state.encoded())
        assert (told["frontend"], told["router_mode"], told["thumbnails"]) == (3, "kv", True)
        assert [w["id"] for w in told["workers"]] == ["worker-1", "worker-2"]
        assert told["workers"][0]["facts"]["num_kv_blocks"] == 100
        assert "root_hash" not in told["workers"][0]["facts"]
        (request,) = told["log"]
        assert (request["outcome"], request["transfer"]) == ("length", "shm")
        assert request["items"] == 1
        assert request["pictures"] == 2
        assert state.picture(request["number"], 1) == b"two"
        assert state.picture(request["number"], 2) is None
        assert state.picture(request["number"] + 1, 0) is None
        (other,) = request["alternatives"]
        assert {other["worker"], request["worker"]} == {"worker-1", "worker-2"}
        assert other["cost"] >= request["cost"]


async def test_it_is_not_put_together_for_each_who_asks(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Fleet(registry) as fleet:
        await fleet.start()
        state = FrontendState(fleet.client, 0, thumbnails=False)
        before = state.encoded()
        await fleet.client.add_request_async(make_request("r"))
        assert state.encoded() is before
        monkeypatch.setattr(state_module, "FRESH_SECONDS", 0.0)
        assert len(json.loads(state.encoded())["log"]) == 1

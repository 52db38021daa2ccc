"""``GET /v1/fleet``: the workers, and how tensors reach them.

With ``?check=true`` each worker is also asked which blocks it holds, and that is compared
with the index: a diagnosis, not a thing to do every second.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from frontend.engine_client import RoutedEngineClient


def fleet_routes(client: RoutedEngineClient) -> APIRouter:
    """Routes that show the fleet of ``client``."""
    routes = APIRouter()

    @routes.get("/v1/fleet")
    async def fleet(check: bool = False) -> dict[str, Any]:
        described = client.describe()
        if check:
            found = await client.check_index()
            for worker in described["workers"]:
                worker["index"] = found.get(worker["id"])
        return described

    return routes

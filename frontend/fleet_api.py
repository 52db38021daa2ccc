"""``GET /v1/fleet``: the workers, and how tensors reach them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from frontend.engine_client import RoutedEngineClient


def fleet_routes(client: RoutedEngineClient) -> APIRouter:
    """Routes that show the fleet of ``client``."""
    routes = APIRouter()

    @routes.get("/v1/fleet")
    async def fleet() -> dict[str, Any]:
        return client.describe()

    return routes

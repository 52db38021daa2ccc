"""What this process shows of itself and of its siblings, beside vLLM's endpoints."""

from __future__ import annotations

from fastapi import APIRouter

from configs.schema import FrontendConfig
from frontend.dashboard.routes import Answers, dashboard_routes
from frontend.dashboard.state import FrontendState
from frontend.engine_client import RoutedEngineClient
from frontend.fleet_api import fleet_routes
from frontend.metrics_of_all import QUESTION, metrics_routes, own_metrics
from frontend.siblings import Siblings


async def shown_routes(
    settings: FrontendConfig,
    client: RoutedEngineClient,
    state: FrontendState,
    siblings: Siblings,
) -> APIRouter:
    """Routes for fleet, metrics and dashboard; from now on siblings are answered too."""
    answers = Answers(state, siblings)

    async def answer(question: str) -> bytes:
        if question == QUESTION:
            return own_metrics()
        return await answers.to_sibling(question)

    await siblings.serve(answer)
    routes = APIRouter()
    routes.include_router(fleet_routes(client))
    if settings.frontends > 1:
        routes.include_router(metrics_routes(siblings))
    if settings.dashboard_requests:
        routes.include_router(dashboard_routes(answers))
    return routes

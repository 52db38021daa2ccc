"""Which routes the app has, and in what order."""

from __future__ import annotations

import argparse
from typing import Any, cast

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from vllm.entrypoints.launchers.api_server import entry

from frontend.admission import Admission
from frontend.draining import HttpDrain
from frontend.vllm_seams import BUSIEST, our_app

pytestmark = pytest.mark.anyio


async def test_ours_come_before_vllms_and_the_busiest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def theirs(args: Any) -> FastAPI:
        app = FastAPI()
        for path in ("/a", "/v1/models", *BUSIEST):
            app.post(path)(lambda path=path: {"vllm": path})
        return app

    ours = APIRouter()
    ours.post("/v1/models")(lambda: {"ours": "/v1/models"})
    monkeypatch.setattr(entry, "build_app", theirs)
    args = argparse.Namespace(middleware=["frontend.theirs"])
    with our_app(ours, cast("Admission", None), HttpDrain(1.0)):
        app = entry.__dict__["build_app"](args)
    paths = [getattr(route, "path", "") for route in app.router.routes]
    assert paths[: len(BUSIEST)] == list(BUSIEST)
    assert paths.index("/v1/models") < paths.index("/a")
    assert args.middleware[0] == "frontend.theirs"
    models = next(r for r in app.router.routes if getattr(r, "path", "") == "/v1/models")
    assert isinstance(models, APIRoute)
    assert models.endpoint() == {"ours": "/v1/models"}

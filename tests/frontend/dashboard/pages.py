"""The dashboard's page with made-up data behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response

from frontend.dashboard.routes import Answers, dashboard_routes
from frontend.dashboard.state import FrontendState
from frontend.siblings import Siblings
from tests.browser import until
from tests.e2e.processes import free_port


def a_worker(name: str = "worker-17-a", **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "address": "tcp://10.0.0.1:5000",
        "ready": True,
        "draining": False,
        "refused": None,
        "transfer": "shm",
        "transfer_reason": "the worker sees the segment",
        "requests": 2,
        "load": {"requests": 2, "prefill_tokens": 900, "blocks": 30, "engine_blocks": 40},
        "kv_caught_up": True,
        "kv_seq": 12,
        "kv_behind": 0,
        "facts": {"engine": "vllm", "model": "/models/demo", "num_kv_blocks": 400},
        "reuse": {
            "requests": 5, "prompt_tokens": 1000, "overlap_tokens": 700, "cached_tokens": 600,
        },
        **changes,
    }


def a_request(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "number": number,
        "id": f"chatcmpl-{number}",
        "adapter": "",
        "arrived": time.time() - 5,
        "prompt_tokens": 800,
        "items": 1,
        "pictures": 0,
        "worker": "worker-17-a",
        "transfer": "shm",
        "block_size": 32,
        "overlap_tokens": 480,
        "promised_tokens": 0,
        "cached_tokens": 320,
        "cost": 400.0,
        "alternatives": [
            {
                "worker": "worker-17-b", "cost": 1234.0, "overlap_tokens": 0,
                "promised_tokens": 64, "image_tokens": 252,
            },
        ],
        "decision_seconds": 0.0004,
        "moves": 0,
        "first_token_seconds": 0.0421,
        "seconds": 0.9,
        "outcome": "stop",
        **changes,
    }


def a_frontend(**changes: Any) -> dict[str, Any]:
    return {
        "frontend": 0,
        "now": time.time(),
        "thumbnails": False,
        "process": 4711,
        "router_mode": "kv",
        "requests": 2,
        "arena": {"bytes_used": 3 << 20, "bytes_total": 256 << 20},
        "workers": [a_worker(), a_worker("worker-17-b")],
        "log": [a_request()],
        **changes,
    }


class FakeState:
    """What the page is told."""

    def __init__(self) -> None:
        self.told = a_frontend()
        self.pictures: dict[tuple[int, int], bytes] = {}
        self.asked = 0

    def encoded(self) -> bytes:
        self.asked += 1
        return msgspec.json.encode({**self.told, "now": time.time()})

    def picture(self, number: int, index: int) -> bytes | None:
        return self.pictures.get((number, index))


class Page:
    """A frontend that serves nothing else."""

    def __init__(self) -> None:
        self.state = FakeState()
        self.key = ""
        self.status = 200
        """What requests for data are answered with instead, if it is not 200."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/dashboard"

    @contextmanager
    def running(self) -> Iterator[None]:
        app = FastAPI()
        answers = Answers(cast("FrontendState", self.state), Siblings(None))
        app.include_router(dashboard_routes(answers))

        @app.middleware("http")
        async def guard(request: Request, call_next: Any) -> Response:
            if request.url.path.startswith("/v1"):
                if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                    return Response("{}", 401)
                if self.status != 200:
                    return Response("{}", self.status)
            answer: Response = await call_next(request)
            return answer

        config = uvicorn.Config(app, port=self.port, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            until(lambda: server.started, "the page to be served")
            yield
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)

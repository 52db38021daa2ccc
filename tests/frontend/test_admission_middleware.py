"""Requests as clients send them, to a server that takes only so much."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from frontend.admission import Admission, AdmissionLimits, FleetLoad, let_others_begin
from frontend.admission_middleware import AdmissionMiddleware
from frontend.large_bodies import LARGE_BYTES, LargeBodies
from tests.fakes import eventually, within
from tests.frontend.test_admission import Engine

pytestmark = pytest.mark.anyio

LIMITS = AdmissionLimits(
    request_bytes=1 << 20, requests=2, body_bytes=3 << 19, body_seconds=1.0
)


class Served:
    """A server over TCP, and what came through to the app."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.state.args = type("Args", (), {"log_error_stack": False})
        init_exception_handler(self.app)
        self.app.add_middleware(AdmissionMiddleware)
        self.metrics = CollectorRegistry()
        self.load = FleetLoad()
        self.admission = Admission(LIMITS, Engine(), lambda: self.load, self.metrics)
        self.app.state.admission = self.admission
        self.bodies: list[int] = []
        self.go_on = asyncio.Event()
        self.go_on.set()

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> dict[str, int]:
            body = await request.body()
            self.bodies.append(len(body))
            await self.go_on.wait()
            return {"bytes": len(body)}

        @self.app.post("/v1/sent")
        async def sent(request: Request) -> dict[str, int]:
            self.bodies.append(len(await request.body()))
            let_others_begin()
            await self.go_on.wait()
            return {}

        @self.app.post("/v1/json")
        async def as_json(body: dict[str, Any]) -> dict[str, int]:
            self.bodies.append(len(body))
            return {"keys": len(body)}

        @self.app.post("/v1/stream")
        async def stream() -> StreamingResponse:
            async def chunks() -> AsyncIterator[bytes]:
                yield b"one"
                await self.go_on.wait()
                yield b"two"

            return StreamingResponse(chunks())

        @self.app.post("/sleep")
        @self.app.get("/health")
        async def simple() -> dict[str, int]:
            return {}

        @self.app.post("/busy/{status}")
        async def busy(status: int) -> JSONResponse:
            return JSONResponse({}, status_code=status)

    def refused(self, reason: str) -> float | None:
        return self.metrics.get_sample_value("foveal_http_refused_total", {"reason": reason})


@pytest.fixture
async def served() -> Served:
    return Served()


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    config = uvicorn.Config(served.app, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        serving = asyncio.create_task(server.serve([listening]))
        await eventually(lambda: server.started)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield http
        served.go_on.set()
        server.should_exit = True
        await within(serving)


CHAT = "/v1/chat/completions"


async def test_what_is_within_the_limits_passes(
    served: Served, http: httpx.AsyncClient
) -> None:
    response = await http.post(CHAT, content=b"x" * LIMITS.request_bytes)
    assert response.json() == {"bytes": LIMITS.request_bytes}
    assert "retry-after" not in response.headers
    assert (served.admission.requests, served.admission.body_bytes) == (0, 0)


async def test_a_body_that_says_it_is_too_large_is_not_read(
    served: Served, http: httpx.AsyncClient
) -> None:
    for path in (CHAT, "/v1/json", "/sleep"):
        response = await http.post(path, content=b"x" * (LIMITS.request_bytes + 1))
        assert response.status_code == 413
        assert "--max-request-mb" in response.json()["error"]["message"]
    assert served.bodies == []
    assert served.refused("too large") == 3


async def test_the_answer_comes_before_the_body(http: httpx.AsyncClient) -> None:
    """The head alone is answered: nothing waits for what is refused anyway."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
    )
    assert b" 413 " in await within(reader.readline())
    assert await within(reader.read()) != b""  # and the connection ends
    writer.close()


async def test_a_body_in_chunks_is_refused_when_it_passes_the_limit(
    served: Served, http: httpx.AsyncClient
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)
            await asyncio.sleep(0)

    for path in (CHAT, "/v1/json"):
        try:
            response = await within(http.post(path, content=endless()))
        except httpx.TransportError:
            pass  # it was still sending
        else:
            assert response.status_code == 413, response.text
    assert served.bodies == []
    assert served.refused("too large") == 2
    assert served.admission.body_bytes == 0


async def test_a_body_in_chunks_that_just_passes_the_limit_is_answered_413(
    served: Served, http: httpx.AsyncClient
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 16)

    for path in (CHAT, "/v1/json"):
        response = await http.post(path, content=chunks())
        assert response.status_code == 413, response.text
    assert served.bodies == []


async def test_a_body_that_never_ends_is_given_up(
    served: Served, http: httpx.AsyncClient
) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    sending = asyncio.create_task(http.post(CHAT, content=slow()))
    await eventually(lambda: served.refused("too slow"))
    await eventually(lambda: served.admission.requests == 0)
    sending.cancel()
    await asyncio.wait([sending])
    assert served.bodies == []


async def test_a_full_server_sends_requests_away_and_answers_health(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.go_on.clear()
    waiting = [asyncio.create_task(http.post(CHAT, content=b"x")) for _ in range(2)]
    await eventually(lambda: len(served.bodies) == 2)
    response = await http.post(CHAT, content=b"x" * 1000)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert "try again later" in response.json()["error"]["message"]
    assert len(served.bodies) == 2
    assert served.refused("requests") == 1
    for allowed in (http.get("/health"), http.post("/sleep")):
        assert (await allowed).status_code == 200
    served.go_on.set()
    assert {(await each).status_code for each in waiting} == {200}
    assert (await http.post(CHAT, content=b"x")).status_code == 200


async def test_a_full_fleet_says_429(served: Served, http: httpx.AsyncClient) -> None:
    served.admission.limits = AdmissionLimits(1 << 20, 10, 1 << 20, 1.0, requests_per_worker=1)
    served.load = FleetLoad(1, requests=1)
    response = await http.post(CHAT, content=b"x")
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


async def test_bodies_that_are_too_much_together_are_sent_away(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.go_on.clear()
    first = asyncio.create_task(http.post(CHAT, content=b"x" * LIMITS.request_bytes))
    await eventually(lambda: served.bodies)
    response = await http.post(CHAT, content=b"x" * LIMITS.request_bytes)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    served.go_on.set()
    assert (await first).status_code == 200


async def test_a_stream_is_under_way_until_its_end(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.go_on.clear()
    async with http.stream("POST", "/v1/stream") as response:
        chunks = response.aiter_bytes()
        assert await within(anext(chunks)) == b"one"
        assert served.admission.requests == 1
        served.go_on.set()
        assert [chunk async for chunk in chunks] == [b"two"]
    await eventually(lambda: served.admission.requests == 0)


async def test_a_client_that_leaves_is_not_under_way_any_more(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.go_on.clear()
    async with http.stream("POST", "/v1/stream") as response:
        assert await within(anext(response.aiter_bytes())) == b"one"
    await eventually(lambda: served.admission.requests == 0)


@pytest.mark.parametrize("status", [429, 503])
async def test_whoever_sends_away_says_when_to_come_again(
    http: httpx.AsyncClient, status: int
) -> None:
    response = await http.post(f"/busy/{status}")
    assert (response.status_code, response.headers["retry-after"]) == (status, "2")


async def test_small_bodies_pass_large_ones(served: Served, http: httpx.AsyncClient) -> None:
    served.admission.limits = replace(LIMITS, requests=10)
    served.admission.large_bodies = bodies = LargeBodies(at_a_time=1, most_seconds=60)
    served.go_on.clear()
    large = [
        asyncio.create_task(http.post(CHAT, content=b"x" * (LARGE_BYTES + number)))
        for number in range(2)
    ]
    await eventually(lambda: bodies.waiting == 1)
    small = asyncio.create_task(http.post(CHAT, content=b"x" * (LARGE_BYTES - 1)))
    await eventually(lambda: len(served.bodies) == 2)
    assert LARGE_BYTES - 1 in served.bodies
    assert served.metrics.get_sample_value("foveal_http_bodies_waiting") == 1
    served.go_on.set()
    for asked in (*large, small):
        assert (await within(asked)).status_code == 200
    assert await within(bodies.turn())


async def test_a_turn_ends_when_the_request_is_sent(
    served: Served, http: httpx.AsyncClient
) -> None:
    served.admission.limits = replace(LIMITS, requests=10)
    served.admission.large_bodies = LargeBodies(at_a_time=1, most_seconds=60)
    served.go_on.clear()
    content = b"x" * LARGE_BYTES
    asked = [asyncio.create_task(http.post("/v1/sent", content=content)) for _ in range(3)]
    await eventually(lambda: len(served.bodies) == 3)
    served.go_on.set()
    for one in asked:
        assert (await within(one)).status_code == 200

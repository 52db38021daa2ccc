"""A load on a server of the test's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from configs.bench.figures import figures_of
from configs.bench.load import NoServer, first_model, send_load

pytestmark = pytest.mark.anyio
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(chat: Handler) -> AsyncIterator[str]:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    # A handler that never answers would hold up the end for a minute.
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def stream(request: web.Request, *events: Any) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"x-foveal-worker": "w1", "x-foveal-transfer": "shm"}
    )
    await response.prepare(request)
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {text}\n\n".encode())
    return response


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 10, "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


async def test_what_an_answer_says_is_counted() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        assert await request.json() == {"n": 1}
        assert request.headers["Authorization"] == "Bearer k"
        return await stream(
            request, {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            piece("a"), piece("b"), USAGE, "[DONE]",
        )

    async with serving(chat) as url:
        answers, seconds = await send_load(url, [{"n": 1}] * 3, 2, 20.0, "k")
    figures = figures_of(answers, seconds)
    assert (figures["requests"], figures["errors"]) == (3, 0)
    assert (figures["prompt_tokens"], figures["cached_tokens"]) == (30, 12)
    assert figures["cached_share"] == 0.4
    assert (figures["workers"], figures["transfers"]) == ({"w1": 3}, {"shm": 3})
    assert figures["requests_per_second"] == 3 / seconds
    for answer in answers:
        assert len(answer.tokens_at) == 2
        assert 0 < answer.first_token == answer.tokens_at[0] <= answer.end <= seconds
    assert figures["ttft_ms"]["p50"] <= figures["latency_ms"]["p99"]


async def test_so_many_are_under_way_at_once() -> None:
    under_way, most, two = 0, 0, asyncio.Event()

    async def chat(request: web.Request) -> web.StreamResponse:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 2:
            two.set()
        await asyncio.wait_for(two.wait(), 20.0)
        under_way -= 1
        return await stream(request, piece("a"))

    async with serving(chat) as url:
        answers, _ = await send_load(url, [{}] * 4, 2, 20.0)
    assert len(answers) == 4 and most == 2


async def test_failures_are_errors_and_no_times() -> None:
    count = 0

    async def chat(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        if count == 1:
            return web.Response(status=503, text="busy")
        if count == 2:
            return await stream(request, piece("a"), {"error": {"message": "died"}})
        return await stream(request, "[DONE]")

    async with serving(chat) as url:
        answers, seconds = await send_load(url, [{}] * 3, 1, 20.0)
    assert [answer.error for answer in answers] == [
        "503: busy", "{'message': 'died'}", "an answer without text"
    ]
    figures = figures_of(answers, seconds)
    assert figures["errors"] == 3 and figures["ttft_ms"] is None


async def test_an_answer_that_takes_too_long_is_given_up() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(chat) as url:
        ((answer,), _) = await send_load(url, [{}], 1, 0.2)
    assert answer.error == "no whole answer within 0 s"


async def test_the_model_is_asked_for() -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        raise AssertionError

    async with serving(chat) as url:
        assert await first_model(url, "") == "m"
    with pytest.raises(NoServer, match="no server with a model answers at"):
        await first_model("http://127.0.0.1:1", "")

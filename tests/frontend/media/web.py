"""A web server for tests that fetch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Page = Callable[[web.Request], web.StreamResponse | Awaitable[web.StreamResponse]]


class Site:
    """Serves what ``pages`` says; counts and keeps what it was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.asked: Counter[str] = Counter()
        self.requests: list[web.Request] = []
        self.port = 0

    def url(self, path: str, host: str = "127.0.0.1", userinfo: str = "") -> str:
        return f"http://{userinfo}{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes, status: int = 200, **headers: str) -> None:
        """Answer with ``body`` and headers whose names have _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = lambda _: web.Response(body=body, status=status, headers=named)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        self.requests.append(request)
        page = self.pages.get(request.path)
        if page is None:
            return web.Response(status=404)
        answer = page(request)
        return answer if isinstance(answer, web.StreamResponse) else await answer


@asynccontextmanager
async def running_site() -> AsyncIterator[Site]:
    site = Site()
    runner = web.ServerRunner(web.Server(site._answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.port = runner.addresses[0][1]
    try:
        yield site
    finally:
        await asyncio.wait_for(runner.cleanup(), 10)

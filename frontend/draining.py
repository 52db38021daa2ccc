"""How a frontend leaves: it stops listening, finishes its responses, and goes.

vLLM's server shuts its engine client down as soon as it is told to end, which would break
off every stream. It does so in a thread of its own and waits for that: time enough to
drain.

Relied on of uvicorn: Server.servers, server_state.connections and their ``shutdown``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

LAST_SECONDS = 5.0
"""How long clients may take to read the end of what they were sent."""


class OpenRequests:
    """The HTTP requests that are being answered. Used on one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        """Whether connections are closed behind the response they carry."""
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.count += 1
        self._idle.clear()

    def end(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    async def until_none(self) -> None:
        await self._idle.wait()


class OpenRequestsMiddleware:
    """Counts requests in the ``OpenRequests`` of the app's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        requests: OpenRequests = scope["app"].state.open_requests

        async def send_and_close(message: Message) -> None:
            if requests.draining and message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        requests.begin()
        try:
            await self._app(scope, receive, send_and_close)
        finally:
            requests.end()


class HttpDrain:
    """Lets one app finish its responses."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: how long that may take. Call on the event loop."""
        self.requests = OpenRequests()
        self._seconds = seconds
        self._app: FastAPI | None = None
        self._loop = asyncio.get_running_loop()

    def watch(self, app: FastAPI) -> None:
        """Drain this app when it comes to it. It needs ``OpenRequestsMiddleware``."""
        app.state.open_requests = self.requests
        self._app = app

    def wait(self) -> None:
        """Drain, and return when that is over. Call from another thread."""
        if self._app is not None and self._loop.is_running():
            draining = asyncio.run_coroutine_threadsafe(self.run(), self._loop)
            with contextlib.suppress(TimeoutError):
                draining.result(self._seconds + LAST_SECONDS)

    async def run(self) -> None:
        """Stop listening, and wait for the responses under way; not for ever.

        A second signal ends the wait.
        """
        hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, hurry.set)
        self.requests.draining = True
        server = getattr(self._app.state, "server", None) if self._app is not None else None
        if server is not None:
            for listener in getattr(server, "servers", ()):
                listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()  # now if it is idle, else behind its response
        logger.info(
            "leaving, once %d requests are answered or %.0f s have passed",
            self.requests.count, self._seconds,
        )
        waits = [
            asyncio.ensure_future(self.requests.until_none()),
            asyncio.ensure_future(hurry.wait()),
        ]
        await asyncio.wait(
            waits, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()
        if self.requests.count:
            logger.warning("%d requests are broken off", self.requests.count)

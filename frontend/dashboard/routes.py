"""The dashboard: a page at ``/dashboard``, and what it shows under ``/v1/dashboard/``.

The page is static and tells nothing; what is under ``/v1`` asks for the key of
``--api-key`` as the rest of the API does. The page asks again every second. What it
is told is made at most twice a second, and few may ask at a time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from frontend.dashboard.state import FrontendState
from frontend.dashboard.thumbnails import thumbnail
from frontend.siblings import Siblings

HERE = Path(__file__).parent

ASSETS = {
    "dashboard.js": "text/javascript; charset=utf-8",
    "requests.js": "text/javascript; charset=utf-8",
    "elements.js": "text/javascript; charset=utf-8",
    "workers.js": "text/javascript; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

MOST_AT_A_TIME = 16
"""Questions that are being answered at one moment; more are answered 503."""

DECODED_AT_A_TIME = 2
"""Pictures: a large one takes 200 MB while it is."""

STATE_PATH = "/v1/dashboard/state"

QUESTION = "state"
PICTURE = "picture"


class Answers:
    """Answers the page and the siblings."""

    def __init__(self, state: FrontendState, siblings: Siblings) -> None:
        self._state = state
        self._siblings = siblings
        self._room = asyncio.Semaphore(MOST_AT_A_TIME)
        self._decoding = asyncio.Semaphore(DECODED_AT_A_TIME)

    async def to_sibling(self, question: str) -> bytes:
        """Raises: ValueError: it is no question for the dashboard."""
        if question == QUESTION:
            return self._state.encoded()
        kind, _, which = question.partition(" ")
        number, _, index = which.partition(" ")
        if kind != PICTURE:
            raise ValueError(f"no such question: {question!r}")
        return await self._own_thumbnail(int(number), int(index)) or b""

    async def state(self) -> Response:
        """The states of all frontends, as a JSON list."""
        if self._room.locked():
            return _too_many()
        async with self._room:
            states = await self._siblings.ask_all(QUESTION)
            states[self._siblings.number] = self._state.encoded()
            body = b"[" + b",".join(states[n] for n in sorted(states) if states[n]) + b"]"
            return Response(body, media_type="application/json", headers=_FRESH)

    async def picture(self, frontend: int, number: int, index: int) -> Response:
        if self._room.locked():
            return _too_many()
        async with self._room:
            if frontend == self._siblings.number:
                small = await self._own_thumbnail(number, index)
            else:
                question = f"{PICTURE} {number} {index}"
                small = await self._siblings.ask(frontend, question)
            if not small:
                return JSONResponse({"error": "no such picture any more"}, 404)
            return Response(small, media_type="image/jpeg", headers=_FRESH)

    async def _own_thumbnail(self, number: int, index: int) -> bytes | None:
        async with self._decoding:
            picture = self._state.picture(number, index)
            return await asyncio.to_thread(thumbnail, picture) if picture is not None else None


_FRESH = {"Cache-Control": "no-store"}


def _too_many() -> Response:
    return JSONResponse(
        {"error": "too many dashboards are open"}, 503, headers={"Retry-After": "2"}
    )


def dashboard_routes(answers: Answers) -> APIRouter:
    """The page, its files and its data."""
    routes = APIRouter(include_in_schema=False)
    files = {name: (HERE / name).read_bytes() for name in ASSETS}
    page = (HERE / "index.html").read_bytes()

    @routes.get("/dashboard")
    async def dashboard() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=SECURITY)

    @routes.get("/dashboard/{name}")
    async def asset(name: str) -> Response:
        if name not in files:
            return JSONResponse({"error": "not found"}, 404)
        return Response(files[name], media_type=ASSETS[name], headers=SECURITY)

    @routes.get(STATE_PATH)
    async def state() -> Response:
        return await answers.state()

    @routes.get("/v1/dashboard/pictures/{frontend}/{number}/{index}")
    async def picture(frontend: int, number: int, index: int) -> Response:
        return await answers.picture(frontend, number, index)

    return routes

"""Who gets what of the dashboard."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from frontend.dashboard import routes
from frontend.dashboard.routes import ASSETS, HERE, MOST_AT_A_TIME, Answers, dashboard_routes
from frontend.dashboard.state import FrontendState
from frontend.dashboard.thumbnails import thumbnail
from frontend.siblings import Siblings
from tests.fakes import eventually
from tests.frontend.dashboard.pages import FakeState, a_frontend

pytestmark = pytest.mark.anyio


def client_of(state: FakeState, siblings: Siblings) -> httpx.AsyncClient:
    app = FastAPI()
    answers = Answers(cast("FrontendState", state), siblings)
    app.include_router(dashboard_routes(answers))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def a_picture(side: int = 300) -> bytes:
    data = io.BytesIO()
    Image.new("RGBA", (side, side // 2), "red").save(data, "PNG")
    return data.getvalue()


async def test_every_file_of_the_page_is_served_with_a_strict_policy() -> None:
    async with client_of(FakeState(), Siblings(None)) as http:
        for path in ["/dashboard", *(f"/dashboard/{name}" for name in ASSETS)]:
            response = await http.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
        for path in ("/dashboard/routes.py", "/dashboard/../state.py", "/dashboard/x.js"):
            assert (await http.get(path)).status_code == 404


def test_no_file_is_forgotten() -> None:
    files = {path.name for path in HERE.iterdir() if path.suffix not in (".py", "")}
    assert files == {*ASSETS, "index.html"}
    page = (HERE / "index.html").read_text()
    assert "<script>" not in page and "onclick" not in page and "style=" not in page


async def test_all_frontends_are_told_of(tmp_path: Path) -> None:
    here, there = Siblings(tmp_path), Siblings(tmp_path)
    other = FakeState()
    other.told = a_frontend(frontend=1)
    other.pictures = {(3, 0): a_picture()}
    await there.serve(Answers(cast("FrontendState", other), there).to_sibling)
    async with client_of(FakeState(), here) as http:
        states = (await http.get("/v1/dashboard/state")).json()
        assert [state["frontend"] for state in states] == [0, 1]
        small = await http.get("/v1/dashboard/pictures/1/3/0")
        assert Image.open(io.BytesIO(small.content)).size == (96, 48)
        for missing in ("1/3/1", "0/3/0", "5/3/0"):
            response = await http.get(f"/v1/dashboard/pictures/{missing}")
            assert response.status_code == 404
    there.close()
    here.close()


async def test_few_may_ask_at_a_time() -> None:
    class Slow(Siblings):
        async def ask_all(self, question: str) -> dict[int, bytes]:
            await released.wait()
            return {}

    released = asyncio.Event()
    async with client_of(FakeState(), Slow(None)) as http:
        asking = [
            asyncio.create_task(http.get("/v1/dashboard/state"))
            for _ in range(MOST_AT_A_TIME + 1)
        ]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        assert [task.result().status_code for task in done] == [503]
        released.set()
        statuses: list[Any] = [r.status_code for r in await asyncio.gather(*asking)]
    assert sorted(statuses) == [200] * MOST_AT_A_TIME + [503]


def test_what_is_no_picture_has_no_thumbnail() -> None:
    assert thumbnail(b"GIF89a nonsense") is None
    assert thumbnail(a_picture()) is not None


async def test_few_pictures_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, now, most = threading.Lock(), 0, 0
    go_on = threading.Event()

    def slowly(encoded: bytes) -> bytes | None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        go_on.wait(20)
        with lock:
            now -= 1
        return thumbnail(encoded)

    monkeypatch.setattr(routes, "thumbnail", slowly)
    state = FakeState()
    state.pictures = {(1, 0): a_picture()}
    async with client_of(state, Siblings(None)) as http:
        asked = [
            asyncio.create_task(http.get("/v1/dashboard/pictures/0/1/0")) for _ in range(6)
        ]
        await eventually(lambda: now == routes.DECODED_AT_A_TIME)
        go_on.set()
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    assert most == routes.DECODED_AT_A_TIME

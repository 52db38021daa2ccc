"""Headers that say where a response was computed, also of one that streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.receipt import ReceiptMiddleware, Routed, current_receipt
from tests.fakes import within

pytestmark = pytest.mark.anyio


POST: Scope = {"type": "http", "method": "POST"}


def start(status: int = 200, headers: Any = ()) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes = b"", more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def route(worker: str = "w", overlap: int = 3, prompt: int = 5, transfer: str = "shm") -> None:
    receipt = current_receipt.get()
    assert receipt is not None
    receipt.routed.append(Routed(worker, overlap, prompt, transfer, 1, 2, f"id-{worker}"))


async def run(app: ASGIApp, kind: str = "http", method: str = "POST") -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await within(ReceiptMiddleware(app)({"type": kind, "method": method}, receive, send))  # type: ignore[arg-type]
    return sent


async def test_a_response_says_where_it_was_computed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        route()
        await send(start(headers=[(b"content-type", b"text/plain")]))
        await send(body(b"text"))

    begin, end = await run(app)
    assert begin["headers"] == [
        (b"content-type", b"text/plain"),
        (b"x-foveal-request-id", b"id-w"),
        (b"x-foveal-worker", b"w"),
        (b"x-foveal-overlap-blocks", b"3"),
        (b"x-foveal-prompt-blocks", b"5"),
        (b"x-foveal-transfer", b"shm"),
        (b"x-foveal-embeddings", b"1/2"),
    ]
    assert end == body(b"text")


async def test_a_stream_that_starts_before_it_is_routed_waits_with_its_headers() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        route()
        await send(body(b"1", more=True))
        await send(body(b"2", more=True))
        await send(body())

    sent = await run(app)
    assert [m["type"] for m in sent] == ["http.response.start", *["http.response.body"] * 3]
    assert (b"x-foveal-worker", b"w") in sent[0]["headers"]
    assert [m.get("body") for m in sent[1:]] == [b"1", b"2", b""]


async def test_a_stream_whose_first_bytes_come_before_it_is_routed_waits_with_them() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(b"1", more=True))
        await send(body(b"2", more=True))
        route()
        await send(body(b"3", more=True))
        await send(body())

    sent = await run(app)
    assert (b"x-foveal-worker", b"w") in sent[0]["headers"]
    assert [m.get("body") for m in sent[1:]] == [b"1", b"2", b"3", b""]


async def test_a_stream_that_is_never_routed_comes_when_it_is_complete() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(400))
        await send(body(b"1", more=True))
        await send(body(b"2"))

    sent = await run(app)
    assert sent == [start(400), body(b"1", more=True), body(b"2")]


async def test_what_is_not_posted_is_not_held_beyond_its_first_bytes() -> None:
    sent: list[Message] = []
    go_on = asyncio.Event()
    seen = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(b"1", more=True))
        seen.set()
        await go_on.wait()
        await send(body())

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope: Scope = {"type": "http", "method": "GET"}
    serving = asyncio.ensure_future(ReceiptMiddleware(app)(scope, receive, send))
    await within(seen.wait())
    assert sent == [start(), body(b"1", more=True)]
    go_on.set()
    await within(serving)


async def test_a_stream_is_not_held_once_it_is_routed() -> None:
    seen = asyncio.Event()
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        route()
        await send(start())
        await send(body(b"1", more=True))
        await go_on.wait()
        await send(body())

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            seen.set()

    async def receive() -> Message:
        return {"type": "http.request"}

    serving = asyncio.ensure_future(ReceiptMiddleware(app)(POST, receive, send))
    await within(seen.wait())
    assert not serving.done()
    go_on.set()
    await within(serving)


async def test_several_engine_requests_stand_side_by_side() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        route("a", 1, 4, "shm")
        route("b", 2, 5, "inline")
        await send(start())
        await send(body())

    (begin, _) = await run(app)
    assert dict(begin["headers"]) == {
        b"x-foveal-request-id": b"id-a,id-b",
        b"x-foveal-worker": b"a,b",
        b"x-foveal-overlap-blocks": b"1,2",
        b"x-foveal-prompt-blocks": b"4,5",
        b"x-foveal-transfer": b"shm,inline",
        b"x-foveal-embeddings": b"1/2,1/2",
    }


async def test_what_was_routed_nowhere_has_no_receipt() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(404, [(b"a", b"b")]))
        await send(body(b"no such thing"))

    begin, _ = await run(app)
    assert (begin["status"], begin["headers"]) == (404, [(b"a", b"b")])


async def test_a_request_that_fails_after_routing_still_says_where() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        route()
        await send(start(500))
        await send(body(b"sorry"))

    begin, _ = await run(app)
    assert begin["status"] == 500
    assert (b"x-foveal-worker", b"w") in begin["headers"]


async def test_an_error_before_the_first_bytes_leaves_the_response_unstarted() -> None:
    started: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        raise RuntimeError("broken")

    async def send(message: Message) -> None:
        started.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    # So that whoever stands outside can still answer with a 500.
    with pytest.raises(RuntimeError, match="broken"):
        await within(ReceiptMiddleware(app)(POST, receive, send))
    assert started == []
    assert current_receipt.get() is None


async def test_other_protocols_pass_untouched() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_receipt.get() is None
        await send({"type": "websocket.accept"})

    assert await run(app, "websocket") == [{"type": "websocket.accept"}]


async def test_each_request_has_a_receipt_of_its_own_that_its_tasks_inherit() -> None:
    together = asyncio.Barrier(2)

    def app_for(worker: str) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def routing() -> None:
                await together.wait()
                route(worker)

            await asyncio.create_task(routing())
            await send(start())
            await send(body())

        return app

    one, other = await asyncio.gather(run(app_for("a")), run(app_for("b")))
    assert (b"x-foveal-worker", b"a") in one[0]["headers"]
    assert (b"x-foveal-worker", b"b") in other[0]["headers"]


async def test_a_name_that_a_client_chose_cannot_end_a_header() -> None:
    chosen = "chatcmpl-a\r\nset-cookie: x,\u00e9" + "y" * 1000
    routed = Routed("w", 0, 0, "none", request_id=chosen)
    assert routed.plain_id.startswith("chatcmpl-a??set-cookie:?x??yyy")
    assert len(routed.plain_id) == 96

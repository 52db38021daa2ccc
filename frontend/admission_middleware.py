"""Refuses HTTP requests that are too much, before their bodies are read.

The outermost part of the app: what is refused here costs no parsing and no decoding. It
also tells clients that are sent away, by whomever, when to come again (``Retry-After``).

vLLM names relied on: serve.exception_handling.error_response.create_error_response;
exceptions.GracefulHTTPError.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError

from frontend.admission import Admission, Body, NotAdmitted, too_slow

RETRY_AFTER_SECONDS = 2

LINGER_SECONDS = 1.0
"""For so long the rest of a body that is too large is thrown away as it comes: a client
whose connection breaks while it sends may not look for the answer."""

ADMINISTRATIVE = frozenset({
    "/abort_requests", "/inference/v1/abort_requests", "/collective_rpc",
    "/fault_tolerance/apply", "/init_weight_transfer_engine", "/is_scaling_elastic_ep",
    "/pause", "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache",
    "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/ping",
    "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update",
    "/start_profile", "/start_weight_update", "/stop_profile", "/finish_weight_update",
    "/update_weight_version", "/update_weights", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/wake_up", "/weight_checker",
})
"""What may be posted to a server that is full."""

_SENT_AWAY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class AdmissionMiddleware:
    """Asks ``app.state.admission``, if there is one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission: Admission | None = None
        if scope["type"] == "http":
            admission = getattr(scope["app"].state, "admission", None)
        if admission is None:
            await self._app(scope, receive, send)
            return
        refusal: GracefulHTTPError | None
        with admission.body() as body, ExitStack() as under_way:
            try:
                body.grow_to(_announced(scope))
                if _is_work(scope):
                    under_way.enter_context(admission.entered())
            except GracefulHTTPError as error:
                refusal = error
            else:
                refusal = await self._serve(admission, body, scope, receive, send)
        if isinstance(refusal, NotAdmitted):  # vLLM counts its own
            admission.refused.labels(refusal.reason).inc()
        if refusal is not None:
            await _refuse(refusal, scope, receive, send)

    async def _serve(
        self, admission: Admission, body: Body, scope: Scope, receive: Receive, send: Send
    ) -> NotAdmitted | None:
        """Have the app answer; returns why its body is refused, if nothing was answered."""
        arriving = _Arriving(admission, body, receive)
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            if arriving.refusal is not None and not started:
                return  # the app's answer to a body that broke off
            if message["type"] == "http.response.start":
                started = True
                message = _with_retry_after(message)
            await send(message)

        try:
            await self._app(scope, arriving.receive, send_on)
        except NotAdmitted:
            if started:
                raise RuntimeError("a body was refused after its answer had begun") from None
        return arriving.refusal if not started else None


class _Arriving:
    """A body as it arrives."""

    def __init__(self, admission: Admission, body: Body, receive: Receive) -> None:
        self._body = body
        self._receive = receive
        self._seconds = admission.limits.body_seconds
        self._deadline = asyncio.get_running_loop().time() + self._seconds
        self._nbytes = 0
        self._complete = False
        self.refusal: NotAdmitted | None = None

    async def receive(self) -> Message:
        """Raises: NotAdmitted: it is too large, or takes too long."""
        if self._complete:
            return await self._receive()  # waits for the client to leave
        if self.refusal is not None:
            raise self.refusal
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.refusal = too_slow(self._seconds)
            raise self.refusal from None
        if message["type"] == "http.request":
            self._nbytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            try:
                self._body.grow_to(self._nbytes)
            except NotAdmitted as refusal:
                self.refusal = refusal
                raise
            if self._complete:
                await self._body.take_turn()
        return message


async def _refuse(
    refusal: GracefulHTTPError, scope: Scope, receive: Receive, send: Send
) -> None:
    status = HTTPStatus(refusal.http_status)
    error = create_error_response(refusal).model_dump()
    response = JSONResponse(error, status_code=status)
    if status in _SENT_AWAY:
        response.headers["retry-after"] = str(RETRY_AFTER_SECONDS)
        await response(scope, receive, send)  # the server throws the body away
        return
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": status,
                "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


def _announced(scope: Scope) -> int:
    """The size of the body that the client announces; 0 where it does not say."""
    length = Headers(scope=scope).get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


def _is_work(scope: Scope) -> bool:
    """Whether a request makes the server work, so that it may be sent away."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return (
        scope["method"] == "POST"
        and path not in ADMINISTRATIVE
        and not path.endswith("/cancel")
    )


def _with_retry_after(start: Message) -> Message:
    headers = list(start.get("headers", ()))
    has_one = any(name.lower() == b"retry-after" for name, _ in headers)
    if start["status"] in _SENT_AWAY and not has_one:
        headers.append((b"retry-after", str(RETRY_AFTER_SECONDS).encode()))
    return {**start, "headers": headers}

"""OpenTelemetry spans around HTTP requests and rendering, where traces are asked for.

vLLM sets the exporter up (``--otlp-traces-endpoint``) and makes a span for what its
engine did. Here is what lies before. The span of the HTTP request is the parent of all,
vLLM's too: it is put into the ``traceparent`` header that vLLM reads.

vLLM names relied on: tracing.is_otel_available, tracing.otel.init_otel_tracer (called by
AsyncLLM.__init__, sets the tracer provider); ServingEngine._get_trace_headers reads
traceparent; BaseRenderer.render_chat_async, render_cmpl_async, _process_multimodal_async.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from opentelemetry import trace
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.renderers.base import BaseRenderer

SERVICE = "foveal.frontend"

_propagator = TraceContextTextMapPropagator()


def tracer() -> Tracer:
    """Makes our spans; without ``--otlp-traces-endpoint`` they go nowhere."""
    return trace.get_tracer(SERVICE)


class _HeadersGetter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        return carrier.getlist(key) or None

    def keys(self, carrier: Headers) -> list[str]:
        return carrier.keys()


class TracingMiddleware:
    """One span for each HTTP request that may reach an engine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tracer = tracer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        parent = _propagator.extract(Headers(scope=scope), getter=_HeadersGetter())
        span = self._tracer.start_span(
            "request", parent, SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": scope["path"]},
        )

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        with trace.use_span(span, end_on_exit=True):
            await self._app(_with_parent(scope), receive, send_and_note)


def _with_parent(scope: Scope) -> Scope:
    """``scope`` with the current span where the client's was in the headers."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"traceparent", b"tracestate")
    ]
    headers += [(name.encode(), value.encode()) for name, value in carrier.items()]
    return {**scope, "headers": headers}


def trace_rendering(renderer: BaseRenderer[Any]) -> None:
    """Have spans made of what ``renderer`` does for chats and completions."""
    ours = tracer()
    for method, name in (
        ("render_chat_async", "render"),
        ("render_cmpl_async", "render"),
        ("_process_multimodal_async", "process"),
    ):
        setattr(renderer, method, _in_span(ours, name, getattr(renderer, method)))


def _in_span(
    ours: Tracer, name: str, method: Callable[..., Coroutine[Any, Any, Any]]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @wraps(method)
    async def traced(*args: Any, **kwargs: Any) -> Any:
        with ours.start_as_current_span(name):
            return await method(*args, **kwargs)

    return traced

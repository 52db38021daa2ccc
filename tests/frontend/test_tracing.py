"""The span of an HTTP request, and what is told to those it calls."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from frontend import tracing

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("test"))
    return exporter


async def post(path: str = "/v1/x", method: str = "POST", **headers: str) -> httpx.Response:
    async def answer(request: Request) -> Response:
        current = trace.get_current_span().get_span_context().span_id
        told = request.headers.getlist("traceparent")
        return JSONResponse({"told": told, "current": f"{current:016x}"})

    async def fail(request: Request) -> Response:
        return Response(status_code=500)

    routes = [
        Route("/v1/x", answer, methods=["GET", "POST"]),
        Route("/v1/fail", fail, methods=["POST"]),
    ]
    app = tracing.TracingMiddleware(Starlette(routes=routes))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.request(method, path, headers=headers)


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_it_goes_on_from_the_client_and_hands_itself_on(
    exporter: InMemorySpanExporter,
) -> None:
    answer = (await post(traceparent=f"00-{TRACE}-{CALLER}-01")).json()
    span = only(exporter)
    assert span.parent is not None and f"{span.parent.span_id:016x}" == CALLER
    own = f"{span.context.span_id:016x}"
    assert answer == {"told": [f"00-{TRACE}-{own}-01"], "current": own}


async def test_without_a_client_that_traces_it_is_the_first(
    exporter: InMemorySpanExporter,
) -> None:
    answer = (await post(traceparent="nonsense")).json()
    span = only(exporter)
    assert span.parent is None
    assert len(answer["told"]) == 1


async def test_failures_are_marked(exporter: InMemorySpanExporter) -> None:
    await post("/v1/fail")
    span = only(exporter)
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 500
    assert not span.status.is_ok


async def test_only_what_is_posted_is_traced(exporter: InMemorySpanExporter) -> None:
    await post(method="GET")
    assert not exporter.get_finished_spans()

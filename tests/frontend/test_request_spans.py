"""The spans that the engine client's story becomes."""

from __future__ import annotations

import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from frontend.metrics import FrontendMetrics
from frontend.request_log import LOST, RequestLog, SendTimes
from frontend.request_spans import RequestSpans
from frontend.router.router import Route
from tests.fakes import make_request

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


class Traced:
    """A log whose spans are kept."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        spans = RequestSpans(provider.get_tracer("test"))
        self.log = RequestLog(FrontendMetrics(CollectorRegistry()), spans=spans)
        self.request = make_request("r")
        self.request.trace_headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}

    def route(self, worker: str = "a") -> None:
        now = time.perf_counter()
        route = Route(worker, 2, 0, 2, 8.0, ())
        self.log.routed(
            self.request, route, "shm", SendTimes(now - 0.003, now - 0.002, now - 0.001)
        )

    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


def test_a_request_becomes_three_spans_of_the_clients_trace() -> None:
    traced = Traced()
    traced.route()
    assert traced.names() == ["route", "transfer"]
    traced.log.finished("r", "stop")
    route, transfer, prefill = traced.exporter.get_finished_spans()
    for span in (route, transfer, prefill):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.parent is not None and f"{span.parent.span_id:016x}" == CALLER
        assert span.attributes is not None and span.attributes["foveal.worker"] == "a"
        assert span.start_time is not None and span.end_time is not None
        assert abs(span.end_time - time.time_ns()) < 20e9
    assert route.start_time and route.end_time and transfer.start_time
    assert 0.5e6 < route.end_time - route.start_time < 2e6
    assert abs(transfer.start_time - route.end_time) < 1e6


def test_a_request_that_moves_is_routed_twice() -> None:
    traced = Traced()
    traced.route("a")
    traced.route("b")
    traced.log.finished("r", LOST)
    assert traced.names() == ["route", "transfer", "route", "transfer", "prefill", "prefill"]
    last = traced.exporter.get_finished_spans()[-1]
    assert last.attributes is not None
    assert last.attributes["foveal.worker"] == "b"
    assert last.attributes["foveal.outcome"] == LOST
    assert not last.status.is_ok

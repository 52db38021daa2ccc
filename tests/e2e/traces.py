"""An OpenTelemetry collector: takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


@dataclass(frozen=True)
class SeenSpan:
    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: dict[str, str]


class Collector:
    """A context; within, it listens at ``url``."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                sent = ExportTraceServiceRequest.FromString(body)
                for resource in sent.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(map(_seen, scope.spans))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def of(self, trace: str) -> dict[str, SeenSpan]:
        """The spans of one trace, by name."""
        return {span.name: span for span in self.spans if span.trace == trace}

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _seen(span: object) -> SeenSpan:
    attributes = {}
    for pair in span.attributes:  # type: ignore[attr-defined]
        kind = pair.value.WhichOneof("value")
        attributes[pair.key] = str(getattr(pair.value, kind))
    return SeenSpan(
        span.name,  # type: ignore[attr-defined]
        span.trace_id.hex(),  # type: ignore[attr-defined]
        span.span_id.hex(),  # type: ignore[attr-defined]
        span.parent_span_id.hex(),  # type: ignore[attr-defined]
        span.start_time_unix_nano,  # type: ignore[attr-defined]
        span.end_time_unix_nano,  # type: ignore[attr-defined]
        attributes,
    )

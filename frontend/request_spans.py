"""OpenTelemetry spans of a request's way from the router to its first token.

    request            ASGI (frontend/tracing.py), child of the client's traceparent
      render           chat template, tokens, media
        process        images and other media
      route            block hashes, choice of a worker
      transfer         references or tensors, to the worker
      prefill          from there to the first token, the engine's queue included
      llm_request      vLLM's own

What is timed by ``time.perf_counter`` is told in nanoseconds since 1970.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import context, trace
from opentelemetry.trace import Span, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from frontend.request_log import LOST, RequestRecord, SendTimes


class RequestSpans:
    """Makes the spans that the engine client knows of."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def routed(
        self, record: RequestRecord, headers: Mapping[str, str] | None, times: SendTimes
    ) -> None:
        """Tell of the decision and the sending; prefill begins.

        ``headers`` are those of the trace that the request came with, for requests that no
        HTTP request of this process is behind.
        """
        parent = context.get_current()
        if not trace.get_current_span().get_span_context().is_valid and headers:
            parent = self._propagator.extract(headers)
        began, decided, sent = map(_nanoseconds, (times.began, times.decided, times.sent))
        who: dict[str, str | int] = {
            "foveal.request_id": record.request_id, "foveal.worker": record.worker,
        }
        route = self._tracer.start_span("route", parent, start_time=began, attributes=who)
        route.set_attributes({
            "foveal.overlap_blocks": record.overlap_blocks,
            "foveal.promised_blocks": record.promised_blocks,
            "foveal.prompt_blocks": record.prompt_blocks,
            "foveal.cost": record.cost,
            "foveal.moves": record.moves,
        })
        route.end(decided)
        transfer = self._tracer.start_span(
            "transfer", parent, start_time=decided, attributes=who
        )
        transfer.set_attributes(
            {"foveal.transfer": record.transfer, "foveal.items": record.items}
        )
        transfer.end(sent)
        if isinstance(record.spans, Span):
            record.spans.end(began)  # it was sent to a worker that is lost
        record.spans = self._tracer.start_span(
            "prefill", parent, start_time=sent, attributes=who
        )
        record.spans.set_attribute("gen_ai.usage.prompt_tokens", record.prompt_tokens)

    def first_token(self, record: RequestRecord) -> None:
        if isinstance(record.spans, Span):
            if record.cached_tokens is not None:
                record.spans.set_attribute("foveal.cached_tokens", record.cached_tokens)
            record.spans.end()
            record.spans = None

    def finished(self, record: RequestRecord) -> None:
        """End the span of a request that ended before it had a token."""
        if isinstance(record.spans, Span):
            record.spans.set_attribute("foveal.outcome", record.outcome)
            if record.outcome in ("error", LOST):
                record.spans.set_status(StatusCode.ERROR, record.outcome)
            record.spans.end()
            record.spans = None


def _nanoseconds(at: float) -> int:
    return time.time_ns() - int((time.perf_counter() - at) * 1e9)

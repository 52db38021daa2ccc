"""What became of each request: for the metrics, the spans and the dashboard.

The engine client tells what happens, in a few calls per request and none per token; the
last requests are kept for whoever looks. Nothing of a prompt is kept.

vLLM names relied on: EngineCoreRequest.request_id, external_req_id, mm_features,
lora_request, trace_headers; EngineCoreOutput.prefill_stats, finish_reason, stop_reason.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from frontend.metrics import FrontendMetrics
from frontend.receipt import current_receipt
from frontend.router.cost import Candidate
from frontend.router.router import Route

if TYPE_CHECKING:
    from frontend.request_spans import RequestSpans

MOST_ALTERNATIVES = 15
"""Workers kept of those that a request did not go to: the cheapest."""

MOST_PICTURES = 8
"""Pictures kept of one request, where pictures are kept at all."""

PICTURE_BYTES = 32 << 20
"""Encoded bytes of pictures kept of all requests."""

RUNNING = "running"
LOST = "lost"
"""Outcome of a request whose worker was lost after it had begun to answer, or too often."""
NO_WORKER = "no_worker"
"""Outcome of a request that no worker was ready for."""
ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SendTimes:
    """When a request was routed and sent; seconds of ``time.perf_counter``."""

    began: float
    decided: float
    sent: float


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One engine request, as far as it has come."""

    number: int
    """Counts up from 1 in each frontend process."""
    request_id: str
    """As the client knows it."""
    adapter: str
    arrived: float
    """Seconds since 1970, when it was first routed."""
    began: float
    """The same moment by ``time.perf_counter``."""
    prompt_tokens: int
    items: int
    """Images and other media in it."""
    worker: str
    transfer: str
    overlap_blocks: int
    promised_blocks: int
    prompt_blocks: int
    block_size: int
    cost: float
    alternatives: Sequence[Candidate]
    decision_seconds: float
    moves: int = 0
    """How often it was sent anew because its worker was lost."""
    cached_tokens: int | None = None
    """What the engine took from its cache; None until it says so."""
    first_token_seconds: float | None = None
    """From being routed; None until there is one."""
    seconds: float | None = None
    """From being routed until its end."""
    outcome: str = RUNNING
    pictures: Sequence[bytes] = ()
    """Encoded, as they came."""
    spans: Any = None

    @property
    def overlap_tokens(self) -> int:
        return min(self.overlap_blocks * self.block_size, self.prompt_tokens)


class RequestLog:
    """Keeps the last requests and counts all. For one event loop."""

    def __init__(
        self,
        metrics: FrontendMetrics,
        size: int = 100,
        spans: RequestSpans | None = None,
    ) -> None:
        """``size``: how many requests are kept to be shown."""
        self._metrics = metrics
        self._spans = spans
        self.last: deque[RequestRecord] = deque(maxlen=size)
        """The last requests, oldest first, those in flight included."""
        self.block_size = 0
        """Tokens per block; 0 until a worker has said so."""
        self._live: dict[str, RequestRecord] = {}
        self._count = 0
        self._with_pictures: deque[RequestRecord] = deque()
        self._picture_bytes = 0

    def routed(
        self, request: EngineCoreRequest, route: Route, transfer: str, times: SendTimes
    ) -> None:
        """A request was sent to a worker, for the first time or anew."""
        decision = times.decided - times.began
        self._metrics.decision.observe(decision)
        record = self._live.get(request.request_id)
        if record is not None:
            if record.worker != route.worker:
                record.moves += 1
            self._take_over(record, route, transfer, decision)
        else:
            record = self._new(request, route, transfer, times, decision)
        if self._spans is not None:
            self._spans.routed(record, request.trace_headers, times)

    def first_token(self, request_id: str, output: EngineCoreOutput) -> None:
        """A request has its first token, and the engine says what it reused."""
        record = self._live.get(request_id)
        if record is None:
            return
        record.first_token_seconds = time.perf_counter() - record.began
        if output.prefill_stats is not None:
            record.cached_tokens = output.prefill_stats.num_cached_tokens
        self._metrics.answered(
            record.worker,
            prompt_tokens=record.prompt_tokens,
            overlap_tokens=record.overlap_tokens,
            promised_tokens=record.promised_blocks * record.block_size,
            cached_tokens=record.cached_tokens,
            seconds=record.first_token_seconds,
        )
        if self._spans is not None:
            self._spans.first_token(record)

    def finished(self, request_id: str, outcome: str) -> None:
        """A request is over, as far as its client is concerned. Counted once."""
        record = self._live.pop(request_id, None)
        if record is None:
            return
        record.seconds = time.perf_counter() - record.began
        record.outcome = outcome
        self._metrics.finished.labels(record.worker, outcome).inc()
        if self._spans is not None:
            self._spans.finished(record)

    def reuse_of(self, worker: str) -> dict[str, int]:
        """Of the last requests that went to ``worker``: their tokens, and those reused."""
        theirs = [
            record
            for record in self.last
            if record.worker == worker and record.cached_tokens is not None
        ]
        return {
            "requests": len(theirs),
            "prompt_tokens": sum(record.prompt_tokens for record in theirs),
            "overlap_tokens": sum(record.overlap_tokens for record in theirs),
            "cached_tokens": sum(record.cached_tokens or 0 for record in theirs),
        }

    def no_worker(self) -> None:
        """A request was refused because no worker was ready."""
        self._metrics.finished.labels("", NO_WORKER).inc()

    def _new(
        self,
        request: EngineCoreRequest,
        route: Route,
        transfer: str,
        times: SendTimes,
        decision: float,
    ) -> RequestRecord:
        self._count += 1
        tokens = request.prompt_token_ids
        record = RequestRecord(
            number=self._count,
            request_id=request.external_req_id or request.request_id,
            adapter=request.lora_request.lora_name if request.lora_request else "",
            arrived=time.time() - (time.perf_counter() - times.began),
            began=times.began,
            prompt_tokens=len(tokens) if tokens is not None else 0,
            items=len(request.mm_features or ()),
            worker="",
            transfer="",
            overlap_blocks=0,
            promised_blocks=0,
            prompt_blocks=0,
            block_size=self.block_size,
            cost=0.0,
            alternatives=(),
            decision_seconds=0.0,
        )
        self._take_over(record, route, transfer, decision)
        self._live[request.request_id] = record
        self.last.append(record)
        receipt = current_receipt.get()
        if receipt is not None and receipt.pictures:
            self._keep_pictures(record, receipt.pictures[:MOST_PICTURES])
        return record

    @staticmethod
    def _take_over(
        record: RequestRecord, route: Route, transfer: str, decision: float
    ) -> None:
        record.worker = route.worker
        record.transfer = transfer
        record.overlap_blocks = route.overlap_blocks
        record.promised_blocks = route.promised_blocks
        record.prompt_blocks = route.prompt_blocks
        record.cost = route.cost
        record.alternatives = tuple(islice(route.alternatives, MOST_ALTERNATIVES))
        record.decision_seconds = decision

    def _keep_pictures(self, record: RequestRecord, pictures: Sequence[bytes]) -> None:
        record.pictures = pictures
        self._with_pictures.append(record)
        self._picture_bytes += sum(map(len, pictures))
        while self._with_pictures and (
            self._picture_bytes > PICTURE_BYTES
            or len(self._with_pictures) > (self.last.maxlen or 0)
        ):
            oldest = self._with_pictures.popleft()
            self._picture_bytes -= sum(map(len, oldest.pictures))
            oldest.pictures = ()

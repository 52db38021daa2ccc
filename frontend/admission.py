"""Who is let in: bounds on what a frontend works on, checked before a body is read.

What is bounded here is what nobody behind it bounds: HTTP requests, the bytes of their
bodies and of the media they name, which stay in memory as long as the request, and what all
frontends together have given the workers. vLLM's own limits (``--max-num-queued-reqs``,
``--max-num-queued-tokens``) are asked too, with the requests counted that vLLM does not know
of yet: those that are still being read, fetched and processed.

vLLM names relied on: AsyncLLM.check_admission (raises GracefulHTTPError),
get_num_unfinished_requests; exceptions.GracefulHTTPError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple, Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from vllm.exceptions import GracefulHTTPError

from configs.schema import FrontendConfig
from frontend.large_bodies import LARGE_BYTES, LargeBodies, Turn

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class AdmissionLimits:
    """The bounds; None where there is none."""

    request_bytes: int
    """Of the body of one request."""
    requests: int
    """HTTP requests under way in this process."""
    body_bytes: int
    """Of the bodies of those."""
    body_seconds: float
    """How long a body may take to arrive."""
    requests_per_worker: int | None = None
    """In flight from all frontends, for each ready worker."""
    prefill_tokens_per_worker: int | None = None
    """Prompt tokens still to be computed, from all frontends, for each ready worker."""


def limits_from(settings: FrontendConfig) -> AdmissionLimits:
    return AdmissionLimits(
        request_bytes=int(settings.max_request_mb * MIB),
        requests=settings.max_requests,
        body_bytes=int(settings.max_bodies_gb * GIB),
        body_seconds=settings.max_body_seconds,
        requests_per_worker=settings.max_requests_per_worker,
        prefill_tokens_per_worker=settings.max_prefill_tokens_per_worker,
    )


class FleetLoad(NamedTuple):
    """What the ready workers have in flight, from all frontends."""

    workers: int = 0
    requests: int = 0
    own_requests: int = 0
    """Of those, this frontend's."""
    prefill_tokens: int = 0


class Engine(Protocol):
    """What is asked of vLLM's AsyncLLM."""

    def check_admission(self, n: int = 1) -> None: ...
    def get_num_unfinished_requests(self) -> int: ...


class NotAdmitted(GracefulHTTPError):
    """A request is refused; ``reason`` is its name in the metrics."""

    def __init__(self, reason: str, text: str, status: HTTPStatus) -> None:
        super().__init__(text, status)
        self.reason = reason


class Admission:
    """Counts what is under way and refuses what would be too much. For one event loop."""

    def __init__(
        self,
        limits: AdmissionLimits,
        engine: Engine,
        fleet: Callable[[], FleetLoad],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.limits = limits
        self._engine = engine
        self._fleet = fleet
        self.requests = 0
        self.body_bytes = 0
        self.large_bodies = LargeBodies()
        self.refused = Counter(
            "foveal_http_refused", "HTTP requests refused before they were worked on.",
            ["reason"], registry=registry,
        )
        for name, text, count in (
            ("foveal_http_requests", "HTTP requests under way.", lambda: self.requests),
            ("foveal_http_body_bytes",
             "Bytes of bodies of requests under way, and of media fetched for them.",
             lambda: self.body_bytes),
            ("foveal_http_bodies_waiting", "Large bodies that wait for their turn.",
             lambda: self.large_bodies.waiting),
        ):
            Gauge(name, text, registry=registry).set_function(count)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within, one more request is under way.

        Raises:
            GracefulHTTPError: there is no room for it: 503 where another frontend may have
                room, 429 where the fleet has none.
        """
        self._check()
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextmanager
    def body(self) -> Iterator[Body]:
        """Within, the body of a request takes memory."""
        body = Body(self)
        token = current_body.set(body)
        try:
            yield body
        finally:
            current_body.reset(token)
            body.end()

    def _check(self) -> None:
        limits = self.limits
        if self.requests >= limits.requests:
            raise _busy("requests", f"{self.requests} requests are under way")
        load = self._fleet()
        # Those that are being read, fetched or processed will be in flight soon.
        coming = max(0, self.requests - load.own_requests)
        for reason, count, limit in (
            ("requests per worker", load.requests + coming, limits.requests_per_worker),
            ("prefill tokens per worker", load.prefill_tokens,
             limits.prefill_tokens_per_worker),
        ):
            if limit is not None and load.workers and count >= limit * load.workers:
                text = f"The {load.workers} workers have as much to do as they may"
                raise NotAdmitted(
                    reason, f"{text} ({reason}). Please try again later.",
                    HTTPStatus.TOO_MANY_REQUESTS,
                )
        unknown = max(0, self.requests - self._engine.get_num_unfinished_requests())
        self._engine.check_admission(1 + unknown)


class Body:
    """The bytes of one request's body, and of the media fetched for it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._arrived = 0
        self._counted = 0
        self._ended = False
        self._turn: Turn | None = None

    def grow_to(self, nbytes: int) -> None:
        """Count a body of ``nbytes``, of which some may have been counted already.

        Raises:
            NotAdmitted: it is too large (413), or bodies take too much memory (503).
        """
        limits = self._admission.limits
        if nbytes > limits.request_bytes:
            raise NotAdmitted(
                "too large",
                f"A request may have {limits.request_bytes / MIB:g} MiB (--max-request-mb).",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        self._add(max(0, nbytes - self._arrived))
        self._arrived = max(self._arrived, nbytes)

    async def take_turn(self) -> None:
        """Now that it has arrived, wait until it may be worked on."""
        if self._arrived >= LARGE_BYTES:
            self._turn = await self._admission.large_bodies.turn()

    def end_turn(self) -> None:
        """The work on it is done, or waits: let others begin."""
        if self._turn is not None:
            self._turn.end()

    def fetched(self, nbytes: int) -> None:
        """Count media that stay in memory as long as the request.

        Raises:
            NotAdmitted: there is no room for them (503).
        """
        self._add(nbytes)

    def end(self) -> None:
        """The request is over: what is still being fetched for it counts no more."""
        self._ended = True
        self.end_turn()
        self._admission.body_bytes -= self._counted

    def _add(self, nbytes: int) -> None:
        if self._ended:
            return
        if self._admission.body_bytes + nbytes > self._admission.limits.body_bytes:
            raise _busy("body bytes", "the requests under way take as much memory as they may")
        self._admission.body_bytes += nbytes
        self._counted += nbytes


current_body: ContextVar[Body | None] = ContextVar("current_body", default=None)
"""Set while an HTTP request is served. Tasks made for it inherit it."""


def let_others_begin() -> None:
    """The request that is being served waits from here on, or has been sent."""
    if (body := current_body.get()) is not None:
        body.end_turn()


def too_slow(seconds: float) -> NotAdmitted:
    """A body that did not arrive in time."""
    return NotAdmitted(
        "too slow", f"The request did not arrive within {seconds:g} seconds.",
        HTTPStatus.REQUEST_TIMEOUT,
    )


def _busy(reason: str, text: str) -> NotAdmitted:
    return NotAdmitted(
        reason, f"This server is busy: {text}. Please try again later.",
        HTTPStatus.SERVICE_UNAVAILABLE,
    )

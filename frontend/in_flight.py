"""The requests that workers have, from routing to the last output.

Each is kept whole until it is over, so that it can be sent again when its worker is lost,
and its tensors stay in place until the worker that reads them confirms that it has let go.

vLLM names relied on: EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs, FinishReason;
GracefulHTTPError.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Set
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

from frontend.metrics import FrontendMetrics
from frontend.outputs import OutputStream
from frontend.receipt import Routed
from frontend.request_items import is_by_reference, with_tensors
from frontend.request_log import ABORT, LOST, RequestLog, SendTimes
from frontend.resumption import CannotResume, Resumption, resume
from frontend.router.block_hashes import RequestBlocks, RequestHasher
from frontend.router.router import Route, Router
from frontend.worker_pool import Worker, WorkerPool
from transfer.arena import Arena
from transfer.messages import (
    AbortRequests,
    AddRequest,
    TensorsMissing,
    encode_payload,
)

logger = logging.getLogger(__name__)

_CHILD = re.compile(r"\d+_(.+)")
"""Ids that vLLM's ParentRequest gives to the children of a request with n > 1."""

NOBODY = ""

PARK_SECONDS = 90.0
"""A worker that cannot reach its frontend drops its requests within 10 s, and its engine
is past them, or taken for dead, within another 60 s (workers.frontends, workers.outbox)."""


class NoWorkers(GracefulHTTPError):
    """No worker is ready; vLLM answers 503."""

    def __init__(self, waited: float) -> None:
        super().__init__(
            f"No worker became ready within {waited:.0f} seconds. Please try again later.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class AnswerLost(GracefulHTTPError):
    """The answer was lost with its worker; vLLM answers 503, or says so in the stream."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "The worker that computed this answer was lost, and the answer could not go on "
            f"elsewhere: {why}. Please send the request again.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


@dataclass
class _Sent:
    """A request that a worker has. Keeps its tensors in place as long as it lives."""

    request: EngineCoreRequest
    """As it came."""
    worker: str
    """Who has it, or NOBODY while it waits for one."""
    computed: bool = False
    """Whether that worker has computed its prompt."""
    answered: list[int] = field(default_factory=list)
    """The tokens that have come back."""
    resumption: Resumption | None = None
    """How it goes on, if a worker was lost after the first of them."""
    aborted: bool = False
    in_parts: bool = False
    """Whether its input streams in."""
    unrepeatable: str = ""
    """What came with its tokens that cannot be had for some of them only."""
    parts: list[EngineCoreRequest] = field(default_factory=list)
    """What its worker was sent of it, kept for the tensors."""
    tries: set[str] = field(default_factory=set)
    """Workers it was sent to."""
    losses: int = 0
    """Workers that were lost with it, those left out that had said they would leave."""


class InFlight:
    """Sends requests to workers, and to others when those are lost."""

    def __init__(
        self,
        router: Router,
        metrics: FrontendMetrics,
        log: RequestLog,
        arena: Arena | None,
        outputs: OutputStream,
        worker_wait_timeout: float,
        migration_limit: int,
    ) -> None:
        """``worker_wait_timeout``: how long a request waits for a worker, in seconds.

        ``migration_limit``: how many lost workers a request outlives. One that brings
        workers down must not bring down all.
        """
        self.hasher: RequestHasher | None = None
        """Set once the first worker has said how its engine hashes."""
        self._router = router
        self._metrics = metrics
        self._log = log
        self._arena = arena
        self._outputs = outputs
        self._worker_wait_timeout = worker_wait_timeout
        self._migration_limit = migration_limit
        self._pool: WorkerPool | None = None
        self._sent: dict[str, _Sent] = {}
        self._families: dict[str, str] = {}
        """Parent of an n > 1 request -> the worker that its first child went to."""
        self._parked: dict[str, tuple[list[EngineCoreRequest], asyncio.TimerHandle]] = {}
        """Requests that lost workers had, by worker, and when they are given up."""
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sent)

    def start(self, pool: WorkerPool) -> None:
        """Use the workers of ``pool``."""
        self._pool = pool

    @property
    def pool(self) -> WorkerPool:
        if self._pool is None:
            raise RuntimeError("there are no workers before the start")
        return self._pool

    def close(self) -> None:
        """Let go of everything."""
        for task in self._tasks:
            task.cancel()
        self._sent.clear()
        for worker in list(self._parked):
            self.release(worker)

    # Sending.

    async def add(
        self, request: EngineCoreRequest, blocks: RequestBlocks | None = None
    ) -> Routed:
        """Route a request and send it; without ``blocks`` its prompt is hashed first.

        Raises:
            NoWorkers: none was ready in time.
        """
        if not await self.pool.wait_until_ready(self._worker_wait_timeout):
            self._log.no_worker()
            raise NoWorkers(self._worker_wait_timeout)
        # A request whose input streams in comes in parts, all for one worker.
        earlier = self._sent.get(request.request_id)
        pinned = earlier.worker if earlier else None
        route, transfer = self._route_and_send(request, pinned, blocks=blocks)
        return Routed(
            route.worker, route.overlap_blocks, route.prompt_blocks, transfer,
            route.images.held, route.images.needed, request.request_id,
        )

    def abort(self, request_ids: list[str]) -> None:
        """Have workers drop requests; those that are over or unknown are ignored."""
        by_worker: dict[str, list[str]] = {}
        for request_id in request_ids:
            sent = self._sent.get(request_id)
            if sent is None or sent.aborted:
                continue
            self._log.finished(request_id, ABORT)
            if sent.worker == NOBODY:
                self._forget(request_id)
            else:
                sent.aborted = True  # its tensors stay until the worker confirms
                self._settle(request_id)
                by_worker.setdefault(sent.worker, []).append(request_id)
        workers = self.pool.reachable_workers()
        for name, theirs in by_worker.items():
            if name in workers:
                workers[name].link.send(AbortRequests(theirs))

    def _route_and_send(
        self,
        request: EngineCoreRequest,
        pinned: str | None = None,
        tried: Set[str] = frozenset(),
        blocks: RequestBlocks | None = None,
    ) -> tuple[Route, str]:
        """Returns where it goes and how its tensors do."""
        began = time.perf_counter()
        route, worker = self._route(request, pinned, tried, blocks)
        decided = time.perf_counter()
        transfer = self._send(request, worker, held=route.images.shared)
        times = SendTimes(began, decided, time.perf_counter())
        self._log.routed(request, route, transfer, times)
        return route, transfer

    def _route(
        self,
        request: EngineCoreRequest,
        pinned: str | None = None,
        tried: Set[str] = frozenset(),
        blocks: RequestBlocks | None = None,
    ) -> tuple[Route, Worker]:
        """Choose the worker and charge it, without giving up the event loop.

        Raises:
            NoWorkers: none is ready.
        """
        workers = self.pool.ready_workers()
        if pinned is not None and pinned in (reachable := self.pool.reachable_workers()):
            workers = {pinned: reachable[pinned]}  # it has the rest, even if it drains
        candidates = [name for name in workers if name not in tried] or list(workers)
        if not candidates:
            raise NoWorkers(0)
        if blocks is None and self.hasher is not None:
            blocks = self.hasher.hash(request)
        family = _family(request.request_id)
        route = self._router.route(
            request.request_id,
            blocks,
            _num_tokens(request),
            candidates,
            self._families.get(family) if family else pinned,
        )
        if family:
            self._families[family] = route.worker
        return route, workers[route.worker]

    def _send(
        self,
        request: EngineCoreRequest,
        worker: Worker,
        *,
        inline: bool = False,
        held: Set[str] = frozenset(),
    ) -> str:
        """Send a request to its worker; returns how its tensors go.

        Those of images in ``held``, whose encoder output the worker has, do not go inline.
        """
        transfer = "none"
        outgoing = request
        if request.mm_features:
            transfer = worker.transfer if is_by_reference(request) and not inline else "inline"
        began = time.perf_counter()
        if transfer == "inline":
            outgoing = with_tensors(request, self._arena, without=held)
        sent = self._sent.setdefault(request.request_id, _Sent(request, worker.name))
        sent.worker = worker.name
        sent.in_parts |= request.resumable
        if not any(part is request for part in sent.parts):
            sent.parts.append(request)
        sent.tries.add(worker.name)
        part = next(n for n, each in enumerate(sent.parts) if each is request)
        charged = self._router.load.charged(request.request_id)
        message = AddRequest(
            request.request_id, part, charged.prefill_tokens, charged.blocks
        )
        payload = encode_payload(outgoing)
        if transfer == "inline":
            nbytes = sum(len(frame) for frame in payload)
            self._metrics.sent_inline(nbytes, time.perf_counter() - began)
        worker.link.send(message, payload)
        return transfer

    # What workers say, and when they are lost.

    def on_lost(self, worker: Worker) -> None:
        """Move or end the requests of a worker that is gone."""
        theirs = [s for s in self._sent.values() if s.worker == worker.name]
        self._park(worker.name, [part for sent in theirs for part in sent.parts])
        for sent in theirs:
            sent.worker = NOBODY
            sent.computed = False
            sent.losses += not worker.draining
            if sent.aborted:
                self._forget(sent.request.request_id)
            elif why := self._prepare_to_move(sent):
                self._fail(sent, why)
            elif self.pool.ready_workers():
                self._resend(sent)
            else:
                self._start(self._resend_when_ready(sent.request.request_id))

    def _prepare_to_move(self, sent: _Sent) -> str:
        """Settle how a request goes on elsewhere; returns why it cannot, if it cannot."""
        if sent.losses > self._migration_limit:
            return f"{sent.losses} workers were lost with it"
        if sent.in_parts:
            return "its input streams in"
        if sent.unrepeatable:
            return f"it returns {sent.unrepeatable}"
        if sent.answered:
            try:
                sent.resumption = resume(sent.request, sent.answered)
            except CannotResume as reason:
                return str(reason)
            sent.parts = [sent.resumption.request]
        return ""

    def _park(self, worker: str, requests: list[EngineCoreRequest]) -> None:
        """Keep the tensors of requests that a lost worker may still be reading."""
        if not requests:
            return
        timer = asyncio.get_running_loop().call_later(PARK_SECONDS, self.release, worker)
        if worker in self._parked:
            earlier, old_timer = self._parked[worker]
            old_timer.cancel()
            requests = earlier + requests
        self._parked[worker] = requests, timer

    def release(self, worker: str) -> None:
        """Let go of what a lost worker may have been reading: it has stopped."""
        if worker in self._parked:
            _, timer = self._parked.pop(worker)
            timer.cancel()

    def on_outputs(self, worker: Worker, outputs: EngineCoreOutputs) -> None:
        """Pass on what a worker says of the requests that are there."""
        outputs.outputs = [
            news
            for output in outputs.outputs
            if self._is_at(output.request_id, worker)  # else moved since, or over
            and (news := self._take(self._sent[output.request_id], output)) is not None
        ]
        if outputs.outputs or outputs.scheduler_stats is not None:
            self._outputs.put(worker.name, outputs)

    def _take(self, sent: _Sent, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Note what an output says of its request; returns what the client is to get."""
        request_id = output.request_id
        if sent.aborted:
            if output.finished:
                self._forget(request_id)
            return None
        if output.new_token_ids and not sent.computed:
            sent.computed = True
            self._router.first_token(request_id)
            if not sent.answered:
                self._log.first_token(request_id, output)
        if output.finished:
            self._forget(request_id)
        if sent.resumption is not None:
            try:
                news = sent.resumption.take(output)
            except CannotResume as reason:
                self._give_up(sent, str(reason))
                return None
            if news is None:
                return None
            output = news
        sent.answered += output.new_token_ids
        if output.routed_experts is not None:
            sent.unrepeatable = "the experts that were used"
        if output.finished:
            self._log.finished(request_id, str(output.finish_reason))
        return output

    def _give_up(self, sent: _Sent, why: str) -> None:
        """End a request that a worker may still be computing."""
        request_id = sent.request.request_id
        self._end_with_error(request_id, why)
        self.abort([request_id])

    def on_missing(self, worker: Worker, message: TensorsMissing) -> None:
        """Send a request again, with its tensors."""
        sent = self._sent.get(message.request_id)
        if sent is None or sent.worker != worker.name or message.part >= len(sent.parts):
            return
        if sent.aborted:
            return  # the worker confirms it, and may have other parts of it
        self._metrics.tensors_missing.inc()
        logger.warning("worker %s lacks tensors: %s", worker.name, message.reason)
        self._send(sent.parts[message.part], worker, inline=True)

    def on_released(self, worker: Worker, request_ids: list[str]) -> None:
        """The worker has let go of aborted requests."""
        for request_id in request_ids:
            if self._is_at(request_id, worker):
                self._forget(request_id)

    def _resend(self, sent: _Sent) -> None:
        """Send a request that has lost its worker to another."""
        request = sent.resumption.request if sent.resumption else sent.request
        route, _ = self._route_and_send(request, tried=sent.tries)
        self._metrics.moved.inc()
        logger.info(
            "request %s goes to %s now, behind %d tokens",
            request.request_id, route.worker, len(sent.answered),
        )

    async def _resend_when_ready(self, request_id: str) -> None:
        """As for a new request: wait for a worker, so long and no longer."""
        ready = await self.pool.wait_until_ready(self._worker_wait_timeout)
        # Looked up only now, so that one that was aborted keeps no tensors in place.
        sent = self._sent.get(request_id)
        if sent is None or sent.worker != NOBODY:
            return
        if ready:
            self._resend(sent)
        else:
            self._fail(sent, f"no other was ready within {self._worker_wait_timeout:.0f} s")

    def _fail(self, sent: _Sent, why: str) -> None:
        """End a request whose worker is lost."""
        request_id = sent.request.request_id
        self._forget(request_id)
        self._end_with_error(request_id, why)

    def _end_with_error(self, request_id: str, why: str) -> None:
        logger.warning("request %s cannot go on: %s", request_id, why)
        self._metrics.failed.inc()
        self._log.finished(request_id, LOST)
        self._outputs.fail(request_id, AnswerLost(why))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_at(self, request_id: str, worker: Worker) -> bool:
        sent = self._sent.get(request_id)
        return sent is not None and sent.worker == worker.name

    def _settle(self, request_id: str) -> None:
        """A request is no load any more."""
        self._router.finish(request_id)
        family = _family(request_id)
        if family:
            self._families.pop(family, None)

    def _forget(self, request_id: str) -> None:
        """A request is over and nobody reads its tensors."""
        self._settle(request_id)
        self._sent.pop(request_id, None)


def _family(request_id: str) -> str | None:
    child = _CHILD.fullmatch(request_id)
    return child[1] if child else None


def _num_tokens(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else int(request.prompt_embeds.shape[0])

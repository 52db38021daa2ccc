"""The requests that workers have, from routing to the last output.

Each is kept whole until it is over, so that it can be sent again when its worker is lost,
and its tensors stay in place until the worker that reads them confirms that it has let go.

vLLM names relied on: EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Set
from contextlib import contextmanager
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

from frontend.metrics import FrontendMetrics
from frontend.outputs import OutputStream
from frontend.parked_requests import ParkedRequests
from frontend.receipt import Routed
from frontend.request_items import is_by_reference, with_tensors
from frontend.request_log import ABORT, LOST, RequestLog, SendTimes
from frontend.resumption import CannotResume, resume
from frontend.router.block_hashes import RequestBlocks, RequestHasher
from frontend.router.router import Route, Router
from frontend.sent_request import (
    NOBODY,
    AnswerLost,
    NoWorkers,
    SentRequest,
    family_of,
    num_tokens_of,
)
from frontend.worker import Worker
from frontend.worker_pool import WorkerPool
from transfer.arena import Arena
from transfer.messages import AbortRequests, AddRequest, TensorsMissing
from transfer.payload import encode_payload

logger = logging.getLogger(__name__)

OUR_FAULT = "there was an error in this server"


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
        self._coming: set[str] = set()
        """Requests that wait, for their images or for a worker, before they are sent."""
        self._sent: dict[str, SentRequest] = {}
        self._families: dict[str, str] = {}
        """Parent of an n > 1 request -> the worker that its first child went to."""
        self.parked = ParkedRequests()
        """Requests that lost workers had."""
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
        self.parked.close()

    # Sending.

    @contextmanager
    def coming(self, request_id: str) -> Iterator[None]:
        """Within, a request is going to be added, unless it is aborted before."""
        self._coming.add(request_id)
        try:
            yield
        finally:
            self._coming.discard(request_id)

    async def add(
        self, request: EngineCoreRequest, blocks: RequestBlocks | None = None
    ) -> Routed | None:
        """Route a request and send it; without ``blocks`` its prompt is hashed first.

        Call it within ``coming``. None: it was aborted before it was sent.

        Raises:
            NoWorkers: none was ready in time.
        """
        ready = await self.pool.wait_until_ready(self._worker_wait_timeout)
        if request.request_id not in self._coming:
            return None
        if not ready:
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
        self._coming.difference_update(request_ids)
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
        known = request.request_id in self._sent
        route, worker = self._route(request, pinned, tried, blocks)
        decided = time.perf_counter()
        try:
            transfer = self._send(request, worker, held=route.images.shared)
        except BaseException:
            self._settle(request.request_id)
            if not known:  # else a worker may be reading what came before
                self._sent.pop(request.request_id, None)
            raise
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
        family = family_of(request.request_id)
        route = self._router.route(
            request.request_id,
            blocks,
            num_tokens_of(request),
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
        sent = self._sent.setdefault(request.request_id, SentRequest(request, worker.name))
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
        self.parked.park(worker.name, [part for sent in theirs for part in sent.parts])
        for sent in theirs:
            sent.worker = NOBODY
            sent.computed = False
            sent.losses += not worker.draining
        for sent in theirs:
            if sent.aborted:
                self._forget(sent.request.request_id)
                continue
            try:
                self._move(sent)
            except Exception:  # whatever it is, the others must go on
                logger.exception("request %r was not moved", sent.request.request_id)
                self._give_up(sent, OUR_FAULT)

    def _move(self, sent: SentRequest) -> None:
        """Have a request that lost its worker go on elsewhere, or end."""
        if why := self._prepare_to_move(sent):
            self._fail(sent, why)
        elif self.pool.ready_workers():
            self._resend(sent)
        else:
            self._start(self._resend_when_ready(sent.request.request_id))

    def _prepare_to_move(self, sent: SentRequest) -> str:
        """Settle how a request goes on elsewhere; returns why it cannot, if it cannot."""
        if sent.losses > self._migration_limit:
            return f"{sent.losses} workers were lost with it"
        if sent.in_parts:
            return "its input streams in"
        if sent.unrepeatable:
            return f"it returns {sent.unrepeatable}"
        if sent.answered:
            try:
                sent.resumption = resume(
                    sent.request, sent.answered, self.pool.own_logits_processors()
                )
            except CannotResume as reason:
                return str(reason)
            sent.parts = [sent.resumption.request]
        return ""

    def on_outputs(self, worker: Worker, outputs: EngineCoreOutputs) -> None:
        """Pass on what a worker says of the requests that are there."""
        outputs.outputs = [
            news
            for output in outputs.outputs
            if self._is_at(output.request_id, worker)  # else moved since, or over
            and (news := self._take_or_give_up(output)) is not None
        ]
        if outputs.outputs or outputs.scheduler_stats is not None:
            self._outputs.put(worker.name, outputs)

    def _take_or_give_up(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        sent = self._sent[output.request_id]
        try:
            return self._take(sent, output)
        except CannotResume as reason:
            self._give_up(sent, str(reason))
        except Exception:  # whatever it is, the others must go on
            logger.exception("an output of request %r cannot be used", output.request_id)
            self._give_up(sent, OUR_FAULT)
        return None

    def _take(self, sent: SentRequest, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Note what an output says of its request; returns what the client is to get.

        Raises:
            CannotResume: the request cannot go on behind the tokens that it gave.
        """
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
            news = sent.resumption.take(output)
            if news is None:
                return None
            output = news
        sent.answered += output.new_token_ids
        if output.routed_experts is not None:
            sent.unrepeatable = "the experts that were used"
        if output.finished:
            self._log.finished(request_id, str(output.finish_reason))
        return output

    def _give_up(self, sent: SentRequest, why: str) -> None:
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

    def _resend(self, sent: SentRequest) -> None:
        """Send a request that has lost its worker to another."""
        request = sent.resumption.request if sent.resumption else sent.request
        route, _ = self._route_and_send(request, tried=sent.tries)
        self._metrics.moved.inc()
        logger.info(
            "request %r goes to %s now, behind %d tokens",
            request.request_id, route.worker, len(sent.answered),
        )

    async def _resend_when_ready(self, request_id: str) -> None:
        """As for a new request: wait for a worker, so long and no longer."""
        ready = await self.pool.wait_until_ready(self._worker_wait_timeout)
        # Looked up only now, so that one that was aborted keeps no tensors in place.
        sent = self._sent.get(request_id)
        if sent is None or sent.worker != NOBODY:
            return
        if not ready:
            self._fail(sent, f"no other was ready within {self._worker_wait_timeout:.0f} s")
            return
        try:
            self._resend(sent)
        except Exception:  # whatever it is, its client must be told
            logger.exception("request %r was not moved", request_id)
            self._give_up(sent, OUR_FAULT)

    def _fail(self, sent: SentRequest, why: str) -> None:
        """End a request whose worker is lost."""
        request_id = sent.request.request_id
        self._forget(request_id)
        self._end_with_error(request_id, why)

    def _end_with_error(self, request_id: str, why: str) -> None:
        logger.warning("request %r cannot go on: %s", request_id, why)
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
        family = family_of(request_id)
        if family:
            self._families.pop(family, None)

    def _forget(self, request_id: str) -> None:
        """A request is over and nobody reads its tensors."""
        self._settle(request_id)
        self._sent.pop(request_id, None)

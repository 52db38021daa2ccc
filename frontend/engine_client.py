"""vLLM's engine client, with a fleet of workers where vLLM has one engine.

``AsyncLLM`` is a renderer, an input processor, an output processor and an
``EngineCoreClient``. This is that client: everything else of ``AsyncLLM`` stays vLLM's.

vLLM names relied on: EngineCoreClient and the methods of it that AsyncLLM calls;
EngineCoreRequest, MultiModalFeatureSpec; GracefulHTTPError; VllmConfig fields that
EngineCoreReadyResponse updates in MPClient._apply_ready_response.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Coroutine, Sequence, Set
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from frontend.adapters import name_adapter
from frontend.admin_calls import AdminCalls
from frontend.arena_cache import ArenaProcessorCache
from frontend.embedding_checks import EmbeddingLimits
from frontend.index_sweeper import IndexSweeper
from frontend.kv_checks import KvChecks
from frontend.metrics import FrontendMetrics
from frontend.outputs import ENGINE_INDEX, OutputStream
from frontend.receipt import Routed, current_receipt
from frontend.request_items import identify, is_by_reference, with_tensors
from frontend.router.block_hashes import RequestHasher
from frontend.router.router import Route, Router
from frontend.worker_pool import Worker, WorkerPool
from transfer.arena import Arena
from transfer.messages import (
    AbortRequests,
    AddRequest,
    AskSnapshot,
    CallResult,
    Frame,
    KvDelta,
    KvSnapshot,
    LoadReport,
    Message,
    Outputs,
    Pong,
    Released,
    TensorsMissing,
    WorkerFacts,
    decode_outputs,
    encode_payload,
)

logger = logging.getLogger(__name__)

_CHILD = re.compile(r"\d+_(.+)")
"""Ids that vLLM's ParentRequest gives to the children of a request with n > 1."""


NOBODY = ""

PARK_SECONDS = 90.0
"""A worker that cannot reach its frontend drops its requests within 10 s, and its engine
is past them, or taken for dead, within another 60 s (workers.frontends, workers.outbox)."""

MAX_ATTEMPTS = 3
"""How often a request is sent: one that brings workers down must not bring down all."""


class NoWorkers(GracefulHTTPError):
    """No worker is ready; vLLM answers 503."""

    def __init__(self, waited: float) -> None:
        super().__init__(
            f"No worker became ready within {waited:.0f} seconds. Please try again later.",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


@dataclass
class _Sent:
    """A request that a worker has. Keeps its tensors in place as long as it lives."""

    request: EngineCoreRequest
    worker: str
    """Who has it, or NOBODY while it waits for one."""
    started: bool = False
    """Whether a token has come back."""
    aborted: bool = False
    in_parts: bool = False
    """Whether its input streams in."""
    parts: list[EngineCoreRequest] = field(default_factory=list)
    """All that was sent of it, kept for the tensors; the last is the one to send again."""
    tries: set[str] = field(default_factory=set)
    """Workers it was sent to."""
    attempts: int = 0


class RoutedEngineClient(AdminCalls):
    """Sends every request to one of many workers."""

    def __init__(
        self,
        *,
        supported_tasks: tuple[SupportedTask, ...],
        cache: ArenaProcessorCache | None,
        arena: Arena | None,
        router: Router,
        metrics: FrontendMetrics,
        worker_wait_timeout: float,
        embeddings: EmbeddingLimits | None = None,
    ) -> None:
        super().__init__()
        self._supported_tasks = supported_tasks
        self._cache = cache
        self._arena = arena
        self.router = router
        self._metrics = metrics
        self._worker_wait_timeout = worker_wait_timeout
        self._embeddings = embeddings
        self._sweeper = IndexSweeper(router.index)
        self._checks = KvChecks(router)
        self._outputs = OutputStream()
        self._sent: dict[str, _Sent] = {}
        self._families: dict[str, str] = {}
        """Parent of an n > 1 request -> the worker that its first child went to."""
        self._parked: dict[str, tuple[list[EngineCoreRequest], asyncio.TimerHandle]] = {}
        """Requests that lost workers had, by worker, and when they are given up."""
        self._hasher: RequestHasher | None = None
        self._pool: WorkerPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._learn: Callable[[WorkerFacts], None] = lambda _: None
        self._closing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # What AsyncLLM looks at to tell whether its engine lives: a fleet does not die.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [ENGINE_INDEX]

    def start(self, pool: WorkerPool, learn: Callable[[WorkerFacts], None]) -> None:
        """Begin to use the workers of ``pool``; call on the event loop.

        ``learn`` is called once, with the facts of the first worker.
        """
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._learn = learn
        self.router.frontend = pool.frontend
        pool.start()

    def describe(self) -> dict[str, Any]:
        """What ``GET /v1/fleet`` shows."""
        return {
            "process": os.getpid(),
            "router_mode": self.router.mode,
            "requests": len(self._sent),
            "arena": self._describe_arena(),
            "workers": [
                {
                    **worker.describe(),
                    "requests": self.router.load.own(worker.name).requests,
                    "load": self.router.load.load(worker.name)._asdict(),
                    "kv_caught_up": self.router.plane.caught_up(worker.name),
                    "kv_seq": self.router.plane.seq(worker.name),
                }
                for worker in self.pool.workers
            ],
        }

    async def check_index(self) -> dict[str, dict[str, Any]]:
        """Compare the index with what each worker says it holds, by worker."""
        workers = self.callable_workers()
        checks = await asyncio.gather(*(self._checks.check(worker) for worker in workers))
        return {w.name: check for w, check in zip(workers, checks, strict=True)}

    def _describe_arena(self) -> dict[str, int] | None:
        if self._arena is None or self._cache is None:
            return None
        return {**asdict(self._arena.stats()), "items_without_room": self._cache.inlined}

    def callable_workers(self) -> list[Worker]:
        return list(self.pool.ready_workers().values())

    @property
    def pool(self) -> WorkerPool:
        if self._pool is None:
            raise RuntimeError("the client has not been started")
        return self._pool

    # What AsyncLLM calls for every request.

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Route a request and send it.

        Raises:
            NoWorkers: none was ready in time.
        """
        name_adapter(request)
        if request.mm_features and self._cache is not None:
            identify(request, self._cache, self._embeddings)
        if not await self.pool.wait_until_ready(self._worker_wait_timeout):
            raise NoWorkers(self._worker_wait_timeout)
        # A request whose input streams in comes in parts, all for one worker.
        earlier = self._sent.get(request.request_id)
        route, worker = self._route(request, earlier.worker if earlier else None)
        transfer = self._send(request, worker)
        routed = Routed(route.worker, route.overlap_blocks, route.prompt_blocks, transfer)
        self._metrics.count(routed)
        if (receipt := current_receipt.get()) is not None:
            receipt.routed.append(routed)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        by_worker: dict[str, list[str]] = {}
        for request_id in request_ids:
            sent = self._sent.get(request_id)
            if sent is None or sent.aborted:
                continue
            if sent.worker == NOBODY:
                self._forget(request_id)
            else:
                sent.aborted = True  # its tensors stay until the worker confirms
                self._settle(request_id)
                by_worker.setdefault(sent.worker, []).append(request_id)
        workers = self.pool.ready_workers()
        for name, theirs in by_worker.items():
            if name in workers:
                workers[name].link.send(AbortRequests(theirs))

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        # Asked before any worker is there; all run this frontend's model.
        return self._supported_tasks

    def dp_engines_running(self) -> bool:
        return bool(self._sent)

    def shutdown(self, timeout: float | None = None) -> None:
        """Leave the workers. May be called from any thread, and more than once."""
        if self.resources.engine_dead or self._loop is None:
            return
        self.resources.engine_dead = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_close)

    def _begin_close(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self._close())

    async def closed(self) -> None:
        """Wait until what ``shutdown`` began is done."""
        await asyncio.sleep(0)  # let it begin
        if self._closing is not None:
            await self._closing

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._sweeper.close()
        self._outputs.close(EngineDeadError())
        await self.pool.close()
        self._sent.clear()
        for worker in list(self._parked):
            self._release(worker)

    # Sending.

    def _route(
        self,
        request: EngineCoreRequest,
        pinned: str | None = None,
        tried: Set[str] = frozenset(),
    ) -> tuple[Route, Worker]:
        """Choose the worker and charge it, without giving up the event loop.

        Raises:
            NoWorkers: none is ready.
        """
        workers = self.pool.ready_workers()
        candidates = [name for name in workers if name not in tried] or list(workers)
        if not candidates:
            raise NoWorkers(0)
        blocks = self._hasher.hash(request) if self._hasher is not None else None
        family = _family(request.request_id)
        route = self.router.route(
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
        self, request: EngineCoreRequest, worker: Worker, *, inline: bool = False
    ) -> str:
        """Send a request to its worker; returns how its tensors go."""
        transfer = "none"
        outgoing = request
        if request.mm_features:
            transfer = worker.transfer if is_by_reference(request) and not inline else "inline"
            if transfer == "inline":
                outgoing = with_tensors(request, self._arena)
        sent = self._sent.setdefault(request.request_id, _Sent(request, worker.name))
        sent.worker = worker.name
        sent.attempts += 1
        sent.in_parts |= request.resumable
        if not any(part is request for part in sent.parts):
            sent.parts.append(request)
        sent.tries.add(worker.name)
        part = next(n for n, each in enumerate(sent.parts) if each is request)
        charged = self.router.load.charged(request.request_id)
        message = AddRequest(
            request.request_id, part, charged.prefill_tokens, charged.blocks
        )
        worker.link.send(message, encode_payload(outgoing))
        return transfer

    # What workers say.

    async def prepare(self, worker: Worker) -> None:
        """Bring a worker that has just answered up to date."""
        # If it was lost: it answers once it is done with what it had before.
        self._release(worker.name)
        facts = worker.facts
        if facts is not None and self._hasher is None:
            self._hasher = RequestHasher(
                facts.block_size,
                facts.hash_algorithm,
                facts.root_hash,
                facts.drops_last_matched_block,
            )
            self.router.images.capacity_tokens = facts.encoder_cache_tokens
            self._learn(facts)
        await self.bring_up_to_date(worker)
        if self.router.plane.on_ready(worker.name, worker.epoch):
            worker.link.send(AskSnapshot())

    def on_lost(self, worker: Worker) -> None:
        """Move or end the requests of a worker that is gone."""
        self.router.drop_worker(worker.name)
        self._sweeper.wake()
        self._outputs.drop_worker(worker.name)
        self.fail_calls(worker.name)
        theirs = [s for s in self._sent.values() if s.worker == worker.name]
        self._park(worker.name, [part for sent in theirs for part in sent.parts])
        for sent in theirs:
            sent.worker = NOBODY
            if sent.aborted:
                self._forget(sent.request.request_id)
            elif sent.started or sent.in_parts or sent.attempts >= MAX_ATTEMPTS:
                self._fail(sent)
            elif self.pool.ready_workers():
                self._resend(sent)
            else:
                self._start(self._resend_when_ready(sent.request.request_id))

    def on_gone(self, worker: Worker) -> None:
        self._release(worker.name)

    def _park(self, worker: str, requests: list[EngineCoreRequest]) -> None:
        """Keep the tensors of requests that a lost worker may still be reading."""
        if not requests:
            return
        timer = asyncio.get_running_loop().call_later(PARK_SECONDS, self._release, worker)
        if worker in self._parked:
            earlier, old_timer = self._parked[worker]
            old_timer.cancel()
            requests = earlier + requests
        self._parked[worker] = requests, timer

    def _release(self, worker: str) -> None:
        if worker in self._parked:
            _, timer = self._parked.pop(worker)
            timer.cancel()

    def on_message(self, worker: Worker, message: Message, payload: Sequence[Frame]) -> None:
        match message:
            case Outputs():
                self._on_outputs(worker, decode_outputs(payload))
            case Released():
                for request_id in message.request_ids:
                    if self._is_at(request_id, worker):
                        self._forget(request_id)
            case TensorsMissing():
                self._on_missing(worker, message)
            case KvSnapshot():
                if not self._checks.on_snapshot(worker.name, message):
                    behind = self.router.plane.on_snapshot(worker.name, message)
                    self._ask_if(behind, worker)
            case Pong():
                plane = self.router.plane
                missed = plane.on_heartbeat(worker.name, message.epoch, message.seq)
                self._ask_if(missed, worker)
            case CallResult():
                self.on_result(message, payload)
            case _:
                logger.warning("%s sent %s", worker.name, type(message).__name__)

    def on_delta(self, worker: Worker, delta: KvDelta) -> None:
        self._ask_if(self.router.plane.on_delta(worker.name, delta), worker)

    def on_report(self, worker: Worker, report: LoadReport) -> None:
        self._ask_if(self.router.on_report(worker.name, report), worker)

    def _ask_if(self, needed: bool, worker: Worker) -> None:
        """Ask for a snapshot where the KV plane needs one."""
        if needed:
            worker.link.send(AskSnapshot())
        self._sweeper.wake()

    def _on_outputs(self, worker: Worker, outputs: EngineCoreOutputs) -> None:
        current = []
        for output in outputs.outputs:
            if not self._is_at(output.request_id, worker):
                continue  # moved elsewhere since, or over
            sent = self._sent[output.request_id]
            if sent.aborted:
                if output.finished:
                    self._forget(output.request_id)
                continue
            current.append(output)
            if output.new_token_ids and not sent.started:
                sent.started = True
                self.router.first_token(output.request_id)
            if output.finished:
                self._forget(output.request_id)
        outputs.outputs = current
        if current or outputs.scheduler_stats is not None:
            self._outputs.put(worker.name, outputs)

    def _on_missing(self, worker: Worker, message: TensorsMissing) -> None:
        sent = self._sent.get(message.request_id)
        if sent is None or sent.worker != worker.name or message.part >= len(sent.parts):
            return
        if sent.aborted:
            return  # the worker confirms it, and may have other parts of it
        self._metrics.tensors_missing.inc()
        logger.warning("worker %s lacks tensors: %s", worker.name, message.reason)
        self._send(sent.parts[message.part], worker, inline=True)

    def _resend(self, sent: _Sent) -> None:
        """Send a request that has produced nothing to another worker."""
        route, worker = self._route(sent.request, tried=sent.tries)
        self._metrics.moved.inc()
        logger.info("request %s goes to %s now", sent.request.request_id, route.worker)
        self._send(sent.request, worker)

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
            self._fail(sent)

    def _fail(self, sent: _Sent) -> None:
        """End a request whose worker is lost."""
        request_id = sent.request.request_id
        self._forget(request_id)
        self._metrics.failed.inc()
        self._outputs.fail([request_id])

    def _is_at(self, request_id: str, worker: Worker) -> bool:
        sent = self._sent.get(request_id)
        return sent is not None and sent.worker == worker.name

    def _settle(self, request_id: str) -> None:
        """A request is no load any more."""
        self.router.finish(request_id)
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

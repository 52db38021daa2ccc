"""vLLM's engine client, with a fleet of workers where vLLM has one engine.

``AsyncLLM`` is a renderer, an input processor, an output processor and an
``EngineCoreClient``. This is that client: everything else of ``AsyncLLM`` stays vLLM's.

vLLM names relied on: EngineCoreClient and the methods of it that AsyncLLM calls;
EngineCoreRequest; VllmConfig fields that EngineCoreReadyResponse updates in
MPClient._apply_ready_response.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from frontend.adapters import name_adapter
from frontend.admin_calls import AdminCalls
from frontend.admission import let_others_begin
from frontend.arena_cache import ArenaProcessorCache
from frontend.embedding_checks import EmbeddingLimits
from frontend.embedding_moves import EmbeddingMoves
from frontend.encode_workers import EncodeWorkers
from frontend.in_flight import InFlight
from frontend.index_sweeper import IndexSweeper
from frontend.kv_checks import KvChecks
from frontend.log_lines import log_routed
from frontend.metrics import FrontendMetrics
from frontend.outputs import ENGINE_INDEX, OutputStream
from frontend.receipt import current_receipt
from frontend.request_items import identify, is_by_reference, with_tensors
from frontend.request_log import RequestLog
from frontend.router.block_hashes import RequestBlocks, RequestHasher
from frontend.router.router import Router
from frontend.worker import Worker
from frontend.worker_pool import WorkerPool
from transfer.arena import Arena
from transfer.messages import (
    AddRequest,
    AskSnapshot,
    CallResult,
    EmbeddingExported,
    EmbeddingPulled,
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
)
from transfer.payload import decode_outputs, encode_payload

logger = logging.getLogger(__name__)


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
        migration_limit: int = 3,
        embeddings: EmbeddingLimits | None = None,
        log: RequestLog | None = None,
    ) -> None:
        super().__init__()
        self._supported_tasks = supported_tasks
        self._cache = cache
        self._arena = arena
        self.router = router
        self._metrics = metrics
        self.log = log or RequestLog(metrics)
        self._embeddings = embeddings
        self._sweeper = IndexSweeper(router.index)
        self._checks = KvChecks(router)
        self._outputs = OutputStream()
        self.requests = InFlight(
            router, metrics, self.log, arena, self._outputs, worker_wait_timeout,
            migration_limit,
        )
        self._moves = EmbeddingMoves(router.images, metrics.count_embedding_move)
        self._encoders = EncodeWorkers(
            router, self._send_to_encode, self._moves, metrics.count_encode_job
        )
        self._pool: WorkerPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._learn: Callable[[WorkerFacts], None] = lambda _: None
        self._closing: asyncio.Task[None] | None = None
        # What AsyncLLM looks at to tell whether its engine lives: a fleet does not die.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [ENGINE_INDEX]

    def start(
        self,
        pool: WorkerPool,
        learn: Callable[[WorkerFacts], None],
        end_request: Callable[[str, Exception], None] | None = None,
    ) -> None:
        """Begin to use the workers of ``pool``; call on the event loop.

        ``learn`` is called once, with the facts of the first worker. ``end_request`` ends
        a request, named by its id, with an error whose text reaches the client.
        """
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._learn = learn
        self._outputs.end_request = end_request
        self.router.frontend = pool.frontend
        self.requests.start(pool)
        pool.start()

    def describe(self) -> dict[str, Any]:
        """What ``GET /v1/fleet`` shows."""
        return {
            "process": os.getpid(),
            "router_mode": self.router.mode,
            "requests": len(self.requests),
            "arena": self._describe_arena(),
            "workers": [
                {
                    **worker.describe(),
                    "requests": self.router.load.own(worker.name).requests,
                    "load": self.router.load.load(worker.name)._asdict(),
                    "kv_caught_up": self.router.plane.caught_up(worker.name),
                    "kv_seq": self.router.plane.seq(worker.name),
                    **self.router.images.describe(worker.name),
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

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts that no worker has been charged for yet: their images are
        being encoded.
        """
        return self._encoders.waiting_tokens

    def callable_workers(self) -> list[Worker]:
        return list(self.pool.ready_workers().values())

    def workers_that_encode(self) -> list[Worker]:
        return self.pool.encode_workers()

    @property
    def pool(self) -> WorkerPool:
        if self._pool is None:
            raise RuntimeError("the client has not been started")
        return self._pool

    # What AsyncLLM calls for every request.

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Route a request and send it, unless it is aborted before it can be.

        Raises:
            NoWorkers: none was ready in time.
        """
        name_adapter(request)
        if request.mm_features and self._cache is not None:
            identify(request, self._cache, self._embeddings)
        let_others_begin()  # only workers are waited for from here on
        with self.requests.coming(request.request_id):
            blocks = await self._have_encoded(request)
            routed = await self.requests.add(request, blocks)
        if routed is None:
            return  # vLLM has told its client
        log_routed(routed)
        self._metrics.count(routed)
        if (receipt := current_receipt.get()) is not None:
            receipt.routed.append(routed)

    async def _have_encoded(self, request: EngineCoreRequest) -> RequestBlocks | None:
        """Where there are workers that only encode, leave new images to them.

        Returns the blocks of the prompt, if they had to be hashed for it.
        """
        encoders = self.pool.encode_workers()
        if encoders and request.mm_features and self.requests.hasher is not None:
            generators = self.callable_workers()
            blocks = self.requests.hasher.hash(request)
            await self._encoders.encode(request, blocks, encoders, generators)
            return blocks
        return None

    def _send_to_encode(
        self, request: EngineCoreRequest, worker: Worker, inline: bool
    ) -> None:
        began = time.perf_counter()
        inline = inline or worker.transfer == "inline" or not is_by_reference(request)
        if inline:
            request = with_tensors(request, self._arena)
        payload = encode_payload(request)
        if inline:
            nbytes = sum(len(frame) for frame in payload)
            self._metrics.sent_inline(nbytes, time.perf_counter() - began)
        worker.link.send(AddRequest(request.request_id), payload)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.requests.abort(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        # Asked before any worker is there; all run this frontend's model.
        return self._supported_tasks

    def dp_engines_running(self) -> bool:
        return len(self.requests) > 0

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

    async def _close(self) -> None:
        self._sweeper.close()
        self._outputs.close(EngineDeadError())
        self._encoders.close()
        await self.pool.close()
        self.requests.close()

    # What workers say.

    async def prepare(self, worker: Worker) -> None:
        """Bring a worker that has just answered up to date."""
        self._metrics.worker_came(worker.name)
        # If it was lost: it answers once it is done with what it had before.
        self.requests.parked.release(worker.name)
        if worker.encodes:
            return  # it has no KV cache, and no adapters
        facts = worker.facts
        if facts is not None and self.requests.hasher is None:
            self.requests.hasher = RequestHasher(
                facts.block_size,
                facts.hash_algorithm,
                facts.root_hash,
                facts.drops_last_matched_block,
            )
            self.router.images.capacity_tokens = facts.encoder_cache_tokens
            self.log.block_size = facts.block_size
            self._learn(facts)
        await self.bring_up_to_date(worker)
        if self.router.plane.on_ready(worker.name, worker.epoch):
            worker.link.send(AskSnapshot())

    def on_lost(self, worker: Worker) -> None:
        """Move or end the requests of a worker that is gone."""
        self.router.drop_worker(worker.name)
        self.requests.parked.park(worker.name, self._encoders.on_lost(worker))
        self._sweeper.wake()
        self._outputs.drop_worker(worker.name)
        self.fail_calls(worker.name)
        self.requests.on_lost(worker)

    def on_gone(self, name: str) -> None:
        self.requests.parked.release(name)
        self._metrics.worker_gone(name)

    def on_message(self, worker: Worker, message: Message, payload: Sequence[Frame]) -> None:
        if worker.encodes:
            self._on_encode_worker(worker, message, payload)
            return
        match message:
            case Outputs():
                self.requests.on_outputs(worker, decode_outputs(payload))
            case Released():
                self.requests.on_released(worker, message.request_ids)
            case TensorsMissing():
                self.requests.on_missing(worker, message)
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
            case EmbeddingPulled():
                self._moves.on_message(worker, message)
            case _:
                logger.warning("%s sent %s", worker.name, type(message).__name__)

    def _on_encode_worker(
        self, worker: Worker, message: Message, payload: Sequence[Frame]
    ) -> None:
        match message:
            case Outputs():
                self._encoders.on_outputs(decode_outputs(payload))
            case TensorsMissing():
                if self._encoders.on_missing(message.request_id):
                    self._metrics.tensors_missing.inc()
                    logger.warning("worker %s lacks tensors: %s", worker.name, message.reason)
            case EmbeddingExported():
                self._moves.on_message(worker, message)
            case CallResult():
                self.on_result(message, payload)

    def on_delta(self, worker: Worker, delta: KvDelta) -> None:
        if delta.at:
            self._metrics.delta_age.observe(max(0.0, time.time() - delta.at))
        self._ask_if(self.router.plane.on_delta(worker.name, delta), worker)

    def on_report(self, worker: Worker, report: LoadReport) -> None:
        if worker.encodes:
            self.router.images.on_report(worker.name, report)
            return
        self._ask_if(self.router.on_report(worker.name, report), worker)

    def _ask_if(self, needed: bool, worker: Worker) -> None:
        """Ask for a snapshot where the KV plane needs one."""
        if needed:
            worker.link.send(AskSnapshot())
        self._sweeper.wake()

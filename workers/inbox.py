"""What frontends say, applied to the engine.

vLLM names relied on: AsyncMPClient.collective_rpc_async;
SamplingParams.extra_args.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient

from transfer.arena_view import ArenaView
from transfer.embeddings.store import EmbeddingLease
from transfer.errors import BadMessage, TransferError
from transfer.link import KvPublisher, WorkerLink
from transfer.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    AskSnapshot,
    Bye,
    Call,
    Draining,
    ExportEmbedding,
    Frame,
    Hello,
    KvDelta,
    KvSnapshot,
    Message,
    NixlOffer,
    Ping,
    Pong,
    PullEmbedding,
    Ready,
    Refused,
    ReleaseEmbedding,
    TensorsMissing,
    decode_request,
    encode_payload,
)
from workers.embedding_cache import HostEmbeddings
from workers.embedding_exports import EmbeddingExports
from workers.embedding_pulls import EmbeddingPulls
from workers.engine_calls import EngineCalls
from workers.engine_inputs import EngineInputs
from workers.frontends import SILENT_SECONDS, Frontend, Frontends
from workers.held_tokens import HeldTokens, is_awaited_whole
from workers.kv_state import KvState
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox
from workers.waiting_requests import WaitingRequests

logger = logging.getLogger(__name__)

ATTACH_SECONDS = 30.0


class Inbox:
    """Applies each message of each frontend."""

    def __init__(
        self,
        ready: Ready,
        engine: AsyncMPClient,
        inputs: EngineInputs,
        link: WorkerLink,
        kv_publisher: KvPublisher,
        kv_state: KvState,
        frontends: Frontends,
        outbox: Outbox,
        nixl: NixlTransfer,
        embeddings: HostEmbeddings | None = None,
        exports: EmbeddingExports | None = None,
    ) -> None:
        """``embeddings``: the encoder outputs that this host shares; ``exports``: what other
        hosts may read of them.
        """
        self._ready = ready
        self._engine = engine
        self._inputs = inputs
        self._link = link
        self._kv_publisher = kv_publisher
        self._kv_state = kv_state
        self._frontends = frontends
        self._outbox = outbox
        self._nixl = nixl
        # An engine that only encodes is sent what is to be encoded.
        encodes = ready.facts.role == "encode"
        self._embeddings = None if encodes else embeddings
        self._exports = exports
        self._pulls: EmbeddingPulls | None = None
        if self._embeddings is not None:
            self._pulls = EmbeddingPulls(nixl, self._embeddings)
        self._waiting = WaitingRequests(frontends, inputs, self._send_missing)
        self._calls = EngineCalls(
            engine, link, outbox, nixl, embeddings,
            lambda: self._publish(kv_state.clear()),
        )
        self._seed_fingerprint = ready.facts.identity_seed_fingerprint
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting: set[str] = set()
        self._draining: Draining | None = None
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Frontends that have gone and are still being cleaned up after."""

    @property
    def encoder_resets(self) -> int:
        """How often the engine was told to forget images or their encoder outputs."""
        return self._calls.encoder_resets

    async def run(self) -> None:
        """Apply messages until cancelled or until the engine dies.

        Raises:
            EngineDeadError: the engine has died.
        """
        await self._link.listen(self._on_message)

    def _on_message(self, name: str, message: Message, payload: Sequence[Frame]) -> None:
        if isinstance(message, Hello):
            self._greet(name, message)
            return
        frontend = self._frontends.get(name)
        if frontend is None:
            # It knows us from before we were restarted, or we gave it up.
            if name not in self._greeting and not isinstance(message, Bye):
                self._link.send(name, Bye())
            return
        frontend.last_seen = time.monotonic()
        self._apply(frontend, message, payload)

    async def drop_silent_frontends(self) -> None:
        """Drop frontends that have stopped pinging, until cancelled."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(SILENT_SECONDS / 5)
            now = time.monotonic()
            if now - asleep > SILENT_SECONDS / 2:
                continue  # we were stalled: what they have said is still to be read
            for name in self._frontends.silent_since(now - SILENT_SECONDS):
                logger.warning("frontend %s is silent: dropping it", name)
                self._drop(name)

    async def close(self) -> None:
        """End what other hosts read from here, and what is read from them."""
        if self._pulls is not None:
            await self._pulls.close()
        if self._exports is not None:
            await self._exports.close()

    def begin_draining(self, seconds: float) -> None:
        """Tell every frontend that this worker will leave, in ``seconds`` at most.

        It still takes what they send before they have heard.
        """
        self._draining = Draining(seconds)
        for name in self._frontends.names():
            self._link.send(name, self._draining)

    def say_goodbye(self) -> None:
        """Tell every frontend that this worker is leaving."""
        for name in self._frontends.names():
            self._link.send(name, Bye())

    def _apply(
        self, frontend: Frontend, message: Message, payload: Sequence[Frame]
    ) -> None:
        match message:
            case AddRequest():
                self._add(frontend, message, payload)
            case NixlOffer():
                name = frontend.name
                self._nixl.accept(
                    frontend, message.arena, lambda answer: self._link.send(name, answer)
                )
            case ExportEmbedding() if self._exports is not None:
                self._start(self._hand_output_over(frontend.name, message, self._exports))
            case ReleaseEmbedding() if self._exports is not None:
                self._exports.release(frontend.name, message.move_id)
            case PullEmbedding() if self._pulls is not None:
                name = frontend.name
                self._start(
                    self._pulls.answer(message, lambda said: self._link.send(name, said))
                )
            case AbortRequests():
                self._waiting.cancel(frontend, message.request_ids)
                self._outbox.abort(frontend.name, message.request_ids)
            case Ping():
                epoch, seq = self._kv_state.position
                self._link.send(frontend.name, Pong(epoch, seq))
            case AskSnapshot():
                self._link.send(frontend.name, self._snapshot())
            case Call():
                self._start(self._calls.answer(frontend.name, message, payload))
            case Bye():
                self._drop(frontend.name)
            case _:
                logger.warning("%s sent %s", frontend.name, type(message).__name__)

    def _add(
        self, frontend: Frontend, message: AddRequest, payload: Sequence[Frame]
    ) -> None:
        request_id, part = message.request_id, message.part
        if not frontend.comes_next(request_id, part):
            reason = "an earlier part of it is missing"
            self._send_missing(frontend, request_id, part, reason)
            return
        try:
            request, held = _checked(frontend, request_id, payload, self._embeddings)
        except BadMessage as error:
            if self._frontends.owner(request_id) is frontend:  # earlier parts are running
                self._waiting.cancel(frontend, [request_id])
                self._outbox.abort(frontend.name, [request_id])
            self._outbox.fail(frontend.name, request_id, str(error))
        except TransferError as error:
            self._send_missing(frontend, request_id, part, str(error))
        else:
            if self._frontends.begin(frontend, request_id, streams=request.resumable):
                self._frontends.charge(request_id, message.prefill_tokens, message.blocks)
                if is_awaited_whole(request):
                    frontend.held[request_id] = HeldTokens()
                if held:
                    frontend.leases.setdefault(request_id, []).extend(held)
                self._hand_over(frontend, request, part, () if held else payload)
            else:
                reason = "a request of this id is running"
                self._outbox.fail(frontend.name, request_id, reason)

    def _hand_over(
        self,
        frontend: Frontend,
        request: EngineCoreRequest,
        part: int,
        payload: Sequence[Frame],
    ) -> None:
        """Give a request to the engine, now or when its tensors have come.

        Without ``payload`` it is not what came.
        """
        as_it_came = _strip(request) and bool(payload)
        cache = self._nixl.cache
        if cache is not None and self._waiting.take(frontend, request, part, cache):
            return
        if frontend.source is not None:
            as_it_came = False  # it may refer to this worker's arena now
        self._inputs.add(payload if as_it_came else encode_payload(request))

    async def _hand_output_over(
        self, name: str, asked: ExportEmbedding, exports: EmbeddingExports
    ) -> None:
        self._link.send(name, await exports.answer(name, asked))
        if self._frontends.get(name) is None:  # it has gone meanwhile
            exports.forget(name)

    def _send_missing(
        self, frontend: Frontend, request_id: str, part: int, reason: str
    ) -> None:
        self._link.send(frontend.name, TensorsMissing(request_id, reason, part))

    def _greet(self, name: str, hello: Hello) -> None:
        if name in self._greeting:
            return  # it repeats itself while we are still mapping its arena
        problem = self._objection(name, hello)
        if problem:
            logger.error("refused frontend %s: %s", name, problem)
            self._link.send(name, Refused(worker=self._ready.worker, reason=problem))
            return
        self._seed_fingerprint = self._seed_fingerprint or hello.identity_seed_fingerprint
        known = self._frontends.get(name)
        if known is not None and (known.arena != hello.arena or known.requests):
            # It had lost sight of this worker: what it wants of it, it will send again.
            # Now, before any request that follows this greeting is read.
            self._drop(name)
        self._greeting.add(name)
        self._start(self._connect(name, hello))

    def _objection(self, name: str, hello: Hello) -> str:
        if self._draining is not None:
            return "this worker is about to leave"
        if name != hello.frontend:
            return f"calls itself {hello.frontend} but is {name}"
        if hello.protocol != PROTOCOL_VERSION:
            return f"speaks protocol {hello.protocol}, this worker {PROTOCOL_VERSION}"
        if self._seed_fingerprint not in ("", hello.identity_seed_fingerprint):
            return (
                "has another image identity seed than this worker: give both the same "
                "--mm-identity-seed-file or the same --registry"
            )
        return ""

    async def _connect(self, name: str, hello: Hello) -> None:
        try:
            if (leaving := self._leaving.get(name)) is not None:
                # Else what is still to be unmapped would be what is mapped now.
                await asyncio.wait([leaving])
            frontend = self._frontends.connect(name, time.monotonic())
            reason = await self._attach(frontend, hello)
            mode = "inline" if frontend.view is None else "shm"
            logger.info("frontend %s connected: %s (%s)", name, mode, reason)
            frontend.last_seen = time.monotonic()
            asks = frontend.view is None and hello.transfer in ("auto", "nixl")
            if asks and self._nixl.unusable:
                reason += f"; no NIXL: {self._nixl.unusable}"
            ready = replace(
                self._ready,
                transfer=mode,
                transfer_reason=reason,
                nixl=not self._nixl.unusable,
            )
            self._link.send(name, ready)
            if self._draining is not None:  # since it said hello
                self._link.send(name, self._draining)
        finally:
            self._greeting.discard(name)

    async def _attach(self, frontend: Frontend, hello: Hello) -> str:
        """Map the frontend's arena here and in the engine; returns the reason."""
        if frontend.view is not None:
            return "the worker sees the segment"
        frontend.arena = hello.arena
        if hello.transfer == "inline":
            return "asked for"
        if hello.transfer == "nixl":
            return "NIXL was asked for"
        if hello.arena is None:
            return "the frontend has no arena"
        try:
            view = ArenaView(hello.arena)
        except (TransferError, OSError) as error:
            return f"the worker does not see the segment: {error}"
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                refusals = await self._engine.collective_rpc_async(
                    "attach_arena", args=(hello.arena.name, hello.arena.nonce)
                )
        except TimeoutError:
            refusals = [f"no answer in {ATTACH_SECONDS:.0f} s"]
        if self._frontends.get(frontend.name) is not frontend:
            refusals = ["the frontend has gone meanwhile"]
        if any(refusals):
            view.close()
            self._start(self._detach(hello.arena.name))  # some may have mapped it
            return f"the engine cannot map the segment: {next(filter(None, refusals))}"
        frontend.view = view
        return "the worker sees the segment"

    def _drop(self, name: str) -> None:
        frontend = self._frontends.get(name)
        if frontend is not None:
            self._waiting.cancel(frontend, list(frontend.requests))
            self._nixl.forget(frontend)
            if self._exports is not None:
                self._exports.forget(name)
            left = self._frontends.disconnect(name)
            task = self._start(self._clean_up(frontend, left))
            self._leaving[name] = task
            task.add_done_callback(lambda _: self._forget_leaving(name, task))

    def _forget_leaving(self, name: str, task: asyncio.Task[None]) -> None:
        if self._leaving.get(name) is task:
            del self._leaving[name]

    async def _clean_up(self, frontend: Frontend, left: list[str]) -> None:
        """Free what is held for a frontend that has gone."""
        self._inputs.abort(left)
        await self._outbox.engine_is_past()
        if frontend.view is not None and frontend.arena is not None:
            frontend.view.close()
            await self._detach(frontend.arena.name)
        logger.info("frontend %s left, %d requests aborted", frontend.name, len(left))

    async def _detach(self, arena: str) -> None:
        await self._engine.collective_rpc_async("detach_arena", args=(arena,))

    def _snapshot(self) -> KvSnapshot:
        return self._kv_state.snapshot()

    def _publish(self, delta: KvDelta | None) -> None:
        if delta is not None:
            self._kv_publisher.publish(delta)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("failed: %r", error)


def _checked(
    frontend: Frontend,
    request_id: str,
    payload: Sequence[Frame],
    embeddings: HostEmbeddings | None,
) -> tuple[EngineCoreRequest, list[EmbeddingLease]]:
    """Decode a request that the engine may have, and what it may have it by.

    Where the sender's memory is not seen here, images whose encoder output is on this
    host come without their pixels, and the leases of those outputs are returned.

    Raises:
        BadMessage: it may not.
        ArenaGone, StaleRef: it refers to tensors that cannot be read.
    """
    request = decode_request(payload)
    if request.request_id != request_id:
        raise BadMessage(f"holds request {request.request_id}")
    if request.client_index != 0:  # the engine would answer somebody else
        raise BadMessage(f"client index {request.client_index}")
    held: list[EmbeddingLease] = []
    try:
        if frontend.view is None and embeddings is not None:
            held = embeddings.take(request)
        frontend.check_references(request)
    except TransferError:
        raise
    except Exception as error:  # no sender may end this process
        raise BadMessage(f"cannot be checked: {error!r}") from error
    return request, held


def _strip(request: EngineCoreRequest) -> bool:
    """Take out what clients may not ask of the engine; False when there was something."""
    extra_args = request.sampling_params.extra_args if request.sampling_params else None
    if not extra_args or "kv_cache_report_mode" not in extra_args:
        return True
    # It has the engine announce reused blocks as if they were new: they would be counted
    # as copies that never go.
    del extra_args["kv_cache_report_mode"]
    return False

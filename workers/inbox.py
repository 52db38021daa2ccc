"""What frontends say, applied to the engine.

vLLM names relied on: AsyncMPClient; SamplingParams.extra_args.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient

from transfer.embeddings.store import EmbeddingLease
from transfer.errors import BadMessage, TransferError
from transfer.link import KvPublisher, WorkerLink
from transfer.messages import (
    AbortRequests,
    AddRequest,
    AskSnapshot,
    Bye,
    Call,
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
    ReleaseEmbedding,
    TensorsMissing,
)
from transfer.payload import decode_request, encode_payload
from workers.embedding_cache import HostEmbeddings
from workers.embedding_exports import EmbeddingExports
from workers.embedding_pulls import EmbeddingPulls
from workers.engine_calls import EngineCalls
from workers.engine_inputs import EngineInputs
from workers.frontends import SILENT_SECONDS, Frontend, Frontends
from workers.handshake import Handshake
from workers.held_tokens import HeldTokens, is_awaited_whole
from workers.kv_state import KvState
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox
from workers.waiting_requests import WaitingRequests

logger = logging.getLogger(__name__)


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshake = Handshake(
            ready, engine, inputs, link, frontends, outbox, nixl, self._drop, self._start
        )

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
            self._handshake.greet(name, message)
            return
        frontend = self._frontends.get(name)
        if frontend is None:
            # It knows us from before we were restarted, or we gave it up.
            if name not in self._handshake.greeting and not isinstance(message, Bye):
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
        self._handshake.begin_draining(seconds)

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

    def _drop(self, name: str) -> None:
        frontend = self._frontends.get(name)
        if frontend is not None:
            self._waiting.cancel(frontend, list(frontend.requests))
            self._nixl.forget(frontend)
            if self._exports is not None:
                self._exports.forget(name)
            self._handshake.clean_up_after(frontend)

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

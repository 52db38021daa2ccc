"""What the engine says, sent to whom it concerns.

vLLM names relied on: AsyncMPClient.collective_rpc_async; EngineCoreOutputs with
weight_version, EngineCoreOutput, FinishReason; WorkerBase.synchronize_device.
"""

from __future__ import annotations

import asyncio
import logging
import time

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from transfer.embeddings.store import EmbeddingLease
from transfer.leases import Lease
from transfer.link import WorkerLink
from transfer.messages import Outputs, Released
from transfer.payload import encode_payload
from workers.engine_inputs import EngineInputs
from workers.frontends import Frontends
from workers.held_tokens import hold, let_go, may_be_held, taken_out

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 300.0
"""An engine that has not answered for this long is taken for dead. No shorter than vLLM
lets a step take: an abort in the middle of a long one must not cost the other requests
their worker."""

STUCK_SECONDS = 300.0
"""So is one that has requests, and has said nothing for this long and still does not when
it is asked. Longer than any step: a long prompt takes minutes on a processor."""

ASKED_SECONDS = 60.0
"""How long it may take to answer then."""


class Outbox:
    """Splits the engine's outputs by owner, and confirms aborts."""

    def __init__(
        self,
        engine: AsyncMPClient,
        inputs: EngineInputs,
        link: WorkerLink,
        frontends: Frontends,
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._link = link
        self._frontends = frontends
        self._aborted: list[tuple[str, str]] = []
        self._leases: list[Lease | EmbeddingLease] = []
        """What aborted requests had of the worker's own arena."""
        self._something_aborted = asyncio.Event()
        self._steps = 0
        """That have had outputs."""
        self._weight_version: str | None = None
        """Of the last of these."""
        self.aborts_are_meant = False
        """Whether a frontend has asked for what makes the engine abort its requests."""

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Send the outputs of one step to those who asked, or hold them (``held_tokens``).

        Raises:
            EngineDeadError: the engine gives its requests up without being asked to, as
                it does when it is told to end before its worker is. They go on elsewhere.
        """
        self._steps += 1
        if outputs.weight_version != self._weight_version:
            self._send_held(outputs.timestamp)  # they were made with other weights
            self._weight_version = outputs.weight_version
        if not self.aborts_are_meant and any(
            output.finish_reason is FinishReason.ABORT
            and self._frontends.owner(output.request_id) is not None
            for output in outputs.outputs
        ):
            raise EngineDeadError()
        for name, theirs in self._split(outputs).items():
            self._link.send(name, Outputs(), encode_payload(theirs))

    def _send_held(self, timestamp: float) -> None:
        for frontend in map(self._frontends.get, self._frontends.names()):
            if frontend is not None and (outputs := taken_out(frontend.held)):
                theirs = EngineCoreOutputs(
                    outputs=outputs, timestamp=timestamp, weight_version=self._weight_version
                )
                self._link.send(frontend.name, Outputs(), encode_payload(theirs))

    def _split(self, outputs: EngineCoreOutputs) -> dict[str, EngineCoreOutputs]:
        by_frontend: dict[str, EngineCoreOutputs] = {}
        may_hold, now = may_be_held(outputs.scheduler_stats), time.monotonic()
        for output in outputs.outputs:
            owner = self._frontends.owner(output.request_id)
            if owner is None:
                continue  # aborted, or its frontend is gone
            if (held := owner.held.get(output.request_id)) is not None:
                if may_hold and hold(held, output, now):
                    continue
                let_go(held, output, now)
            if output.finished:
                self._frontends.end(output.request_id)
            theirs = by_frontend.get(owner.name)
            if theirs is None:
                theirs = by_frontend[owner.name] = EngineCoreOutputs(
                    outputs=[],
                    scheduler_stats=outputs.scheduler_stats,
                    timestamp=outputs.timestamp,
                    weight_version=outputs.weight_version,
                )
            theirs.outputs.append(output)
        return by_frontend

    def fail(self, frontend: str, request_id: str, reason: str) -> None:
        """End a request that never reached the engine."""
        logger.error("request %r of %s failed: %s", request_id, frontend, reason)
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
        self._link.send(
            frontend, Outputs(), encode_payload(EngineCoreOutputs(outputs=[output]))
        )

    def abort(self, frontend: str, request_ids: list[str]) -> None:
        """Have the engine drop requests; ``Released`` follows when it has let go."""
        running = []
        for request_id in request_ids:
            owner = self._frontends.owner(request_id)
            if owner is not None and owner.name == frontend:
                self._leases += owner.leases.get(request_id, ())
                self._frontends.end(request_id)
                running.append(request_id)
        self._inputs.abort(running)
        # Requests that have ended by themselves are confirmed too: whoever aborts waits.
        self._aborted += [(frontend, request_id) for request_id in request_ids]
        self._something_aborted.set()

    async def confirm_aborts(self) -> None:
        """Run until the engine dies or hangs.

        vLLM says nothing after an abort, and a step may still be reading the request's
        tensors. What is asked of the model runner is answered in order, so an answer to
        anything means that earlier steps are over. One question serves all aborts so far.

        Raises:
            EngineDeadError: the engine has died, or does not answer.
        """
        while True:
            await self._something_aborted.wait()
            self._something_aborted.clear()
            aborted, self._aborted = self._aborted, []
            leases, self._leases = self._leases, []
            await self.engine_is_past()
            leases.clear()
            by_frontend: dict[str, list[str]] = {}
            for frontend, request_id in aborted:
                by_frontend.setdefault(frontend, []).append(request_id)
            for frontend, request_ids in by_frontend.items():
                self._link.send(frontend, Released(request_ids))

    async def watch_engine(self) -> None:
        """Run until the engine is stuck, and with it all of its requests.

        Raises:
            EngineDeadError: it has died, or does not answer.
        """
        while True:
            steps = self._steps
            await asyncio.sleep(STUCK_SECONDS)
            if self._frontends.num_requests and self._steps == steps:
                logger.warning("the engine has said nothing for %.0f s", STUCK_SECONDS)
                await self.engine_is_past(ASKED_SECONDS)

    async def engine_is_past(self, seconds: float | None = None) -> None:
        """Return when the steps under way have ended, within ``RELEASE_SECONDS``, or
        within ``seconds``.

        Raises:
            EngineDeadError: it does not answer in time.
        """
        try:
            async with asyncio.timeout(RELEASE_SECONDS if seconds is None else seconds):
                await self._engine.collective_rpc_async("synchronize_device")
        except TimeoutError:
            raise EngineDeadError() from None

"""How frontends come to be served by this worker, and what is done when they go.

One that says hello is answered once its arena is mapped, here and by the engine, if both
see it. What is held for one that has gone is freed once the engine is past its requests.

vLLM names relied on: AsyncMPClient.collective_rpc_async.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine.core_client import AsyncMPClient

from transfer.arena_view import ArenaView
from transfer.errors import TransferError
from transfer.link import WorkerLink
from transfer.messages import PROTOCOL_VERSION, Draining, Hello, Ready, Refused
from workers.engine_inputs import EngineInputs
from workers.frontends import Frontend, Frontends
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox

logger = logging.getLogger(__name__)

ATTACH_SECONDS = 30.0


class Handshake:
    """This worker's side of it, with all frontends."""

    def __init__(
        self,
        ready: Ready,
        engine: AsyncMPClient,
        inputs: EngineInputs,
        link: WorkerLink,
        frontends: Frontends,
        outbox: Outbox,
        nixl: NixlTransfer,
        drop: Callable[[str], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """``drop`` ends all that is done for a frontend, by its name; ``start`` has work
        done in the background.
        """
        self._ready = ready
        self._engine = engine
        self._inputs = inputs
        self._link = link
        self._frontends = frontends
        self._outbox = outbox
        self._nixl = nixl
        self._drop = drop
        self._start = start
        self._seed_fingerprint = ready.facts.identity_seed_fingerprint
        self._draining: Draining | None = None
        self.greeting: set[str] = set()
        """Frontends whose hello is being answered."""
        self.leaving: dict[str, asyncio.Task[None]] = {}
        """Frontends that have gone and are still being cleaned up after."""

    def begin_draining(self, seconds: float) -> None:
        """Tell every frontend that this worker will leave; nobody is taken from now on."""
        self._draining = Draining(seconds)
        for name in self._frontends.names():
            self._link.send(name, self._draining)

    def greet(self, name: str, hello: Hello) -> None:
        """Answer a frontend's hello, soon."""
        if name in self.greeting:
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
        self.greeting.add(name)
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
            if (leaving := self.leaving.get(name)) is not None:
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
            self.greeting.discard(name)

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

    def clean_up_after(self, frontend: Frontend) -> None:
        """Forget a frontend now, and free what is held for it as soon as it may be."""
        name = frontend.name
        left = self._frontends.disconnect(name)
        task = self._start(self._clean_up(frontend, left))
        self.leaving[name] = task
        task.add_done_callback(lambda _: self._forget_leaving(name, task))

    def _forget_leaving(self, name: str, task: asyncio.Task[None]) -> None:
        if self.leaving.get(name) is task:
            del self.leaving[name]

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

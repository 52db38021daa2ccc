"""One fake worker, and a bare line to it such as a frontend has."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from frontend.arena_cache import ArenaProcessorCache
from frontend.request_items import identify
from tests.fakes import HASHER, FakeWorker, within
from transfer.arena import Arena
from transfer.link import FrontendLink
from transfer.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    Frame,
    Hello,
    Message,
    Outputs,
    Ready,
)
from transfer.payload import decode_outputs, encode_payload

M = TypeVar("M", bound=Message)


class Line:
    """Says what a test wants said, and waits for the answers."""

    def __init__(
        self, worker: FakeWorker, name: str = "frontend-1", arena: Arena | None = None
    ) -> None:
        self.name = name
        self.arena = arena
        self._context = zmq.asyncio.Context()
        self._link = FrontendLink(self._context, name, worker.address)
        self.cache = ArenaProcessorCache(arena, HASHER, "demo")

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.close()
        self._context.term()

    def hello(self, **changes: object) -> Hello:
        hello = Hello(
            frontend=self.name,
            protocol=PROTOCOL_VERSION,
            arena=self.arena.id if self.arena is not None else None,
            transfer="auto",
            identity_seed_fingerprint=HASHER.fingerprint,
        )
        for name, value in changes.items():
            setattr(hello, name, value)
        return hello

    async def greet(self, **changes: object) -> Ready:
        self.say(self.hello(**changes))
        message, _ = await self.hear(Ready)
        return message

    def say(self, message: Message, payload: Sequence[Frame] = ()) -> None:
        self._link.send(message, payload)

    def add(self, request: EngineCoreRequest) -> None:
        if request.mm_features:
            identify(request, self.cache)
        self.say(AddRequest(request.request_id), encode_payload(request))

    async def hear(self, kind: type[M]) -> tuple[M, Sequence[Frame]]:
        """The next message, which must be of this kind."""
        message, payload = await within(self._link.receive())
        assert isinstance(message, kind), message
        return message, payload

    async def hear_output(self) -> EngineCoreOutput:
        _, payload = await self.hear(Outputs)
        (output,) = decode_outputs(payload).outputs
        return output

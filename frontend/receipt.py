"""Every response says where it was computed and what was reused.

Headers, one value per engine request in the order of routing:

- ``x-foveal-request-id``: its name in the logs of frontend and worker;
- ``x-foveal-worker``: the worker;
- ``x-foveal-overlap-blocks``: leading prompt blocks its KV cache held;
- ``x-foveal-prompt-blocks``: full blocks of the prompt;
- ``x-foveal-transfer``: how tensors went there: ``shm``, ``nixl``, ``inline``, ``none``;
- ``x-foveal-embeddings``: ``held/needed``: images beyond the cached blocks, and how many of
  them need not be encoded, because the worker or its host has the encoder's output.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_SHOWN = 32
"""Clients and proxies refuse long headers, and one HTTP request may make hundreds."""
LONGEST_ID = 96
"""Characters."""


@dataclass(frozen=True)
class Routed:
    """One engine request as routed."""

    worker: str
    overlap_blocks: int
    prompt_blocks: int
    transfer: str
    embeddings_held: int = 0
    embeddings_needed: int = 0
    request_id: str = ""

    @property
    def plain_id(self) -> str:
        """The request's name as it may stand in a header and in a line of a log.

        Clients may have a say in it: nothing in it may end a line, or a value in a list.
        """
        plain = (c if "!" <= c <= "~" and c != "," else "?" for c in self.request_id)
        return "".join(plain)[:LONGEST_ID]


@dataclass
class Receipt:
    """What is known of one HTTP request's routing so far."""

    routed: list[Routed] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)
    """The pictures in it, encoded; empty unless the dashboard shows them."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        if not self.routed:
            return []
        shown = self.routed[:MOST_SHOWN]
        columns = {
            "x-foveal-request-id": [r.plain_id for r in shown],
            "x-foveal-worker": [r.worker for r in shown],
            "x-foveal-overlap-blocks": [str(r.overlap_blocks) for r in shown],
            "x-foveal-prompt-blocks": [str(r.prompt_blocks) for r in shown],
            "x-foveal-transfer": [r.transfer for r in shown],
            "x-foveal-embeddings": [
                f"{r.embeddings_held}/{r.embeddings_needed}" for r in shown
            ],
        }
        if len(self.routed) > MOST_SHOWN:
            columns = {name: [*values, "..."] for name, values in columns.items()}
        return [(name.encode(), ",".join(v).encode()) for name, v in columns.items()]


current_receipt: ContextVar[Receipt | None] = ContextVar("current_receipt", default=None)
"""Set while an HTTP request is served. Tasks made for it inherit it."""


class ReceiptMiddleware:
    """Adds the headers. Holds a response until its request is routed, or it is complete.

    A streaming response would send its headers before that, and some endpoints their
    first event too. Only what is posted is routed: other responses are held no longer
    than until their first bytes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        receipt = Receipt()
        held: list[Message] = []

        async def send_held(message: Message) -> None:
            if message["type"] == "http.response.start":
                held.append(message)
                return
            may_be_routed_yet = scope["method"] == "POST" and not receipt.routed
            if held and may_be_routed_yet and message.get("more_body"):
                held.append(message)
                return
            if held:
                start = held[0]
                start["headers"] = [*start.get("headers", ()), *receipt.headers()]
            while held:
                await send(held.pop(0))
            await send(message)

        token = current_receipt.set(receipt)
        try:
            await self._app(scope, receive, send_held)
        finally:
            current_receipt.reset(token)

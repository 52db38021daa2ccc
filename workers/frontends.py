"""Which frontends talk to this worker, and which requests are whose.

vLLM names relied on: EngineCoreRequest.mm_features.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreRequest

from transfer.arena_view import ArenaView
from transfer.embeddings.store import EmbeddingLease
from transfer.errors import ArenaGone, BadMessage
from transfer.leases import Lease
from transfer.messages import FrontendShare
from transfer.pack import check_reference, is_packed, read_reference
from transfer.tensor_ref import ArenaId
from workers.held_tokens import HeldTokens
from workers.nixl_source import NixlSource

SILENT_SECONDS = 10.0
"""A frontend that has said nothing for this long is gone; it pings every second."""


@dataclass
class Frontend:
    """One connected frontend."""

    name: str
    last_seen: float
    arena: ArenaId | None = None
    view: ArenaView | None = None
    """Set when this process and the engine's both have the arena mapped."""
    source: NixlSource | None = None
    """Set when the arena is on another host and NIXL may read it."""
    requests: set[str] = field(default_factory=set)
    """Requests that the engine may still be working on, not aborted."""
    parts: dict[str, int] = field(default_factory=dict)
    """Of those whose input streams in, how many parts have come."""
    leases: dict[str, list[Lease | EmbeddingLease]] = field(default_factory=dict)
    """What they need of the worker's own arena, or of its host's encoder outputs.
    Outlives them in a frontend that has gone, until the engine is past them."""
    charges: dict[str, FrontendShare] = field(default_factory=dict)
    """What each of its requests was charged, see ``AddRequest``."""
    held: dict[str, HeldTokens] = field(default_factory=dict)
    """Of those whose answers are sent whole, what has not been sent yet."""

    def share(self) -> FrontendShare:
        """All that it has in flight here."""
        charges = self.charges.values()
        return FrontendShare(
            requests=len(self.requests),
            prefill_tokens=sum(charge.prefill_tokens for charge in charges),
            blocks=sum(charge.blocks for charge in charges),
        )

    def check_references(self, request: EngineCoreRequest) -> None:
        """Make sure that the engine will be able to read what ``request`` refers to.

        Raises:
            BadMessage: a reference into an arena that is not this frontend's, or that
                does not fit the item.
            ArenaGone: the arena cannot be seen from here.
            StaleRef: the bytes have been replaced.
        """
        for feature in request.mm_features or ():
            if feature.data is None or not is_packed(feature.data):
                continue
            reference = read_reference(feature.data)
            check_reference(feature.data, reference)
            entry = reference.entry
            if self.arena is None or entry.arena != self.arena.name:
                raise BadMessage(f"a reference into {entry.arena}, which is not the sender's")
            if self.view is not None:
                self.view.check(entry)
            elif self.source is None or not self.source.works:
                raise ArenaGone(f"{entry.arena} is not mapped here")

    def comes_next(self, request_id: str, part: int) -> bool:
        """Whether the parts before this one have come."""
        return part == self.parts.get(request_id, 0)


class Frontends:
    """All connected frontends and the owner of each request."""

    def __init__(self) -> None:
        self._by_name: dict[str, Frontend] = {}
        self._owners: dict[str, Frontend] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        """How many requests the engine may still be working on, not aborted."""
        return len(self._owners)

    async def until_idle(self) -> None:
        """Wait until there is no such request."""
        await self._idle.wait()

    def get(self, name: str) -> Frontend | None:
        return self._by_name.get(name)

    def names(self) -> list[str]:
        return list(self._by_name)

    def connect(self, name: str, now: float) -> Frontend:
        return self._by_name.setdefault(name, Frontend(name, now))

    def disconnect(self, name: str) -> list[str]:
        """Forget a frontend; returns the requests it leaves behind."""
        frontend = self._by_name.pop(name)
        left = list(frontend.requests)
        for request_id in left:
            del self._owners[request_id]
        frontend.requests.clear()
        frontend.parts.clear()
        frontend.charges.clear()
        frontend.held.clear()
        self._note_idle()
        return left

    def silent_since(self, deadline: float) -> list[str]:
        return [f.name for f in self._by_name.values() if f.last_seen < deadline]

    def begin(self, frontend: Frontend, request_id: str, *, streams: bool = False) -> bool:
        """Note the owner of a request. False when a request of that id is running.

        vLLM's engine dies of a second one. But if the first ``streams`` its input in,
        what follows from the same frontend is more of it.
        """
        owner = self._owners.setdefault(request_id, frontend)
        if request_id in owner.requests:
            if owner is not frontend or request_id not in frontend.parts:
                return False
            frontend.parts[request_id] += 1
            return True
        self._idle.clear()
        frontend.requests.add(request_id)
        if streams:
            frontend.parts[request_id] = 1
        return True

    def take_back(self, frontend: Frontend, request_id: str, part: int) -> None:
        """A part did not reach the engine after all: it is to come again."""
        if self.owner(request_id) is not frontend:
            return
        if part == 0:
            self.end(request_id)
        elif request_id in frontend.parts:
            frontend.parts[request_id] = min(frontend.parts[request_id], part)

    def end(self, request_id: str) -> Frontend | None:
        """Forget a request; returns its owner if it was running."""
        frontend = self._owners.pop(request_id, None)
        if frontend is not None:
            frontend.requests.discard(request_id)
            frontend.parts.pop(request_id, None)
            frontend.leases.pop(request_id, None)
            frontend.charges.pop(request_id, None)
            frontend.held.pop(request_id, None)
            self._note_idle()
        return frontend

    def charge(self, request_id: str, prefill_tokens: int, blocks: int) -> None:
        """Note what a running request was charged by the frontend that sent it."""
        owner = self._owners.get(request_id)
        if owner is not None and request_id in owner.requests:
            owner.charges[request_id] = FrontendShare(1, prefill_tokens, blocks)

    def computed(self, request_id: str) -> None:
        """Note that the prompt of a request has been computed."""
        owner = self._owners.get(request_id)
        if owner is not None:
            charge = owner.charges.get(request_id)
            if charge is not None and charge.prefill_tokens:
                owner.charges[request_id] = FrontendShare(1, 0, charge.blocks)

    def shares(self) -> dict[str, FrontendShare]:
        """What each frontend has in flight; those with nothing are left out."""
        return {f.name: f.share() for f in self._by_name.values() if f.requests}

    def owner(self, request_id: str) -> Frontend | None:
        return self._owners.get(request_id)

    def _note_idle(self) -> None:
        if not self._owners:
            self._idle.set()

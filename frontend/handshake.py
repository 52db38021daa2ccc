"""How workers come to work for this frontend.

Each is greeted until it answers. One that answers is taken in if its engine fits this
frontend's settings and the workers that came before it; then its KV deltas are listened to,
and it is brought up to date before it gets requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

from frontend.nixl_offers import NixlOffers
from frontend.worker import PoolEvents, Worker
from transfer.access import Access
from transfer.errors import TransferError
from transfer.link import FrontendLink, KvSubscriber
from transfer.messages import Hello, Ready, WorkerFacts

logger = logging.getLogger(__name__)

MAY_DIFFER = frozenset({
    "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "role",
    "own_logits_processors",
})
"""Facts in which workers of one fleet need not agree."""


class Handshake:
    """This frontend's side of it, with all workers."""

    def __init__(
        self,
        hello: Hello,
        expected: Mapping[str, object],
        events: PoolEvents,
        nixl: NixlOffers,
        context: zmq.Context[Any],
        access: Access,
    ) -> None:
        """``expected``: facts that this frontend's own settings state, by field name."""
        self.hello = hello
        self._expected = dict(expected)
        self._agreed: WorkerFacts | None = None
        """Those of the first worker: others must be like it."""
        self._events = events
        self._nixl = nixl
        self._context = context
        self._access = access

    def open_link(self, address: str) -> FrontendLink:
        """
        Raises:
            TransferError: that is no address.
        """
        return FrontendLink(self._context, self.hello.frontend, address, self._access)

    def accept(self, worker: Worker, ready: Ready) -> KvSubscriber | None:
        """Take in a worker by what it says of itself; it may not get requests yet.

        Returns where its KV deltas come in, or None if it was refused.
        """
        if problem := self._mismatch(ready.facts):
            self.refuse(worker, ready.worker, problem)
            return None
        try:
            address = _reachable(ready.kv_address, worker.address)
            kv = KvSubscriber(self._context, address, self._access)
        except TransferError as error:
            self.refuse(worker, ready.worker, str(error))
            return None
        worker.refused = ""
        worker.draining = False
        self._agreed = self._agreed or ready.facts
        worker.name, worker.facts, worker.epoch = ready.worker, ready.facts, ready.epoch
        worker.transfer, worker.transfer_reason = ready.transfer, ready.transfer_reason
        worker.nixl = ready.nixl and self.hello.transfer in ("auto", "nixl")
        worker.kv, worker.process = kv, ready.process
        worker.lost = asyncio.Event()
        return kv

    async def prepare(self, worker: Worker, takes_offers: bool) -> bool:
        """Bring a worker up to date; returns whether requests may go to it."""
        try:
            await self._nixl.settle(worker, takes_offers, worker.link.send)
            if self.hello.transfer not in ("auto", worker.transfer):
                logger.warning(
                    "--mm-transfer %s, but tensors for %s go %s: %s",
                    self.hello.transfer, worker.name, worker.transfer,
                    worker.transfer_reason,
                )
            await self._events.prepare(worker)
        except Exception as error:  # whatever it is, this worker cannot be used
            logger.exception("worker %s cannot be used", worker.name)
            worker.refused = str(error) or repr(error)
            return False
        return True

    def refuse(self, worker: Worker, name: str, problem: str) -> None:
        """Note, and log once, why a worker that calls itself ``name`` cannot be used."""
        if worker.refused != problem:  # it is asked again and again
            logger.error("worker %s cannot be used: %s", name, problem)
        worker.name, worker.refused = name, problem

    def forget(self, worker: Worker) -> None:
        """Do not let this worker decide who may come after it."""
        if self._agreed is worker.facts:
            self._agreed = None

    def _mismatch(self, facts: WorkerFacts) -> str:
        """Why a worker with these facts cannot serve here; empty when it can."""
        theirs = msgspec.to_builtins(facts)
        for name, ours in self._expected.items():
            if theirs[name] != ours:
                return f"its {name} is {theirs[name]!r}, this frontend's is {ours!r}"
        if self._agreed is not None:
            first = msgspec.to_builtins(self._agreed)
            for name, value in first.items():
                if name not in MAY_DIFFER and theirs[name] != value:
                    return f"its {name} is {theirs[name]!r}, the first worker's is {value!r}"
        return ""


def _reachable(address: str, via: str) -> str:
    """``address``, on the host of ``via`` where it means every address of its host."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if address.startswith(everywhere):
            return f"{via.rpartition(':')[0]}:{address.removeprefix(everywhere)}"
    return address

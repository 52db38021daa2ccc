"""Offers this frontend's arena to workers that share no memory with it.

The NIXL agent is made when the first such worker is met: it listens on the network and
lets whoever can speak to it read and write, so there should be none where none is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from transfer.arena import Arena
from transfer.errors import TransferError
from transfer.messages import Message, NixlOffer, Pulling, TransferChosen
from transfer.nixl.export import ArenaExport

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0
"""So long a worker that makes its agent and connects gets no requests. If it answers later
it is heard all the same."""

MOST_COUNTED = 1024
"""Workers whose pulls are counted: the last heard of. Their names differ with each start."""


class Reader(Protocol):
    """What of a worker matters here."""

    name: str
    transfer: str
    transfer_reason: str


class NixlOffers:
    """Used on one event loop."""

    def __init__(self, arena: Arena | None, mode: str) -> None:
        """``mode`` is the deployment's ``--mm-transfer``."""
        self._arena = arena if mode in ("auto", "nixl") else None
        self._making: asyncio.Task[ArenaExport | None] | None = None
        self._export: ArenaExport | None = None
        self._answers: dict[str, asyncio.Event] = {}
        self.unusable = ""
        """Why NIXL was switched off in this process, if it was."""
        self.pulls: dict[str, Pulling] = {}
        """What workers have said of their pulls, summed up by worker."""
        self.all_pulls = Pulling(0.0)
        """The same, of all workers there ever were."""

    @property
    def agents(self) -> int:
        """NIXL agents that this process runs."""
        return int(self._export is not None)

    async def settle(
        self, worker: Reader, takes_offers: bool, send: Callable[[Message], None]
    ) -> None:
        """Offer the arena to a worker where that may help; wait for its answer.

        ``worker.transfer`` says afterwards how tensors reach it.
        """
        if self._arena is None or not takes_offers or worker.transfer == "shm":
            return
        export = await self._exported(self._arena)
        if export is None:
            worker.transfer_reason += f"; no NIXL: {self.unusable}"
            return
        answered = self._answers[worker.name] = asyncio.Event()
        send(NixlOffer(export.remote))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await answered.wait()
        except TimeoutError:
            worker.transfer_reason += "; no NIXL: the worker does not answer"
        finally:
            self._answers.pop(worker.name, None)

    def on_message(self, worker: Reader, message: TransferChosen | Pulling) -> None:
        match message:
            case Pulling():
                self._count(worker.name, message)
                if self._export is not None:
                    self._export.progress_for(worker.name, message.seconds)
            case TransferChosen():
                if worker.transfer != message.transfer:
                    logger.info(
                        "tensors for %s go %s: %s",
                        worker.name, message.transfer, message.reason,
                    )
                worker.transfer = message.transfer
                worker.transfer_reason = message.reason
                if (answered := self._answers.get(worker.name)) is not None:
                    answered.set()

    def on_lost(self, worker: Reader) -> None:
        if self._export is not None:
            self._export.progress_for(worker.name, 0.0)

    async def close(self) -> None:
        """Withdraw the arena. Workers that read from it see the connection end."""
        if self._making is not None:
            await asyncio.wait([self._making], timeout=ANSWER_SECONDS)
        if self._export is not None:
            await asyncio.to_thread(self._export.close)
            self._export = None

    async def _exported(self, arena: Arena) -> ArenaExport | None:
        if self._making is None:
            self._making = asyncio.create_task(self._make(arena))
        return await asyncio.shield(self._making)

    async def _make(self, arena: Arena) -> ArenaExport | None:
        try:
            self._export = await asyncio.to_thread(ArenaExport, arena)
        except TransferError as error:
            self.unusable = str(error)
            logger.error("NIXL is switched off in this process: %s", error)
        return self._export

    def _count(self, worker: str, news: Pulling) -> None:
        total = self.pulls.pop(worker, None) or Pulling(0.0)
        self.pulls[worker] = total  # the latest is the last
        while len(self.pulls) > MOST_COUNTED:
            del self.pulls[next(iter(self.pulls))]
        for sums in (total, self.all_pulls):
            sums.pulls += news.pulls
            sums.nbytes += news.nbytes
            sums.failures += news.failures
            sums.read_seconds += news.read_seconds

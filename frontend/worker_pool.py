"""Which workers there are, which of them are ready, and when one is lost.

For each worker that discovery names there is one ``Worker`` with a line to it. It says
hello until it is answered, checks that the worker's engine fits, listens to its KV deltas,
and pings it. A worker that leaves or falls silent is lost: it is told to ``on_lost`` and
greeted again as long as discovery names it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq

from frontend.nixl_offers import NixlOffers
from transfer.discovery import Discovery
from transfer.errors import BadMessage
from transfer.link import HEARTBEAT_SECONDS, FrontendLink, KvSubscriber
from transfer.messages import (
    Bye,
    Frame,
    Hello,
    KvDelta,
    LoadReport,
    Message,
    Ping,
    Pulling,
    Ready,
    Refused,
    TransferChosen,
    WorkerFacts,
)
from transfer.process_watch import ProcessWatch, watch_process
from transfer.registry import WorkerRecord

logger = logging.getLogger(__name__)

SILENT_SECONDS = 3.0
"""A worker that has not answered for this long is lost, ..."""
SILENT_SECONDS_ALIVE = 15.0
"""... unless its process is known to live on this host: then it may only be starved."""


class PoolEvents(Protocol):
    """Who is told about workers."""

    async def prepare(self, worker: Worker) -> None:
        """Called with a worker that has just answered, before it gets requests."""

    def on_lost(self, worker: Worker) -> None:
        """Called when a worker cannot be reached any more; it may still be running."""

    def on_gone(self, worker: Worker) -> None:
        """Called when it is not: its process has ended, or it has withdrawn."""

    def on_message(
        self, worker: Worker, message: Message, payload: Sequence[Frame]
    ) -> None: ...
    def on_delta(self, worker: Worker, delta: KvDelta) -> None: ...
    def on_report(self, worker: Worker, report: LoadReport) -> None: ...


class Worker:
    """One worker as this frontend sees it."""

    def __init__(self, address: str, link: FrontendLink) -> None:
        self.address = address
        self.link = link
        self.record: WorkerRecord | None = None
        self.name = address
        """Its own name once it has answered."""
        self.facts: WorkerFacts | None = None
        self.ready = False
        self.refused = ""
        self.epoch = ""
        self.transfer = "inline"
        self.transfer_reason = ""
        self.last_heard = time.monotonic()
        self.kv: KvSubscriber | None = None
        self.process: ProcessWatch | None = None
        self.tasks: list[asyncio.Task[None]] = []

    def is_silent(self, now: float) -> bool:
        known_alive = (
            self.record is not None
            and self.record.is_local()
            and not self.record.is_dead()
        )
        limit = SILENT_SECONDS_ALIVE if known_alive else SILENT_SECONDS
        return now - self.last_heard > limit

    def describe(self) -> dict[str, Any]:
        """What ``GET /v1/fleet`` shows of it."""
        return {
            "id": self.name,
            "address": self.address,
            "ready": self.ready,
            "refused": self.refused or None,
            "transfer": self.transfer if self.ready else None,
            "transfer_reason": self.transfer_reason or None,
            "facts": msgspec.to_builtins(self.facts) if self.facts else None,
        }


class WorkerPool:
    """All workers of one frontend."""

    def __init__(
        self,
        hello: Hello,
        registry: Discovery,
        addresses: Sequence[str],
        expected: Mapping[str, object],
        events: PoolEvents,
        nixl: NixlOffers,
    ) -> None:
        """``expected``: facts that this frontend's own settings state, by field name."""
        self._hello = hello
        self._registry = registry
        self._addresses = addresses
        self._expected = dict(expected)
        self._agreed: WorkerFacts | None = None
        self._events = events
        self._nixl = nixl
        self._context = zmq.Context()
        self._workers: dict[str, Worker] = {}
        self._some_ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for address in self._addresses:
            self._add(address, None)
        self._spawn(self._follow_registry(), "registry")
        self._spawn(self._watch_heartbeats(), "heartbeats")

    @property
    def frontend(self) -> str:
        """The name that workers know this frontend by."""
        return self._hello.frontend

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def ready_workers(self) -> dict[str, Worker]:
        return {w.name: w for w in self._workers.values() if w.ready}

    async def wait_until_ready(self, timeout: float) -> bool:
        """Wait for a ready worker, at most ``timeout`` seconds."""
        if self._some_ready.is_set():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._some_ready.wait()
        return self._some_ready.is_set()

    async def close(self) -> None:
        for worker in self.workers:
            worker.link.send(Bye())
        tasks = [*self._tasks, *(t for w in self.workers for t in w.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self.workers:
            worker.link.close()
            if worker.kv is not None:
                worker.kv.close()
            if worker.process is not None:
                worker.process.close()
        await self._nixl.close()
        self._workers.clear()
        self._context.term()

    async def _follow_registry(self) -> None:
        async for records in self._registry.watch():
            by_address = {r.address: r for r in records.values()}
            for address, record in by_address.items():
                if address not in self._workers:
                    self._add(address, record)
                else:
                    self._workers[address].record = record
            for address, worker in list(self._workers.items()):
                if address not in by_address and address not in self._addresses:
                    self._remove(worker)

    async def _watch_heartbeats(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            # After a stall of our own, what workers have said is still to be read.
            stalled = now - asleep > 2 * HEARTBEAT_SECONDS
            for worker in self.workers:
                if not worker.epoch:
                    # Also one that was refused: another may have taken its address.
                    worker.link.send(self._hello)
                elif worker.is_silent(now) and not stalled:
                    self._lose(worker, "does not answer")
                else:
                    worker.link.send(Ping())

    def _add(self, address: str, record: WorkerRecord | None) -> None:
        link = FrontendLink(self._context, self._hello.frontend, address)
        worker = self._workers[address] = Worker(address, link)
        worker.record = record
        link.watch_breaks(lambda: self._lose(worker, "was disconnected"))
        worker.tasks.append(
            asyncio.create_task(self._listen(worker), name=f"from {address}")
        )
        link.send(self._hello)

    def _remove(self, worker: Worker) -> None:
        self._lose(worker, "has left")
        self._events.on_gone(worker)
        del self._workers[worker.address]
        if worker.process is not None:
            worker.process.close()
        worker.link.send(Bye())
        worker.link.close()
        for task in worker.tasks:
            task.cancel()

    async def _listen(self, worker: Worker) -> None:
        while True:
            message, payload = await worker.link.receive()
            worker.last_heard = time.monotonic()
            match message:
                case Ready():
                    self._admit(worker, message)
                case Refused():
                    self._refuse(worker, message.worker, f"it refuses us: {message.reason}")
                case Bye():
                    self._lose(worker, "has said goodbye")
                case TransferChosen() | Pulling():
                    self._nixl.on_message(worker, message)
                case _ if worker.epoch:
                    try:
                        self._events.on_message(worker, message, payload)
                    except BadMessage as error:
                        self._lose(worker, f"sends what cannot be read ({error})")

    def _admit(self, worker: Worker, ready: Ready) -> None:
        if worker.epoch == ready.epoch:
            return  # the answer to a repeated hello
        self._lose(worker, "was restarted")
        if problem := self._mismatch(ready.facts):
            self._refuse(worker, ready.worker, problem)
            return
        identity = (ready.worker, ready.epoch)
        if any((other.name, other.epoch) == identity for other in self.workers):
            logger.warning("%s is worker %s once more", worker.address, ready.worker)
            self._remove(worker)
            return
        worker.refused = ""
        self._agreed = self._agreed or ready.facts
        worker.name, worker.facts, worker.epoch = ready.worker, ready.facts, ready.epoch
        worker.transfer, worker.transfer_reason = ready.transfer, ready.transfer_reason
        worker.kv = KvSubscriber(self._context, _reachable(ready.kv_address, worker.address))
        self._watch_process(worker)
        worker.tasks += [
            asyncio.create_task(self._hear_news(worker, worker.kv), name="KV plane"),
            asyncio.create_task(self._prepare(worker, ready.nixl), name="prepare worker"),
        ]

    async def _prepare(self, worker: Worker, takes_offers: bool) -> None:
        """Let requests go to a worker once it has been brought up to date."""
        try:
            await self._nixl.settle(worker, takes_offers, worker.link.send)
            if self._hello.transfer not in ("auto", worker.transfer):
                logger.warning(
                    "--mm-transfer %s, but tensors for %s go %s: %s",
                    self._hello.transfer, worker.name, worker.transfer,
                    worker.transfer_reason,
                )
            await self._events.prepare(worker)
        except Exception as error:  # whatever it is, this worker cannot be used
            logger.exception("worker %s cannot be used", worker.name)
            worker.refused = str(error)
            if self._agreed is worker.facts and not self.ready_workers():
                self._agreed = None  # it must not decide who may come after it
            return
        worker.ready = True
        self._some_ready.set()
        logger.info(
            "worker %s is ready (%s: %s)", worker.name, worker.transfer, worker.transfer_reason
        )

    def _refuse(self, worker: Worker, name: str, problem: str) -> None:
        if worker.refused != problem:  # it is asked again and again
            logger.error("worker %s cannot be used: %s", name, problem)
        worker.name, worker.refused = name, problem

    def _watch_process(self, worker: Worker) -> None:
        """Hear at once of the end of a process on this host."""
        record = worker.record
        if record is None or not record.is_local():
            return

        def ended() -> None:
            self._lose(worker, "has died")
            self._events.on_gone(worker)
            self._registry.withdraw(record.worker)

        if worker.process is not None:
            worker.process.close()
        worker.process = watch_process(record.pid, record.start_time, ended)

    async def _hear_news(self, worker: Worker, kv: KvSubscriber) -> None:
        while True:
            news = await kv.receive()
            if isinstance(news, LoadReport):
                self._events.on_report(worker, news)
            else:
                self._events.on_delta(worker, news)

    def _lose(self, worker: Worker, why: str) -> None:
        if not worker.epoch:
            return
        logger.warning("worker %s %s", worker.name, why)
        worker.ready = False
        worker.epoch = ""
        if worker.kv is not None:
            worker.kv.close()
            worker.kv = None
        for task in worker.tasks[1:]:
            task.cancel()
        del worker.tasks[1:]
        if not self.ready_workers():
            self._some_ready.clear()
        self._nixl.on_lost(worker)
        self._events.on_lost(worker)

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

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)


MAY_DIFFER = frozenset({"num_kv_blocks", "max_num_seqs", "max_num_batched_tokens"})
"""Facts in which workers of one fleet need not agree."""


def _reachable(address: str, via: str) -> str:
    """``address``, on the host of ``via`` where it means every address of its host."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if address.startswith(everywhere):
            return f"{via.rpartition(':')[0]}:{address.removeprefix(everywhere)}"
    return address


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended", task.get_name(), exc_info=error)



"""Which workers there are, which of them are ready, and when one is lost.

For each worker that discovery names there is one ``Worker`` with a line to it. It is
greeted until it answers (frontend.handshake), listened to, and pinged. A worker that leaves
or falls silent is lost: it is told to ``on_lost`` and greeted again as long as discovery
names it. One that drains finishes what it has, and gets nothing new.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from frontend.handshake import Handshake
from frontend.nixl_offers import NixlOffers
from frontend.worker import PoolEvents, Worker
from transfer.access import Access
from transfer.discovery import Discovery
from transfer.errors import BadMessage, TransferError
from transfer.link import HEARTBEAT_SECONDS, FrontendLink, KvSubscriber
from transfer.messages import (
    Bye,
    Draining,
    Frame,
    Hello,
    LoadReport,
    Message,
    Outputs,
    Ping,
    Pulling,
    Ready,
    Refused,
    TransferChosen,
)
from transfer.process_watch import watch_process
from transfer.registry import WorkerRecord

logger = logging.getLogger(__name__)

GREETINGS = 30
"""Unanswered greetings after which the line is made anew: those that nobody reads stay
queued in it, and must not pile up while a worker is away."""
WATCH_SECONDS = 0.25
"""How often that is looked at: a worker is missed within 3 seconds."""
LAST_WORDS_SECONDS = 1.0
"""How long after the end of a worker's process its connection may take to break, behind
what it still said. Only where something else holds the connection does it take as long."""

_UNPROTECTED = Access()


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
        access: Access = _UNPROTECTED,
    ) -> None:
        """``expected``: facts that this frontend's own settings state, by field name."""
        self._registry = registry
        self._addresses = addresses
        self._events = events
        self._nixl = nixl
        self._context = zmq.Context()
        self._handshake = Handshake(hello, expected, events, nixl, self._context, access)
        self._workers: dict[str, Worker] = {}
        """By address."""
        self._elsewhere: dict[str, str] = {}
        """Addresses given by a flag whose worker answers at another one, with its epoch."""
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
        return self._handshake.hello.frontend

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def ready_workers(self) -> dict[str, Worker]:
        """Those that new requests may go to, by name."""
        return {n: w for n, w in self.reachable_workers().items() if not w.draining}

    def reachable_workers(self) -> dict[str, Worker]:
        """Those that have requests or may get some, by name."""
        return {w.name: w for w in self._workers.values() if w.ready and not w.encodes}

    def encode_workers(self) -> list[Worker]:
        """Those that only encode, and are ready to."""
        return [
            w for w in self._workers.values() if w.ready and w.encodes and not w.draining
        ]

    def own_logits_processors(self) -> bool:
        """Whether any worker has logits processors that are not vLLM's own."""
        return any(w.facts and w.facts.own_logits_processors for w in self.workers)

    async def wait_until_ready(self, timeout: float) -> bool:
        """Wait for a ready worker, at most ``timeout`` seconds."""
        if self._some_ready.is_set():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._some_ready.is_set():  # it may be gone again on waking up
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
            worker.close()
        await self._nixl.close()
        self._workers.clear()
        self._context.term()

    async def _follow_registry(self) -> None:
        async for records in self._registry.watch():
            by_address = {r.address: r for r in records.values()}
            reached = {w.name for w in self.workers if w.epoch}
            for address, record in by_address.items():
                if address not in self._workers:
                    if record.worker in reached:
                        continue  # at another address, which will do
                    try:
                        self._add(address, record)
                    except TransferError as error:
                        logger.error("worker %s cannot be used: %s", record.worker, error)
                else:
                    self._workers[address].record = record
            for address, worker in self._workers.items():
                worker.listed = address in by_address or address in self._addresses
            self._remove_unlisted()

    def _remove_unlisted(self) -> None:
        """Forget workers that discovery does not name any more, once they are lost.

        Not one that answers: who leaves says goodbye, and a worker that cannot reach etcd
        for a while has requests to finish.
        """
        for worker in self.workers:
            if not worker.listed and not worker.epoch:
                self._remove(worker)

    async def _watch_heartbeats(self) -> None:
        beat = time.monotonic()
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            due = now - beat >= HEARTBEAT_SECONDS
            beat = now if due else beat
            for worker in self.workers:
                # While we could not listen nobody was silent.
                worker.last_heard += now - asleep - WATCH_SECONDS
                try:
                    self._watch(worker, now, due)
                except Exception:  # whatever it is, the others are to be watched
                    logger.exception("worker %s cannot be watched", worker.name)
            self._remove_unlisted()
            self._try_other_addresses()

    def _try_other_addresses(self) -> None:
        """Use those again whose worker does not answer elsewhere any more."""
        epochs = {worker.epoch for worker in self.workers}
        for address in [a for a, epoch in self._elsewhere.items() if epoch not in epochs]:
            with suppress(TransferError):  # then in a moment
                self._add(address, None)
                del self._elsewhere[address]

    def _watch(self, worker: Worker, now: float, due: bool) -> None:
        """See whether a worker is silent, and speak to it if that is ``due``."""
        if worker.epoch and worker.is_silent(now):
            self._lose(worker, "does not answer")
        if due and worker.epoch:
            worker.link.send(Ping())
        elif due:  # also if it was refused: another may have taken its address
            self._greet(worker)

    def _add(self, address: str, record: WorkerRecord | None) -> None:
        link = self._handshake.open_link(address)
        worker = self._workers[address] = Worker(address, link)
        worker.record = record
        self._use(worker, link)
        link.send(self._handshake.hello)

    def _use(self, worker: Worker, link: FrontendLink) -> None:
        """Speak and listen to a worker over ``link``."""
        worker.link = link
        link.watch_breaks(lambda: self._lose_heard(worker, "was disconnected"))
        listening = asyncio.create_task(self._listen(worker), name=f"from {worker.address}")
        worker.tasks.insert(0, listening)

    def _greet(self, worker: Worker) -> None:
        worker.greetings += 1
        if worker.greetings % GREETINGS == 0:
            link = self._handshake.open_link(worker.address)
            worker.link.abandon()
            worker.tasks.pop(0).cancel()
            self._use(worker, link)
        worker.link.send(self._handshake.hello)

    def _give_up_line(self, worker: Worker, epoch: str, address: str) -> None:
        """A worker has answered at another address, too.

        Nothing goes over the first line any more: ZeroMQ sends what is for this frontend to
        where it was heard of last, and so it hears only that. What the worker had been sent
        it has dropped.
        """
        logger.warning("worker %s is %s and %s", worker.name, worker.address, address)
        self._lose(worker, f"answers at {address}")
        if worker.address in self._addresses:
            self._elsewhere[worker.address] = epoch
        self._forget(worker)
        worker.link.abandon()

    def _remove(self, worker: Worker) -> None:
        self._lose(worker, "has left")
        self._forget(worker)
        worker.link.send(Bye())
        worker.link.close()

    def _forget(self, worker: Worker) -> None:
        """All but its line, which is to be closed."""
        self._events.on_gone(worker.name)
        del self._workers[worker.address]
        if worker.process_watch is not None:
            worker.process_watch.close()
        for task in worker.tasks:
            task.cancel()

    async def _listen(self, worker: Worker) -> None:
        while True:
            try:
                message, payload = await worker.link.receive()
            except BadMessage as error:
                self._lose(worker, f"sends what cannot be read ({error})")
                continue
            worker.last_heard = time.monotonic()
            worker.greetings = 0
            self._hear(worker, message, payload)

    def _hear(self, worker: Worker, message: Message, payload: Sequence[Frame]) -> None:
        try:
            self._use_message(worker, message, payload)
        except BadMessage as error:
            self._lose(worker, f"sends what cannot be read ({error})")
        except Exception as error:  # whatever it is, this worker must be heard again
            logger.exception("what worker %s sends cannot be used", worker.name)
            if isinstance(message, Outputs):  # tokens are missing now
                self._lose(worker, f"sends what cannot be used ({error!r})")

    def _use_message(
        self, worker: Worker, message: Message, payload: Sequence[Frame]
    ) -> None:
        match message:
            case Ready():
                self._admit(worker, message)
            case Refused():
                problem = f"it refuses us: {message.reason}"
                self._handshake.refuse(worker, message.worker, problem)
            case Draining():
                self._spare(worker, message.seconds)
            case Bye():
                self._lose(worker, "has said goodbye")
            case TransferChosen() | Pulling():
                self._nixl.on_message(worker, message)
            case _ if worker.epoch:
                self._events.on_message(worker, message, payload)

    def _admit(self, worker: Worker, ready: Ready) -> None:
        if worker.epoch == ready.epoch:
            return  # the answer to a repeated hello
        self._lose(worker, "was restarted")
        if worker.process is not None and worker.process.is_dead():
            self._events.on_gone(worker.name)  # its successor was heard of first
        for other in self.workers:
            if (other.name, other.epoch) == (ready.worker, ready.epoch):
                self._give_up_line(other, ready.epoch, worker.address)
        kv = self._handshake.accept(worker, ready)
        if kv is None:
            return
        self._watch_process(worker)
        worker.tasks += [
            asyncio.create_task(self._hear_news(worker, kv), name="KV plane"),
            asyncio.create_task(self._prepare(worker, ready.nixl), name="prepare worker"),
        ]

    async def _prepare(self, worker: Worker, takes_offers: bool) -> None:
        """Let requests go to a worker once it has been brought up to date."""
        if not await self._handshake.prepare(worker, takes_offers):
            if not self.ready_workers():
                self._handshake.forget(worker)
            return
        worker.ready = True
        if not worker.draining and not worker.encodes:
            self._some_ready.set()
        logger.info(
            "worker %s is ready (%s: %s)", worker.name, worker.transfer, worker.transfer_reason
        )

    def _watch_process(self, worker: Worker) -> None:
        """Hear at once of the end of a process on this host."""
        if worker.process_watch is not None:
            worker.process_watch.close()
            worker.process_watch = None
        process = worker.process
        if process is None or not process.is_local():
            return
        # As of now: a successor may have its place by the time that the end is heard of.
        bury = partial(self._bury, worker, worker.name, worker.epoch, worker.record)

        def ended() -> None:
            self._spawn(bury(), "end of a worker")

        worker.process_watch = watch_process(process.pid, process.start_time, ended)

    async def _bury(
        self, worker: Worker, name: str, epoch: str, record: WorkerRecord | None
    ) -> None:
        """Lose a worker whose process has ended, once what it still said has come in."""
        if worker.epoch == epoch:
            worker.ready = False
            self._note_readiness()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await worker.lost.wait()
        if worker.epoch == epoch:  # else it is lost, or another has taken its place
            self._lose_heard(worker, "has died")
        self._events.on_gone(name)
        if record is not None:
            self._registry.withdraw(record.worker)

    async def _hear_news(self, worker: Worker, kv: KvSubscriber) -> None:
        while True:
            news = await kv.receive()
            try:
                if isinstance(news, LoadReport):
                    self._events.on_report(worker, news)
                else:
                    self._events.on_delta(worker, news)
            except Exception:  # whatever it is: a delta that is missing is noticed
                logger.exception("news of worker %s cannot be used", worker.name)

    def _spare(self, worker: Worker, seconds: float) -> None:
        """Send nothing new to a worker that is going to leave."""
        logger.info("worker %s drains, for at most %.0f s", worker.name, seconds)
        worker.draining = True
        self._note_readiness()

    def _lose_heard(self, worker: Worker, why: str) -> None:
        """Lose a worker, but use what it has said before: it may be whole answers."""
        for message, payload in worker.link.last_words():
            self._hear(worker, message, payload)
        self._lose(worker, why)

    def _lose(self, worker: Worker, why: str) -> None:
        if not worker.epoch:
            return
        logger.warning("worker %s %s", worker.name, why)
        worker.ready = False
        worker.epoch = ""
        worker.lost.set()
        if worker.kv is not None:
            worker.kv.close()
            worker.kv = None
        for task in worker.tasks[1:]:
            task.cancel()
        del worker.tasks[1:]
        self._note_readiness()
        self._nixl.on_lost(worker)
        self._events.on_lost(worker)

    def _note_readiness(self) -> None:
        """Have new requests wait when there is nobody to go to."""
        if not self.ready_workers():
            self._some_ready.clear()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended", task.get_name(), exc_info=error)



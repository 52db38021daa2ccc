"""Processes that decode and process images beside the frontend's own.

An item is asked for by its ``mm_hash``, and however many ask for it at once, it is
processed once. What comes back is in the processor cache and held in place for as long as
the result is kept; whoever gets None instead has vLLM process the item as it would without
this pool. An item whose process ends over it is tried once more, in a new process, and
never in the frontend itself.

vLLM names relied on: multimodal.inputs.MultiModalKwargsItem.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from vllm.multimodal.inputs import MultiModalKwargsItem

from configs.schema import FrontendConfig
from frontend.admission import let_others_begin
from frontend.arena_cache import ArenaProcessorCache, Held
from frontend.preprocess.messages import Failed, Setup, Work
from frontend.preprocess.metrics import PreprocessMetrics
from frontend.preprocess.processes import (
    Finished,
    NeverBegan,
    NoProcesses,
    NoRoom,
    PreprocessProcess,
    Template,
)
from frontend.preprocess.prompt_updates import from_plain
from frontend.preprocess.refusals import (
    LOST,
    Refused,
    overdue,
    poisonous,
    too_many,
    unreadable,
)
from transfer.arena import Arena
from transfer.errors import BadMessage, PeerLost
from transfer.pack import ItemPlan, refer
from transfer.payload import decode_payload_as

logger = logging.getLogger(__name__)

ATTEMPTS = 2
MOST_BY_DEFAULT = 4
START_SECONDS = 180.0
"""How long a template may take to load the model's processor."""
RESTART_SECONDS = (1.0, 60.0)
"""How long to wait before a lost template is replaced: at first, and at most."""


@dataclass
class _Job:
    mm_hash: str
    work: Work
    asked: float
    deadline: float
    result: asyncio.Future[Held | Refused | None]
    attempts: int = 0
    waiting: int = 0
    """How many requests still want it."""


@dataclass(frozen=True)
class PoolSettings:
    workers: int
    queue: int
    """How many items may wait."""
    seconds: float
    """How long an item may take, waiting included."""


def begin_preprocessing(
    settings: FrontendConfig, setup: Setup, arena: Arena, cache: ArenaProcessorCache
) -> PreprocessPool | None:
    """Begin to load a pool as the settings say; None where they want none."""
    workers = settings.mm_preprocess_workers
    if workers is None:
        workers = default_workers(settings.frontends)
    if not workers:
        return None
    pool = PreprocessPool(
        PoolSettings(workers, settings.mm_preprocess_queue, settings.mm_preprocess_timeout),
        lambda: Template(setup),
        arena,
        cache,
        PreprocessMetrics(),
    )
    pool.begin()
    return pool


def default_workers(frontends: int) -> int:
    """Processes for each of ``frontends`` on this machine: they take what those leave."""
    processors = len(os.sched_getaffinity(0)) // frontends
    return min(processors, MOST_BY_DEFAULT) if processors > 1 else 0


class PreprocessPool:
    """Preprocess processes and the queue before them. For one event loop."""

    def __init__(
        self,
        settings: PoolSettings,
        make_template: Callable[[], Template],
        arena: Arena,
        cache: ArenaProcessorCache,
        metrics: PreprocessMetrics,
    ) -> None:
        self._settings = settings
        self._make_template = make_template
        self._arena = arena
        self._cache = cache
        self._metrics = metrics
        self._template: Template | None = None
        self._up = False
        """Whether there are processes, or will be before the first request."""
        self._jobs: dict[str, _Job] = {}
        """By ``mm_hash``, from being asked for until answered."""
        self._queue: deque[_Job] = deque()
        self._queued = asyncio.Semaphore(0)
        """Released once for every job that is queued."""
        self._serving: set[asyncio.Task[None]] = set()
        self._restarting: asyncio.Task[None] | None = None
        self._running: dict[int, _Job] = {}
        """By process id."""
        metrics.waiting.set_function(lambda: len(self._queue))

    @property
    def running(self) -> dict[int, int]:
        """Process ids that work on an item, with how often that item has been tried."""
        return {pid: job.attempts for pid, job in self._running.items()}

    def begin(self) -> None:
        """Start loading; ``start`` waits for it."""
        self._template = self._make_template()
        self._up = True

    async def start(self) -> None:
        """Wait until every process is up. Without them, items are left to the frontend."""
        try:
            await self._start_processes()
        except NoProcesses as error:
            logger.warning("images are processed in the frontend itself: %s", error)
            self._lose_template()

    async def close(self) -> None:
        """End all processes; what waits is left to the frontend."""
        tasks = [*self._serving, *([self._restarting] if self._restarting else [])]
        for task in tasks:
            task.cancel()
        self._stop_template()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def process(self, mm_hash: str, work: Work) -> Held | None:
        """Have an item processed, unless it is in the cache, and return a hold on it.

        None: it is not; vLLM must process it.

        Raises:
            VLLMValidationError: the item cannot be decoded, or ends whoever tries.
            GracefulHTTPError: too many items wait, or it took too long.
        """
        # Another request may have had it processed since the caller looked.
        if (held := self._cache.hold(mm_hash)) is not None:
            return held
        job = self._jobs.get(mm_hash)
        if job is None:
            if not self._up:
                self._metrics.fallbacks.labels("no processes").inc()
                return None
            if len(self._queue) >= self._settings.queue:
                raise self._error(too_many(len(self._queue)))
            job = self._add_job(mm_hash, work)
        else:
            self._metrics.shared.inc()
        job.waiting += 1
        let_others_begin()
        try:
            result = await asyncio.shield(job.result)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.attempts and not job.result.done():
                self._drop(job)
        if isinstance(result, Refused):
            raise self._error(result)
        return result

    def _add_job(self, mm_hash: str, work: Work) -> _Job:
        now = time.monotonic()
        result = asyncio.get_running_loop().create_future()
        job = _Job(mm_hash, work, now, now + self._settings.seconds, result)
        self._jobs[mm_hash] = job
        self._queue.append(job)
        self._queued.release()
        return job

    def _requeue(self, job: _Job) -> None:
        self._queue.appendleft(job)
        self._queued.release()

    def _drop(self, job: _Job) -> None:
        """Nobody wants this job any more."""
        self._answer(job, None)
        with suppress(ValueError):
            self._queue.remove(job)
        self._metrics.skipped.inc()

    def _answer(self, job: _Job, result: Held | Refused | None) -> None:
        if self._jobs.get(job.mm_hash) is job:
            del self._jobs[job.mm_hash]
        if not job.result.done():
            job.result.set_result(result)

    def _error(self, refused: Refused) -> Exception:
        self._metrics.refused.labels(refused.reason).inc()
        return refused.error()

    # The template and its processes.

    def _lose_template(self) -> None:
        """Do without processes for a while."""
        self._stop_template()
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart())

    def _stop_template(self) -> None:
        self._up = False
        if self._template is not None:
            self._template.end()
            self._template = None
        for task in self._serving - {asyncio.current_task()}:
            task.cancel()
        for job in list(self._jobs.values()):
            if job.attempts:  # it may be why they are gone
                self._answer(job, LOST)
            else:
                self._metrics.fallbacks.labels("no processes").inc()
                self._answer(job, None)
        self._queue.clear()

    async def _start_processes(self) -> None:
        """Raises: NoProcesses."""
        if self._template is None:
            self._template = self._make_template()
        template = self._template
        await template.ready(START_SECONDS)
        processes: list[PreprocessProcess] = []
        try:
            for _ in range(self._settings.workers):
                processes.append(await template.fork())
        except BaseException:
            for process in processes:
                await asyncio.shield(process.end())
            raise
        for process in processes:
            task = asyncio.create_task(self._serve(process, template))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        self._up = True
        logger.info("%d preprocess processes are up", len(processes))

    async def _restart(self) -> None:
        wait, longest = RESTART_SECONDS
        while True:
            await asyncio.sleep(wait)
            wait = min(2 * wait, longest)
            try:
                await self._start_processes()
                return
            except (NoProcesses, OSError) as error:
                logger.warning("still no preprocess processes: %s", error)
                self._stop_template()

    async def _serve(self, process: PreprocessProcess, template: Template) -> None:
        """Give a process one item after the other, and replace it when it ends."""
        self._metrics.processes.inc()
        try:
            while True:
                job = await self._next()
                if not process.is_alive():
                    await process.end()
                    process = await template.fork()
                    logger.warning("preprocess process %d takes over", process.pid)
                await self._work(job, process)
                del job  # its result holds an item in place
        except NoProcesses as error:
            logger.error("no preprocess processes any more: %s", error)
            self._lose_template()
        except Exception:  # whatever it is, nobody may wait for what is not served
            logger.exception("a preprocess process cannot be served")
            self._lose_template()
        finally:
            self._metrics.processes.dec()
            await asyncio.shield(process.end())

    async def _next(self) -> _Job:
        while True:
            await self._queued.acquire()
            if not self._queue:
                continue  # it was dropped meanwhile
            job = self._queue.popleft()
            if job.waiting:
                return job
            self._drop(job)

    async def _work(self, job: _Job, process: PreprocessProcess) -> None:
        """Have a job done and answered, or put back; ends a process that fails at it."""
        began = time.monotonic()
        if began >= job.deadline:
            self._answer(job, overdue(self._settings.seconds))
            return
        if not job.attempts:
            self._metrics.waited.observe(began - job.asked)
        job.attempts += 1
        self._running[process.pid] = job
        result: Held | Refused | None
        try:
            async with asyncio.timeout(job.deadline - began):
                result = await self._result(job, process)
            self._metrics.seconds.observe(time.monotonic() - began)
        except NoRoom:
            self._metrics.fallbacks.labels("no room in the arena").inc()
            result = None
        except TimeoutError:
            await process.end()
            result = overdue(self._settings.seconds)
        except NeverBegan:
            await process.end()
            job.attempts -= 1
            self._requeue(job)
            return
        except (PeerLost, BadMessage) as error:
            logger.warning("preprocess process %d is lost: %s", process.pid, str(error))
            self._metrics.crashes.inc()
            await process.end()
            if job.attempts < ATTEMPTS:
                self._requeue(job)
                return
            result = poisonous(ATTEMPTS)
        except Exception:  # the arena may have been closed: the frontend is stopping
            logger.exception("an image could not be processed")
            await process.end()
            result = LOST
        finally:
            del self._running[process.pid]
        self._answer(job, result)

    async def _result(self, job: _Job, process: PreprocessProcess) -> Held | Refused | None:
        """Raises: NoRoom, PeerLost, BadMessage."""
        outcome = await process.run(job.work, self._arena)
        if isinstance(outcome, Finished):
            return self._keep(job.mm_hash, outcome)
        return self._refusal(outcome)

    def _refusal(self, failed: Failed) -> Refused | None:
        if failed.unreadable:
            return unreadable(failed.reason)
        # vLLM shall say it, in its own words.
        logger.info("an item is left to the frontend: %s", failed.reason)
        self._metrics.fallbacks.labels("processor").inc()
        return None

    def _keep(self, mm_hash: str, finished: Finished) -> Held:
        """Raises: BadMessage."""
        done, lease = finished.done, finished.lease
        self._cache.copy_seconds += done.copy_seconds
        frames = [bytearray(frame) for frame in done.item]
        item = decode_payload_as(MultiModalKwargsItem, frames)
        if lease is not None:
            layout = ItemPlan(done.nbytes, done.tensors, done.fields)
            item = refer(layout, item, lease.entry)
        updates = [from_plain(update) for update in done.updates]
        return self._cache.add(mm_hash, done.identity, item, lease, updates)

"""Real processes, made-up images: what is asked for, what breaks, and what is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from frontend.arena_cache import ArenaProcessorCache
from frontend.preprocess.messages import Media, Setup, Work
from frontend.preprocess.metrics import PreprocessMetrics
from frontend.preprocess.pool import PoolSettings, PreprocessPool, default_workers
from frontend.preprocess.processes import NoProcesses, PreprocessProcess, Template
from tests.fakes import HASHER, eventually, within
from tests.frontend.preprocess.fake_template import MODEL, UPDATES, item_of
from transfer import pack
from transfer.arena import Arena

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-m", "tests.frontend.preprocess.fake_template")
SEED = bytes(range(32))
ITEM_BYTES = 4096


class SharedTemplate(Template):
    """One process for many pools: starting it takes seconds."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(Setup((), arena.id, SEED, "xxh3_128", "idle"), COMMAND)
        self._is_ready = False

    async def ready(self, seconds: float) -> None:
        if not self._is_ready:
            await super().ready(seconds)
        self._is_ready = True

    def end(self) -> None:
        pass

    def really_end(self) -> None:
        super().end()


class OneFork(SharedTemplate):
    """A template that is lost after its first process."""

    def __init__(self, real: SharedTemplate) -> None:
        self._real: SharedTemplate | None = real

    async def ready(self, seconds: float) -> None:
        if self._real is None:
            raise NoProcesses("it is lost")
        await self._real.ready(seconds)

    async def fork(self) -> PreprocessProcess:
        if self._real is None:
            raise NoProcesses("it is lost")
        real, self._real = self._real, None
        return await real.fork()


class NoTemplate(SharedTemplate):
    def __init__(self) -> None:
        pass

    async def ready(self, seconds: float) -> None:
        raise NoProcesses("there is none")


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena(64 * ITEM_BYTES) as arena:
        yield arena


@pytest.fixture(scope="module")
def template(arena: Arena) -> Iterator[SharedTemplate]:
    template = SharedTemplate(arena)
    yield template
    template.really_end()


@pytest.fixture
def cache(arena: Arena) -> ArenaProcessorCache:
    arena.drop_unleased()
    return ArenaProcessorCache(arena, HASHER, MODEL)


MakePool = Callable[..., Any]


@pytest.fixture
async def make_pool(
    arena: Arena, template: SharedTemplate, cache: ArenaProcessorCache
) -> AsyncIterator[MakePool]:
    pools = []

    async def make(
        workers: int = 1, queue: int = 100, seconds: float = 20.0, template: Any = template
    ) -> PreprocessPool:
        metrics = PreprocessMetrics(CollectorRegistry())
        settings = PoolSettings(workers, queue, seconds)
        pool = PreprocessPool(settings, lambda: template, arena, cache, metrics)
        pools.append(pool)
        await within(pool.start(), 180)  # a busy machine imports slowly
        return pool

    yield make
    for pool in pools:
        await pool.close()
    gc.collect()
    assert arena.stats().leased_entries == 0, "leases are left"
    arena.drop_unleased()
    assert arena.stats().bytes_used == 0, "reservations are left"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is left in cycles stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def work(command: str | int) -> Work:
    return Work("image", Media(str(command).encode(), None, (255, 255, 255), "RGB"), {})


def value(metric: Any) -> float:
    return metric._value.get()


async def test_what_a_process_makes_is_what_the_frontend_would_make(
    arena: Arena, cache: ArenaProcessorCache, make_pool: MakePool
) -> None:
    pool = await make_pool()
    held = await within(pool.process("a", work(5)))
    item, updates = cache.get_and_update_item(None, "a")
    ours = cache.store(item_of(5))
    assert item.identity == ours.identity
    assert item.keys() == ours.keys()
    reference = pack.read_reference(item)
    assert reference == pack.read_reference(ours)
    resolved = pack.resolve(item, arena.view(reference.entry), reference)
    assert torch.equal(resolved["pixel_values"].data, item_of(5)["pixel_values"].data)
    assert torch.equal(item["image_grid_thw"].data, ours["image_grid_thw"].data)
    assert item["image_grid_thw"].field == ours["image_grid_thw"].field
    assert updates == UPDATES
    assert updates[0].content == UPDATES[0].content
    del held


async def test_an_item_stays_as_long_as_the_result_is_kept(
    arena: Arena, make_pool: MakePool
) -> None:
    pool = await make_pool()
    held = await within(pool.process("a", work(1)))
    arena.drop_unleased()
    assert arena.stats().entries == 1
    del held
    await asyncio.sleep(0)
    arena.drop_unleased()
    assert arena.stats().entries == 0


async def test_a_small_item_does_not_go_into_the_arena(
    arena: Arena, cache: ArenaProcessorCache, make_pool: MakePool
) -> None:
    pool = await make_pool()
    assert (await within(pool.process("s", work("small")))).lease is None
    assert arena.stats().entries == 0
    item, _ = cache.get_and_update_item(None, "s")
    assert item["grid"].data.tolist() == [1, 2, 4]


async def test_an_item_that_many_ask_for_is_processed_once(
    tmp_path: Path, make_pool: MakePool
) -> None:
    pool = await make_pool(workers=2)
    counted = work(f"count {tmp_path / 'runs'}")
    await within(asyncio.gather(*(pool.process("a", counted) for _ in range(64))))
    await within(pool.process("a", counted))
    assert (tmp_path / "runs").read_bytes() == b"."


async def test_the_first_request_for_a_new_item_counts_as_no_hit(
    cache: ArenaProcessorCache, make_pool: MakePool
) -> None:
    pool = await make_pool()
    held = await within(pool.process("a", work(1)))
    cache.get_and_update_item(None, "a")
    cache.get_and_update_item(None, "a")
    stats = cache.make_stats()
    assert (stats.hits, stats.total) == (1, 2)
    del held


async def test_an_item_whose_process_is_killed_is_done_by_the_next(
    tmp_path: Path, make_pool: MakePool
) -> None:
    pool = await make_pool()
    assert await within(pool.process("a", work(f"die-once {tmp_path / 'died'}"))) is not None
    assert value(pool._metrics.crashes) == 1


async def test_an_item_that_ends_two_processes_is_refused_and_nobody_else(
    make_pool: MakePool,
) -> None:
    pool = await make_pool()
    with pytest.raises(VLLMValidationError, match="2 processes ended"):
        await within(pool.process("poison", work("die")))
    assert await within(pool.process("a", work(1))) is not None
    assert value(pool._metrics.crashes) == 2


async def test_a_process_that_died_idle_costs_no_item_an_attempt(
    make_pool: MakePool,
) -> None:
    pool = await make_pool()
    up = asyncio.create_task(pool.process("a", work("sleep")))
    await eventually(lambda: pool.running)
    [pid] = pool.running
    up.cancel()
    os.kill(pid, signal.SIGKILL)  # its retry is skipped: nobody waits for it
    await eventually(lambda: value(pool._metrics.skipped) == 1)
    assert await within(pool.process("b", work(1))) is not None


async def test_an_item_that_takes_too_long_is_answered_and_its_process_replaced(
    make_pool: MakePool,
) -> None:
    pool = await make_pool(seconds=0.3)
    with pytest.raises(GracefulHTTPError, match="not processed within") as caught:
        await within(pool.process("slow", work("sleep")))
    assert caught.value.http_status == 503
    pool._settings = PoolSettings(1, 100, 20.0)
    assert await within(pool.process("a", work(1))) is not None


async def test_more_than_the_queue_takes_is_refused_at_once(make_pool: MakePool) -> None:
    pool = await make_pool(queue=2)
    asked = [asyncio.create_task(pool.process("0", work("sleep")))]
    await eventually(lambda: pool.running)
    asked += [asyncio.create_task(pool.process(f"{n}", work(n))) for n in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(GracefulHTTPError, match="2 images are waiting") as caught:
        await pool.process("3", work(3))
    assert caught.value.http_status == 503
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_what_nobody_waits_for_any_more_is_not_processed(
    tmp_path: Path, make_pool: MakePool
) -> None:
    pool = await make_pool()
    os.mkfifo(pipe := tmp_path / "pipe")
    first = asyncio.create_task(pool.process("first", work(f"wait {pipe}")))
    await eventually(lambda: pool.running)
    counted = work(f"count {tmp_path / 'runs'}")
    asked = [asyncio.create_task(pool.process("second", counted)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    pipe.write_bytes(b"1")
    assert await within(first) is not None
    assert await within(pool.process("third", work(3))) is not None
    assert not (tmp_path / "runs").exists()
    assert value(pool._metrics.skipped) == 1


async def test_one_of_two_who_wait_may_leave(tmp_path: Path, make_pool: MakePool) -> None:
    pool = await make_pool()
    os.mkfifo(pipe := tmp_path / "pipe")
    asked = [asyncio.create_task(pool.process("a", work(f"wait {pipe}"))) for _ in range(2)]
    await eventually(lambda: pool.running)
    asked[0].cancel()
    pipe.write_bytes(b"1")
    assert await within(asked[1]) is not None


async def test_without_room_in_the_arena_an_item_is_left_to_the_frontend(
    arena: Arena, make_pool: MakePool
) -> None:
    pool = await make_pool()
    everything = arena.reserve(arena.stats().bytes_total - 100)
    assert await within(pool.process("a", work(1))) is None
    everything.cancel()
    assert await within(pool.process("a", work(1))) is not None


async def test_an_image_that_cannot_be_decoded_is_the_clients_fault(
    make_pool: MakePool,
) -> None:
    pool = await make_pool()
    with pytest.raises(VLLMValidationError, match="Failed to load image: truncated"):
        await within(pool.process("a", work("refuse truncated")))


async def test_what_the_processor_raises_is_left_to_the_frontend_to_raise(
    make_pool: MakePool,
) -> None:
    pool = await make_pool()
    assert await within(pool.process("a", work("raise aspect ratio"))) is None


async def test_without_a_template_items_are_left_to_the_frontend(
    make_pool: MakePool,
) -> None:
    pool = await make_pool(template=NoTemplate())
    assert await within(pool.process("a", work(1))) is None


async def test_when_the_template_is_lost_items_are_left_to_the_frontend(
    template: SharedTemplate, make_pool: MakePool
) -> None:
    pool = await make_pool(template=OneFork(template))
    process = _process(pool)
    os.kill(process.pid, signal.SIGKILL)
    await eventually(lambda: not process.is_alive())
    assert await within(pool.process("a", work(1))) is None
    await eventually(lambda: not pool._serving)
    assert await within(pool.process("b", work(2))) is None


async def test_an_item_that_was_tried_when_the_template_was_lost_stays_out_of_the_frontend(
    template: SharedTemplate, make_pool: MakePool
) -> None:
    pool = await make_pool(template=OneFork(template))
    with pytest.raises(GracefulHTTPError, match="were lost"):
        await within(pool.process("a", work("die")))


async def test_fifty_kills_lose_no_item_and_leave_no_lease(
    arena: Arena, cache: ArenaProcessorCache, make_pool: MakePool, no_collector: None
) -> None:
    pool = await make_pool(workers=2)
    killed: set[int] = set()

    async def kill_some() -> None:
        while len(killed) < 50:
            await asyncio.sleep(0.003)
            for pid, attempts in pool.running.items():
                # A second kill over one item would make it a poisonous one.
                if attempts == 1 and pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)

    async def ask(number: int) -> None:
        held = await pool.process(f"k{number}", work(f"slow {number}"))
        assert held is not None
        item, _ = cache.get_and_update_item(None, f"k{number}")
        assert item.identity == cache.store(item_of(number)).identity

    async def ask_until_killed(first: int) -> None:
        number = first
        while len(killed) < 50:
            await ask(number)
            number += 4

    killer = asyncio.create_task(kill_some())
    await within(asyncio.gather(*(ask_until_killed(first) for first in range(4))), 120)
    await killer
    # Others were killed before they began, or when they had just said that they were done.
    assert 0 < value(pool._metrics.crashes) <= 50
    await eventually(lambda: arena.stats().leased_entries == 0)


async def test_memory_does_not_grow(make_pool: MakePool) -> None:
    pool = await make_pool()

    async def ask(numbers: range) -> None:
        for number in numbers:
            await within(pool.process(f"m{number}", work(number)))

    await ask(range(100))
    ours, theirs = _rss(os.getpid()), _rss(_pid(pool))
    await ask(range(100, 600))
    assert _rss(os.getpid()) - ours < 8 << 20
    assert _rss(_pid(pool)) - theirs < 8 << 20


async def test_processes_leave_the_processors_to_others(make_pool: MakePool) -> None:
    pool = await make_pool()
    assert os.sched_getscheduler(_pid(pool)) == os.SCHED_IDLE


@pytest.mark.parametrize(
    ("processors", "frontends", "workers"),
    [(1, 1, 0), (2, 1, 2), (3, 1, 3), (16, 1, 4), (16, 8, 2), (4, 4, 0), (2, 4, 0)],
)
def test_how_many_processes_there_are_by_default(
    processors: int, frontends: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert default_workers(frontends) == workers


def _process(pool: PreprocessPool) -> PreprocessProcess:
    [task] = pool._serving
    return task.get_coro().cr_frame.f_locals["process"]  # type: ignore[no-any-return]


def _pid(pool: PreprocessPool) -> int:
    return _process(pool).pid


def _rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")

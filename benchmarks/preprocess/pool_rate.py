"""Preprocess processes alone: how much more do two get done than one?"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from prometheus_client import CollectorRegistry

from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.processes import CHECKPOINT
from benchmarks.prompts import jpeg
from configs.demo.checkpoint import write_checkpoint
from frontend.arena_cache import ArenaProcessorCache
from frontend.preprocess.messages import Media, Setup, Work
from frontend.preprocess.metrics import PreprocessMetrics
from frontend.preprocess.pool import PoolSettings, PreprocessPool
from frontend.preprocess.processes import Template
from transfer.arena import Arena
from transfer.identity import SEED_BYTES, IdentityHasher

NAME, GOAL = "unique_scaling_2_over_1", ">=1.6"
SIZE = (1024, 768)
PICTURES = 40
ROUNDS = 5
ARENA_BYTES = 512 << 20
SECONDS = 120.0
FLAGS = ("--model", str(CHECKPOINT), "--dtype", "float32")


async def measure() -> list[Metric]:
    write_checkpoint(CHECKPOINT)
    pictures = [jpeg(*SIZE, seed) for seed in range(PICTURES)]
    rates: dict[int, list[float]] = {1: [], 2: []}
    with Arena(ARENA_BYTES) as arena:
        pools = {count: _pool(count, arena) for count in rates}
        try:
            for pool in pools.values():
                await pool.start()
            for turn in range(-1, ROUNDS):
                for count in sorted(pools, reverse=turn % 2 == 0):
                    rate = await _rate(pools[count], pictures, f"{turn}-{count}")
                    if turn >= 0:
                        rates[count].append(rate)
        finally:
            for pool in pools.values():
                await pool.close()
    print(
        f"  unique {SIZE[0]}x{SIZE[1]} pictures, medians of {ROUNDS} rounds of {PICTURES}: "
        f"one process {median(rates[1]):.1f} images/s, two {median(rates[2]):.1f}",
        flush=True,
    )
    return [Metric(NAME, rounded(median_ratio(rates[2], rates[1])), "ratio", GOAL)]


def _pool(workers: int, arena: Arena) -> PreprocessPool:
    seed = bytes(SEED_BYTES)
    return PreprocessPool(
        PoolSettings(workers, 10 * PICTURES, SECONDS),
        lambda: Template(Setup(FLAGS, arena.id, seed, "xxh3_128", "idle")),
        arena,
        ArenaProcessorCache(arena, IdentityHasher(seed), str(CHECKPOINT)),
        PreprocessMetrics(CollectorRegistry()),
    )


async def _rate(pool: PreprocessPool, pictures: list[bytes], name: str) -> float:
    """Images per second; each round names its pictures anew, so that all are processed."""

    async def process(number: int, picture: bytes) -> None:
        work = Work("image", Media(picture, None, (255, 255, 255), "RGB"), {})
        if await pool.process(f"{name}-{number}", work) is None:
            raise RuntimeError("a picture was left to the frontend")

    began = time.monotonic()
    await asyncio.gather(*(process(*each) for each in enumerate(pictures)))
    return len(pictures) / (time.monotonic() - began)

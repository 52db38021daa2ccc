"""Replays traces with every policy, each trace in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.replay.policies import POLICIES
from benchmarks.replay.prepare import prepare
from benchmarks.replay.results import Figures, boundless_hit_ratio, figures_of
from benchmarks.replay.simulation import LIMITS, Simulation
from benchmarks.replay.trace import TraceRequest


@dataclass(frozen=True)
class Compared:
    """All policies on one trace."""

    name: str
    num_requests: int
    figures: dict[str, Figures]
    """By policy."""
    boundless_hit_ratio: float
    preemptions: int
    wall_seconds: float


def compare(
    name: str,
    trace: Sequence[TraceRequest],
    workers: int,
    seed: int,
    policies: Sequence[str] = POLICIES,
) -> Compared:
    """Replay ``trace`` with each policy, on as many ``workers``."""
    began = time.monotonic()
    prepared = prepare(trace, LIMITS.block_size)
    replays = {
        policy: Simulation(prepared, policy, workers, seed=seed).run() for policy in policies
    }
    return Compared(
        name=name,
        num_requests=len(trace),
        figures={policy: figures_of(replay) for policy, replay in replays.items()},
        boundless_hit_ratio=boundless_hit_ratio(prepared, replays[policies[0]]),
        preemptions=sum(replay.preemptions for replay in replays.values()),
        wall_seconds=time.monotonic() - began,
    )


def compare_all(
    traces: dict[str, list[TraceRequest]], workers: int, seed: int
) -> Iterator[Compared]:
    """Yield the comparison for each trace as it is done, as many at once as processors."""
    processes = min(len(traces), os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        # The longest first, so that no processor is left with one at the end.
        by_length = sorted(traces, key=lambda name: -_tokens(traces[name]))
        futures = [
            pool.submit(compare, name, traces[name], workers, seed) for name in by_length
        ]
        for future in as_completed(futures):
            yield future.result()


def _tokens(trace: Sequence[TraceRequest]) -> int:
    return sum(request.prompt_tokens for request in trace)

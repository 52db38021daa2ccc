"""A fleet that is shown one picture after the other, no two alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.client import Client
from benchmarks.metrics import Metric, rounded
from benchmarks.processes import CHECKPOINT, Servers, free_ports, ready_workers
from benchmarks.prompts import jpeg, picture_request
from benchmarks.soak.memory import Samples, sample, table
from configs.deployment.children import Child

PROMISED: tuple[tuple[str, str, str | None], ...] = (
    ("rss_growth_last_half_percent", "%", "<=3"),
    ("soak_pictures", "pictures", None),
    ("soak_minutes", "minutes", None),
)
PICTURE_SIZE = (224, 224)
ANSWER_TOKENS = 4
CONCURRENCY = 4
SAMPLES = 120
"""How often memory is read during a run."""


@dataclass(frozen=True)
class Plan:
    minutes: float
    pictures: int
    engine: str
    """``vllm`` or ``mock``."""


def soak(plan: Plan) -> list[Metric]:
    """Show all pictures, evenly over the time; prints the table."""
    with Servers() as servers:
        (port,) = free_ports(1)
        children = [
            servers.start_worker("worker", *_worker_flags(plan.engine)),
            servers.start_frontend(
                "frontend", port, "--mm-arena-gb", "0.05", "--mm-preprocess-workers", "1"
            ),
        ]
        servers.wait("the fleet", lambda: ready_workers(port) == 1)
        began = time.monotonic()
        samples, shown = _show(plan, port, children)
        minutes = (time.monotonic() - began) / 60
    # Those that came late or left early have nothing to compare.
    full = [each for each in samples if len(each.values) >= SAMPLES // 2]
    print(f"\n{shown} pictures in {minutes:.1f} minutes\n{table(full)}\n")
    growth = max(each.growth for each in full) * 100
    values = (rounded(growth), shown, rounded(minutes))
    return [
        Metric(name, value, unit, goal)
        for (name, unit, goal), value in zip(PROMISED, values, strict=True)
    ]


def _worker_flags(engine: str) -> list[str]:
    if engine == "mock":
        return ["--engine", "mock", "--mock-speed", "100"]
    return []


def _show(plan: Plan, port: int, children: Sequence[Child]) -> tuple[list[Samples], int]:
    samples: dict[int, Samples] = {}
    began = time.monotonic()
    pace = plan.minutes * 60 / plan.pictures
    shown = 0

    def show(number: int) -> None:
        wait = began + number * pace - time.monotonic()
        if wait > 0:
            time.sleep(wait)  # so that the pictures fill the time
        body = picture_request(
            str(CHECKPOINT), jpeg(*PICTURE_SIZE, seed=number), "What is it?", ANSWER_TOKENS
        )
        with Client(port) as client:
            client.post("/v1/chat/completions", body)

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        each = max(1, plan.pictures // SAMPLES)
        for first in range(0, plan.pictures, each):
            numbers = range(first, min(plan.pictures, first + each))
            for _ in threads.map(show, numbers):
                shown += 1
            sample(children, samples)
    return list(samples.values()), shown

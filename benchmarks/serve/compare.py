"""Starts the systems one after the other, in another order each round, and measures them."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.metrics import CannotMeasure
from benchmarks.processes import ServerFailed, Servers
from benchmarks.serve.client import run_chats
from benchmarks.serve.results import Figures, figures_of
from benchmarks.serve.systems import SYSTEMS, System, model_of
from benchmarks.serve.workloads import WORKLOADS, warm_up

WARM_UP_SEED = 900_000


@dataclass(frozen=True)
class Plan:
    rounds: int
    systems: Sequence[str]
    workloads: Sequence[str]
    size: float
    """Share of each workload's size."""
    seed: int


class Comparison:
    """The figures, as far as they have come."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.rounds: dict[str, dict[str, list[Figures]]] = {
            name: defaultdict(list) for name in plan.systems
        }
        self.failures: dict[str, str] = {}
        """Why a system is not measured any more."""

    def run(self) -> None:
        chance = random.Random(self._plan.seed)
        for number in range(self._plan.rounds):
            order = list(self._plan.systems)
            chance.shuffle(order)
            print(f"\nround {number + 1}: {', '.join(order)}", flush=True)
            for name in order:
                if name in self.failures:
                    continue
                try:
                    self._measure(SYSTEMS[name], number)
                except (ServerFailed, CannotMeasure) as error:
                    print(f"  {name}: {error}", flush=True)
                    self.failures[name] = str(error).splitlines()[0]

    def _measure(self, system: System, number: int) -> None:
        """Raises: ServerFailed, CannotMeasure."""
        began = time.monotonic()
        with Servers() as servers:
            ports = system.start(servers)
            servers.wait(system.title, lambda: system.ready(ports))
            model = model_of(ports[0])
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            started = time.monotonic() - began
            run_chats(urls, model, warm_up(WARM_UP_SEED + 1000 * number))
            print(f"  {system.title}: started in {started:.0f} s", flush=True)
            for place, workload in enumerate(self._plan.workloads):
                seed = 10_000 * (number + 1) + 1000 * place
                chats = WORKLOADS[workload](seed, self._plan.size)
                figures = figures_of(run_chats(urls, model, chats))
                self.rounds[system.name][workload].append(figures)
                print(f"    {workload:9} {_short(figures)}", flush=True)


def _short(figures: Figures) -> str:
    cached = figures.cached_tokens / figures.prompt_tokens if figures.prompt_tokens else 0.0
    text = (
        f"{figures.requests_per_second:6.2f} requests/s, first token "
        f"{1000 * figures.ttft_p50:5.0f} ms, cached {cached:4.0%}"
    )
    if figures.errors:
        text += f", {figures.errors} errors: {figures.first_error}"
    return text

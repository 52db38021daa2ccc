"""The sections of this benchmark and what each promises to measure."""

from __future__ import annotations

import asyncio

from benchmarks.metrics import Metric
from benchmarks.preprocess import pool_rate, repeated, unique
from benchmarks.processes import Servers, free_ports, is_up, ready_workers
from benchmarks.prompts import jpeg

PROMISED: dict[str, list[tuple[str, str, str | None]]] = {
    "pool": [(pool_rate.NAME, "ratio", pool_rate.GOAL)],
    "unique": [
        (unique.RATE, "ratio", ">=1.0"),
        *((name, "ms", f"<={unique.OTHERS_MS:.0f}") for name in unique.OTHERS),
        (unique.BURST, "runs", "==1"),
    ],
    "repeated": [(name, "ratio", goal) for name, goal in repeated.GOALS.items()],
}
"""Name, unit and goal of each metric."""


def _unique() -> list[Metric]:
    with Servers() as servers:
        port, _ = _start_frontend(servers)
        servers.wait("the frontend", lambda: ready_workers(port) == 1)
        return [
            unique.measure_burst(port),
            unique.measure_rate(port),
            *unique.measure_others(port),
        ]


def _repeated() -> list[Metric]:
    picture = jpeg(*repeated.SIZE, seed=5)
    with Servers() as servers:
        port, pid = _start_frontend(servers)
        (plain_port,) = free_ports(1)
        plain = servers.start_plain("plain-vllm", plain_port)
        servers.wait(
            "the frontend and plain vLLM",
            lambda: ready_workers(port) == 1 and is_up(plain_port),
        )
        return repeated.measure(picture, (port, pid), (plain_port, plain.pid))


def _start_frontend(servers: Servers) -> tuple[int, int]:
    """A frontend with a worker that answers at once; returns its port and process id."""
    (port,) = free_ports(1)
    servers.start("posed-worker", "-m", "benchmarks.preprocess.posed_worker",
                  str(servers.registry))
    return port, servers.start_frontend("frontend", port).pid


_MEASURES = {
    "pool": lambda: asyncio.run(pool_rate.measure()),
    "unique": _unique,
    "repeated": _repeated,
}


def run(section: str) -> list[Metric]:
    return _MEASURES[section]()



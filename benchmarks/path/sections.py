"""The sections of this benchmark and what each promises to measure."""

from __future__ import annotations

import uvloop

from benchmarks.metrics import Metric
from benchmarks.path import copies, fleet, handover, message_size
from benchmarks.path.chain import MIB, Chain

PROMISED: dict[str, list[tuple[str, str, str | None]]] = {
    "size": [(message_size.NAME, message_size.UNIT, message_size.GOAL)],
    "handover": [
        (copies.NAME, copies.UNIT, copies.GOAL),
        (copies.PLAIN_NAME, copies.UNIT, None),
        *((handover.name_of(mib), "ratio", handover.GOALS.get(mib)) for mib in handover.SIZES),
        *((handover.read_name_of(mib), "ratio", None) for mib in handover.SIZES),
        *((handover.floor_name_of(mib), "ratio", None) for mib in handover.SIZES),
    ],
    "fleet": [(name, "ratio", goal) for name, goal in fleet.GOALS.items()],
}
"""Name, unit and goal of each metric."""

CHAIN_ARENA_BYTES = 256 * MIB


async def _handover() -> list[Metric]:
    async with Chain(CHAIN_ARENA_BYTES) as chain:
        return await copies.measure(chain) + await handover.measure(chain)


_MEASURES = {
    "size": message_size.measure,
    "handover": lambda: uvloop.run(_handover()),
    "fleet": fleet.measure,
}


def run(section: str) -> list[Metric]:
    return _MEASURES[section]()

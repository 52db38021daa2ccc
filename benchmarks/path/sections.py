"""The sections of this benchmark and what each promises to measure."""

from __future__ import annotations

from benchmarks.metrics import Metric
from benchmarks.path import copies, fleet, handover, message_size

PROMISED: dict[str, list[tuple[str, str, str | None]]] = {
    "size": [(message_size.NAME, message_size.UNIT, message_size.GOAL)],
    "copies": [(copies.NAME, copies.UNIT, copies.GOAL), (copies.PLAIN_NAME, copies.UNIT, None)],
    "handover": [
        *((handover.name_of(mib), "ratio", handover.GOALS.get(mib)) for mib in handover.SIZES),
        *((handover.read_name_of(mib), "ratio", None) for mib in handover.SIZES),
    ],
    "fleet": [(name, "ratio", goal) for name, goal in fleet.GOALS.items()],
}
"""Name, unit and goal of each metric."""

_MEASURES = {
    "size": message_size.measure,
    "copies": copies.measure,
    "handover": handover.measure,
    "fleet": fleet.measure,
}


def run(section: str) -> list[Metric]:
    return _MEASURES[section]()

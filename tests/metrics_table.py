"""The table of docs/metrics.md beside what a frontend tells Prometheus."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from prometheus_client.core import Metric

TABLE = Path(__file__).parents[1] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `(foveal_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of every metric, by name."""
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in _ROW.findall(TABLE.read_text())
    }


def differences(families: Iterable[Metric], also: Collection[str]) -> list[str]:
    """What the table and ``families`` disagree in; ``also`` are labels that all have."""
    table = documented()
    found: dict[str, str] = {}
    problems = []
    for family in families:
        if not family.name.startswith("foveal_") or family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = family.type
        kind, labels = table.get(name, ("", frozenset()))
        if kind != family.type:
            problems.append(f"{name} is a {family.type}, the table says {kind or 'nothing'}")
            continue
        # One with labels has no samples before they are needed.
        told = [set(sample.labels) - {"le"} for sample in family.samples]
        if any(each != labels | set(also) for each in told):
            problems.append(f"{name} has labels {told[0]}, the table says {set(labels)}")
    problems += [f"{name} is in the table only" for name in table if name not in found]
    return problems

"""What every benchmark ends with: one JSON line per metric on standard output.

    {"metric": "pixel_copies", "value": 1.0, "unit": "copies", "goal": "==1", "ok": true}

A metric without a goal has ``goal`` and ``ok`` null. One that cannot be measured here has
``value`` null and a ``why``; it meets no goal.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

_GOAL = re.compile(r"(<=|>=|==)(-?\d+(?:\.\d+)?)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
}


class CannotMeasure(Exception):
    """This machine lacks something that a measurement needs; the text says what."""


@dataclass(frozen=True)
class Metric:
    """One measured number. ``goal`` is ``<=``, ``>=`` or ``==`` and a number."""

    name: str
    value: float | None
    unit: str
    goal: str | None = None
    why: str | None = None
    """Why there is no value."""

    def __post_init__(self) -> None:
        if self.goal is not None and _GOAL.fullmatch(self.goal) is None:
            raise ValueError(f"{self.goal!r} is not a goal")
        if (self.value is None) == (self.why is None):
            raise ValueError(f"{self.name} needs a value, or else a reason")

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None without a goal or without a value."""
        if self.goal is None or self.value is None:
            return None
        match = _GOAL.fullmatch(self.goal)
        if match is None:
            raise ValueError(f"{self.goal!r} is not a goal")
        return _COMPARE[match[1]](self.value, float(match[2]))

    def line(self) -> str:
        """The metric as one line of JSON."""
        fields = {
            "metric": self.name,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "ok": self.ok,
        }
        if self.why is not None:
            fields["why"] = self.why
        return json.dumps(fields)


def unmeasured(metrics: Sequence[tuple[str, str, str | None]], why: str) -> list[Metric]:
    """Metrics, each given as name, unit and goal, that have no value for one reason."""
    return [Metric(name, None, unit, goal, why) for name, unit, goal in metrics]


def rounded(value: float, digits: int = 3) -> float:
    """``value`` with that many significant digits, enough for a noisy measurement."""
    return float(f"{value:.{digits}g}")


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of values measured side by side, round by round.

    What slows the machine down for a while slows both values of a round.
    """
    pairs = zip(numerators, denominators, strict=True)
    return median(above / below for above, below in pairs)

"""What was measured, and the metrics that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from benchmarks.metrics import Metric, median_ratio, rounded
from benchmarks.transfer.endpoint import MEMORY_COPY, Result

SIZES = (1, 8, 32, 128)
"""MiB of pixels."""
FIRST, AGAIN, AFTER_PAUSE = "first", "again", "again after a pause"
Key = tuple[str, int, str]
"""Way, MiB, and whether the item was new to the receiver."""


@dataclass
class Figures:
    """All results, round by round, and why ways have none."""

    results: dict[Key, list[Result]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)
    idle_cores: float | None = None

    def seconds(self, way: str, mib: int, when: str = FIRST) -> list[float]:
        """Until the pixels are usable."""
        return [result.usable for result in self.results.get((way, mib, when), ())]

    def read_seconds(self, way: str, mib: int) -> list[float]:
        """Until all of them have been read once."""
        return [result.read for result in self.results.get((way, mib, FIRST), ())]

    def why_not(self, *ways: str) -> str:
        failed = [way for way in ways if way in self.failures]
        return "; ".join(f"{way}: {self.failures[way]}" for way in failed)


@dataclass(frozen=True)
class Wanted:
    """A metric, from which ways it comes and how."""

    name: str
    unit: str
    goal: str | None
    ways: tuple[str, ...]
    value: Callable[[Figures], float]

    def of(self, figures: Figures) -> Metric:
        if why := figures.why_not(*self.ways):
            return Metric(self.name, None, self.unit, self.goal, why)
        return Metric(self.name, rounded(self.value(figures)), self.unit, self.goal)


def wanted(ways: Iterable[str]) -> list[Wanted]:
    """All metrics: those with goals first, then the medians of each way."""
    return [*_WITH_GOALS, *_WITHOUT_GOALS, *_medians(ways)]


def _ratio(above: str, below: str, mib: int) -> Callable[[Figures], float]:
    return lambda figures: median_ratio(
        figures.seconds(above, mib), figures.seconds(below, mib)
    )


def _read_and_copy(figures: Figures) -> list[float]:
    raw, copies = figures.results["raw_nixl", 8, FIRST], figures.seconds(MEMORY_COPY, 8)
    # From the moment that the receiver knows what to read: nothing but the READ.
    return [
        read.usable - read.received + copy for read, copy in zip(raw, copies, strict=True)
    ]


def _nixl_over_raw(figures: Figures) -> float:
    return median_ratio(figures.seconds("nixl", 8), _read_and_copy(figures))


def _nixl_over_raw_and_message(figures: Figures) -> float:
    messages = figures.seconds("message", 8)
    floors = [
        floor + message
        for floor, message in zip(_read_and_copy(figures), messages, strict=True)
    ]
    return median_ratio(figures.seconds("nixl", 8), floors)


def _repeat_ms(way: str, when: str = AGAIN) -> Callable[[Figures], float]:
    """The slowest size's median."""
    return lambda figures: max(
        median(figures.seconds(way, mib, when)) * 1e3 for mib in SIZES
    )


def _repeat_over_message(way: str) -> Callable[[Figures], float]:
    """Of the largest size, as ``_repeat_ms`` mostly is."""
    return lambda figures: median_ratio(
        figures.seconds(way, SIZES[-1], AGAIN), figures.seconds("message", SIZES[-1], AGAIN)
    )


def _over_copy_and_message(mib: int) -> Callable[[Figures], float]:
    def ratio(figures: Figures) -> float:
        copies, messages = figures.seconds(MEMORY_COPY, mib), figures.seconds("message", mib)
        floors = [copy + message for copy, message in zip(copies, messages, strict=True)]
        return median_ratio(figures.seconds("shm", mib), floors)

    return ratio


def _read_ratio(figures: Figures) -> float:
    return median_ratio(
        figures.read_seconds("shm", 8), figures.read_seconds(MEMORY_COPY, 8)
    )


def _hash_ms(figures: Figures) -> float:
    return median(result.prepared for result in figures.results["shm", 8, FIRST]) * 1e3


def _idle_cores(figures: Figures) -> float:
    if figures.idle_cores is None:
        raise RuntimeError("the idle processes were not looked at")
    return figures.idle_cores


_WITH_GOALS = [
    Wanted("shm_over_memcpy_8mib", "ratio", "<=1.25", ("shm",), _ratio("shm", MEMORY_COPY, 8)),
    Wanted(
        "shm_over_memcpy_32mib", "ratio", "<=1.25", ("shm",), _ratio("shm", MEMORY_COPY, 32)
    ),
    Wanted("shm_repeat_ms", "ms", "<=0.2", ("shm",), _repeat_ms("shm")),
    Wanted(
        "shm_speedup_over_dynamo_8mib", "ratio", ">=8", ("shm", "dynamo_shm"),
        _ratio("dynamo_shm", "shm", 8),
    ),
    Wanted(
        "shm_speedup_over_vllm_ipc_8mib", "ratio", ">=2", ("shm", "vllm_ipc"),
        _ratio("vllm_ipc", "shm", 8),
    ),
    Wanted("nixl_over_raw_8mib", "ratio", "<=1.5", ("nixl", "raw_nixl"), _nixl_over_raw),
    Wanted("nixl_repeat_ms", "ms", "<=0.5", ("nixl",), _repeat_ms("nixl")),
    Wanted("nixl_idle_cores", "cores", "<=0.05", ("nixl",), _idle_cores),
    Wanted(
        "nixl_speedup_over_dynamo_8mib", "ratio", ">=4", ("nixl", "dynamo_nixl"),
        _ratio("dynamo_nixl", "nixl", 8),
    ),
]
_WITHOUT_GOALS = [
    Wanted("identity_hash_ms_8mib", "ms", None, ("shm",), _hash_ms),
    *(
        Wanted(
            f"{way}_repeat_after_pause_ms", "ms", None, (way,), _repeat_ms(way, AFTER_PAUSE)
        )
        for way in ("shm", "nixl")
    ),
    Wanted("message_repeat_ms", "ms", None, ("message",), _repeat_ms("message")),
    *(
        Wanted(
            f"{way}_repeat_over_message", "ratio", None, (way, "message"),
            _repeat_over_message(way),
        )
        for way in ("shm", "nixl")
    ),
    *(
        Wanted(
            f"shm_over_memcpy_and_message_{mib}mib", "ratio", None, ("shm", "message"),
            _over_copy_and_message(mib),
        )
        for mib in (8, 32)
    ),
    Wanted(
        "nixl_over_raw_and_message_8mib", "ratio", None, ("nixl", "raw_nixl", "message"),
        _nixl_over_raw_and_message,
    ),
    Wanted("shm_until_read_over_memcpy_8mib", "ratio", None, ("shm",), _read_ratio),
]


def _medians(ways: Iterable[str]) -> list[Wanted]:
    def median_ms(way: str, mib: int) -> Callable[[Figures], float]:
        return lambda figures: median(figures.seconds(way, mib)) * 1e3

    return [
        Wanted(f"{way}_ms_{mib}mib", "ms", None, (way,), median_ms(way, mib))
        for way in ways
        for mib in SIZES
    ]

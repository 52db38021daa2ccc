from __future__ import annotations

import pytest

from benchmarks.metrics import Metric
from benchmarks.transfer.endpoint import Result
from benchmarks.transfer.figures import AFTER_PAUSE, AGAIN, FIRST, SIZES, Figures, wanted

WAYS = (
    "memcpy", "shm", "nixl", "message", "vllm_ipc", "raw_nixl", "dynamo_shm", "dynamo_nixl"
)


def usable_after(milliseconds: float, received: float = 0.0) -> Result:
    return Result(
        prepared=0.0005,
        received=received / 1e3,
        usable=milliseconds / 1e3,
        read=2 * milliseconds / 1e3,
    )


@pytest.fixture
def figures() -> Figures:
    """A machine that copies 8 MiB in a millisecond."""
    figures = Figures(idle_cores=0.25)
    for mib in SIZES:
        for way, milliseconds in zip(WAYS, (1, 1.2, 6, 0.5, 3, 3, 12, 48), strict=True):
            for slower in (1, 4, 2):  # for a while everything is slower
                received = 1.0 * slower if way == "raw_nixl" else 0.0
                result = usable_after(milliseconds * slower * mib / 8, received * mib / 8)
                figures.results[way, mib, FIRST].append(result)
        for way in ("shm", "nixl"):
            figures.results[way, mib, AGAIN] += [usable_after(0.1 + mib / 1280)] * 3
            figures.results[way, mib, AFTER_PAUSE] += [usable_after(0.4 + mib / 1280)] * 3
        figures.results["message", mib, AGAIN] += [usable_after(0.2 + mib / 640)] * 3
    return figures


def by_name(figures: Figures) -> dict[str, Metric]:
    return {each.name: each.of(figures) for each in wanted(WAYS)}


@pytest.mark.parametrize(
    ("name", "value", "ok"),
    [
        ("shm_over_memcpy_8mib", 1.2, True),
        ("shm_over_memcpy_32mib", 1.2, True),
        ("shm_repeat_ms", 0.2, True),
        ("shm_speedup_over_dynamo_8mib", 10.0, True),
        ("shm_speedup_over_vllm_ipc_8mib", 2.5, True),
        ("nixl_over_raw_8mib", 2.0, False),
        ("nixl_repeat_ms", 0.2, True),
        ("shm_repeat_after_pause_ms", 0.5, None),
        ("nixl_repeat_after_pause_ms", 0.5, None),
        ("nixl_idle_cores", 0.25, False),
        ("nixl_speedup_over_dynamo_8mib", 8.0, True),
        ("identity_hash_ms_8mib", 0.5, None),
        ("shm_until_read_over_memcpy_8mib", 1.2, None),
        ("message_repeat_ms", 0.4, None),
        ("shm_repeat_over_message", 0.5, None),
        ("nixl_repeat_over_message", 0.5, None),
        ("shm_over_memcpy_and_message_8mib", 0.8, None),
        ("shm_over_memcpy_and_message_32mib", 0.8, None),
        ("nixl_over_raw_and_message_8mib", 1.71, None),
        ("vllm_ipc_ms_32mib", 24.0, None),
    ],
)
def test_metrics_follow_from_rounds_side_by_side(
    figures: Figures, name: str, value: float, ok: bool | None
) -> None:
    metric = by_name(figures)[name]
    assert metric.value == pytest.approx(value)
    assert metric.ok is ok


def test_a_way_that_does_not_work_costs_only_its_own_metrics(figures: Figures) -> None:
    figures.failures["dynamo_nixl"] = "no network"
    metrics = by_name(figures)
    without = {name for name, metric in metrics.items() if metric.value is None}
    medians = {f"dynamo_nixl_ms_{mib}mib" for mib in SIZES}
    assert without == {"nixl_speedup_over_dynamo_8mib", *medians}
    assert metrics["nixl_speedup_over_dynamo_8mib"].why == "dynamo_nixl: no network"

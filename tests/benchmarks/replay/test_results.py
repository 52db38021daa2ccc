from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.metrics import CannotMeasure
from benchmarks.replay.plots import draw
from benchmarks.replay.results import (
    Figures,
    figures_of,
    metrics_of,
    table,
    worst_over_least_loaded,
)
from benchmarks.replay.simulation import Outcome, Replay


def figures(hit: float, ttft: float) -> Figures:
    percentiles = {50: ttft, 95: 2 * ttft, 99: 3 * ttft}
    return Figures(hit, percentiles, ttft, 1.0, 1.0, 1.0, [ttft, 3 * ttft])


ZIPF = {
    "kv": figures(0.76, 0.02),
    "round-robin": figures(0.4, 0.05),
    "least-loaded": figures(0.4, 0.04),
    "oracle": figures(0.8, 0.02),
}


def test_the_warm_up_is_not_counted() -> None:
    outcomes = {
        str(n): Outcome(
            arrived=float(n),
            worker="a" if n < 8 else "b",
            prompt_tokens=100,
            cached_tokens=0 if n < 2 else 50,
            first_token=n + (9.0 if n < 2 else 0.25),
            finished=n + 10.0,
        )
        for n in range(10)
    }
    f = figures_of(Replay(outcomes, {"a": 3.0, "b": 1.0}, preemptions=0))
    assert f.hit_ratio == 0.5
    assert f.ttft == pytest.approx({50: 0.25, 95: 0.25, 99: 0.25})
    assert f.latency_mean == pytest.approx(10.0)
    assert f.requests_spread == pytest.approx(6 / 4)
    assert f.busy_spread == pytest.approx(3 / 2)


def test_metrics_are_ratios_with_goals() -> None:
    hit, faster, worst = metrics_of({"photos": ZIPF})
    assert (hit.name, hit.value, hit.ok) == ("kv_hit_over_oracle", 0.95, True)
    assert (faster.name, faster.value, faster.ok) == ("kv_ttft_p50_over_roundrobin", 0.4, True)
    assert (worst.name, worst.value, worst.ok) == ("worst_over_least_loaded", 0.5, True)


def test_the_worst_of_all_traces_and_figures_counts() -> None:
    slow_tail = dataclasses.replace(ZIPF["kv"], ttft={50: 0.02, 95: 0.03, 99: 0.24})
    traces = {"photos": ZIPF, "unique": {**ZIPF, "kv": slow_tail}}
    worst, where = worst_over_least_loaded(traces)
    assert worst == pytest.approx(2.0)
    assert where == "unique, p99"
    assert metrics_of(traces)[2].ok is False


def test_a_trace_that_was_not_replayed_is_not_judged() -> None:
    hit, faster, worst = metrics_of({"own": ZIPF})
    assert hit.value is None and faster.value is None
    assert worst.value == 0.5


def test_a_table_has_a_row_for_each_policy() -> None:
    rows = table(ZIPF)
    assert len(rows) == 2 + len(ZIPF)
    assert rows[2].split()[:3] == ["kv", "0.760", "20.0"]


def test_pictures_are_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(CannotMeasure, match="bench"):
            draw({"photos": ZIPF}, tmp_path)
        return
    paths = draw({"photos": ZIPF}, tmp_path)
    assert len(paths) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)

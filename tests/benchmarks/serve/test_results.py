"""From runs to figures, and from figures to verdicts."""

from __future__ import annotations

import pytest

from benchmarks.serve.client import Answer, Run
from benchmarks.serve.results import GOALS, Figures, figures_of, metrics_of, raw, table
from benchmarks.serve.systems import SYSTEMS

TITLES = {name: system.title for name, system in SYSTEMS.items()}


def figures(rate: float, ttft: float) -> Figures:
    return Figures(rate, ttft, ttft, 0.01, 0.02, 100.0, 1000, 250, 40, 0)


def test_a_run_is_summed_up() -> None:
    good = Answer(0.2, 1.0, [0.1, 0.3], 100, 32, 3)
    slow = Answer(0.4, 1.0, [0.2], 100, 0, 2)
    summed = figures_of(Run(2.0, [good, slow, Answer(error="500")]))
    assert summed.requests_per_second == 1.0
    assert summed.ttft_p50 == pytest.approx(0.3)
    assert summed.gap_p50 == pytest.approx(0.2)
    assert summed.tokens_per_second == 2.5
    assert (summed.prompt_tokens, summed.cached_tokens) == (200, 32)
    assert (summed.requests, summed.errors, summed.first_error) == (3, 1, "500")


def test_ratios_are_of_the_same_round() -> None:
    rounds = {
        "foveal": {"unique": [figures(10, 0.1), figures(2, 0.5)]},
        "vllm_rr": {"unique": [figures(5, 0.2), figures(1, 1.0)]},
    }
    metrics = {metric.name: metric for metric in metrics_of(rounds, {})}
    assert metrics["unique_over_vllm_rr"].value == 2
    assert metrics["unique_ttft_p50_over_vllm_rr"].value == 2
    assert metrics["unique_over_vllm_rr"].ok is True
    assert metrics["multi_over_vllm_rr"].why == "not asked for"
    assert set(metrics) == {
        f"{workload}{what}_over_{peer}"
        for peer, goals in GOALS.items()
        for workload in goals
        for what in ("", "_ttft_p50")
    }


def test_what_failed_is_told_and_meets_no_goal() -> None:
    rounds = {"foveal": {"unique": [figures(10, 0.1)]}, "dynamo_py": {}}
    metrics = {m.name: m for m in metrics_of(rounds, {"dynamo_py": "not installed"})}
    metric = metrics["unique_over_dynamo_py"]
    assert (metric.value, metric.ok, metric.why) == (None, None, "dynamo_py: not installed")


def test_the_table_and_the_raw_figures_have_all_that_was_measured() -> None:
    rounds = {"foveal": {"unique": [figures(10, 0.1)]}, "vllm": {"text": [figures(3, 0.2)]}}
    lines = table(rounds, TITLES).splitlines()
    assert len(lines) == 4
    assert "| unique | Foveal, 2 workers | 10.00 | 100 ms, 100 ms |" in lines[2]
    assert "25%" in lines[2] and "0 of 40" in lines[2]
    assert raw(rounds)["vllm"]["text"][0]["requests_per_second"] == 3

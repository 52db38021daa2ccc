"""What the runs amount to: figures, a table, metrics with goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.metrics import Metric, median_ratio, rounded, unmeasured
from benchmarks.serve.client import Run

OURS = "foveal"
GOALS: dict[str, dict[str, float]] = {
    "vllm_rr": {"unique": 0.97, "repeated": 1.1, "multi": 1.1},
    "dynamo_py": {"unique": 1.3, "repeated": 1.3, "multi": 1.3},
    "dynamo_rust": {"unique": 1.0, "repeated": 1.0, "multi": 1.0},
}
"""By peer and workload: how many times as fast we mean to be."""


@dataclass(frozen=True)
class Figures:
    """One workload on one system in one round."""

    requests_per_second: float
    """Answered ones."""
    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    """Between pieces of an answer's text."""
    gap_p99: float
    tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    requests: int
    errors: int
    first_error: str = ""


def figures_of(run: Run) -> Figures:
    good = [answer for answer in run.answers if not answer.error]
    bad = [answer for answer in run.answers if answer.error]
    ttfts = [answer.ttft for answer in good if answer.ttft is not None]
    gaps = [gap for answer in good for gap in answer.gaps]
    return Figures(
        requests_per_second=len(good) / run.seconds,
        ttft_p50=_percentile(ttfts, 50),
        ttft_p99=_percentile(ttfts, 99),
        gap_p50=_percentile(gaps, 50),
        gap_p99=_percentile(gaps, 99),
        tokens_per_second=sum(answer.answer_tokens for answer in good) / run.seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        requests=len(run.answers),
        errors=len(bad),
        first_error=bad[0].error if bad else "",
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


Rounds = Mapping[str, Mapping[str, Sequence[Figures]]]
"""By system and workload: one for each round."""


def table(rounds: Rounds, titles: Mapping[str, str]) -> str:
    """Medians over the rounds, in Markdown."""
    lines = [
        "| Workload | System | Requests/s | TTFT p50, p99 | Between tokens p50, p99 | "
        "Cached | Errors |",
        "|---|---|---|---|---|---|---|",
    ]
    workloads = dict.fromkeys(name for runs in rounds.values() for name in runs)
    for workload in workloads:
        for system, runs in rounds.items():
            if not (figures := runs.get(workload)):
                continue
            prompt = sum(f.prompt_tokens for f in figures)
            cached = sum(f.cached_tokens for f in figures)
            lines.append(
                f"| {workload} | {titles[system]} "
                f"| {median(f.requests_per_second for f in figures):.2f} "
                f"| {_ms(f.ttft_p50 for f in figures)}, {_ms(f.ttft_p99 for f in figures)} "
                f"| {_ms(f.gap_p50 for f in figures)}, {_ms(f.gap_p99 for f in figures)} "
                f"| {cached / prompt if prompt else 0:.0%} "
                f"| {sum(f.errors for f in figures)} of {sum(f.requests for f in figures)} |"
            )
    return "\n".join(lines)


def _ms(seconds: Any) -> str:
    return f"{1000 * median(seconds):.0f} ms"


def metrics_of(rounds: Rounds, failures: Mapping[str, str]) -> list[Metric]:
    """Ours beside each peer's, round by round; above 1 is in our favour.

    ``failures``: why a system was not measured, by its name.
    """
    metrics: list[Metric] = []
    for peer, goals in GOALS.items():
        for workload, goal in goals.items():
            names = [f"{workload}_over_{peer}", f"{workload}_ttft_p50_over_{peer}"]
            promised = [(name, "times", f">={goal}") for name in names]
            ours = rounds.get(OURS, {}).get(workload, ())
            theirs = rounds.get(peer, {}).get(workload, ())
            why = _why_not(ours, theirs, failures, peer)
            if why:
                metrics += unmeasured(promised, why)
                continue
            rate = median_ratio(
                [f.requests_per_second for f in ours], [f.requests_per_second for f in theirs]
            )
            ttft = median_ratio([f.ttft_p50 for f in theirs], [f.ttft_p50 for f in ours])
            metrics += [
                Metric(name, rounded(value), unit, wanted)
                for (name, unit, wanted), value in zip(promised, (rate, ttft), strict=True)
            ]
    return metrics


def _why_not(
    ours: Sequence[Figures], theirs: Sequence[Figures], failures: Mapping[str, str], peer: str
) -> str:
    for system in (OURS, peer):
        if system in failures:
            return f"{system}: {failures[system]}"
    if not ours or not theirs:
        return "not asked for"
    if len(ours) != len(theirs):
        return "not measured in the same rounds"
    if any(f.ttft_p50 <= 0 for f in (*ours, *theirs)):
        return "no request was answered"
    return ""


def raw(rounds: Rounds) -> dict[str, Any]:
    """The same as plain data, for a file."""
    return {
        system: {workload: [asdict(f) for f in figures] for workload, figures in runs.items()}
        for system, runs in rounds.items()
    }

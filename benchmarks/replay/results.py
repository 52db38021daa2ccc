"""What a replay amounts to: figures, tables, metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.metrics import Metric, rounded
from benchmarks.replay.policies import ORACLE
from benchmarks.replay.prepare import Prepared
from benchmarks.replay.simulation import Replay

WARM_UP_SHARE = 0.2
"""The first requests of a trace fill the caches; they are replayed but not counted."""

PERCENTILES = (50, 95, 99)

ZIPF = "photos"
HIT = "kv_hit_over_oracle"
FASTER = "kv_ttft_p50_over_roundrobin"
WORST = "worst_over_least_loaded"
GOALS = {HIT: ">=0.95", FASTER: "<=0.5", WORST: "<=1.05"}


T = TypeVar("T")


@dataclass(frozen=True)
class Figures:
    """One policy on one trace."""

    hit_ratio: float
    """Prompt tokens that engines took from their caches, of all prompt tokens."""
    ttft: dict[int, float]
    """Percentile -> seconds from a request's arrival to its first token."""
    ttft_mean: float
    latency_mean: float
    """Seconds from a request's arrival to its last token."""
    requests_spread: float
    """Requests of the worker that got most, over the mean of all workers."""
    busy_spread: float
    """Seconds that the busiest worker computed, over the mean of all workers."""
    ttfts: list[float]
    """All of them, sorted."""


def figures_of(replay: Replay) -> Figures:
    """Sum a replay up, leaving out its warm-up."""
    counted = after_warm_up(replay.outcomes.values())
    prompt_tokens = sum(outcome.prompt_tokens for outcome in counted)
    ttfts = np.array(sorted(outcome.ttft for outcome in counted))
    requests = Counter(outcome.worker for outcome in counted)
    busy = list(replay.busy_seconds.values())
    return Figures(
        hit_ratio=sum(outcome.cached_tokens for outcome in counted) / prompt_tokens,
        ttft={percent: float(np.percentile(ttfts, percent)) for percent in PERCENTILES},
        ttft_mean=float(ttfts.mean()),
        latency_mean=float(np.mean([o.finished - o.arrived for o in counted])),
        requests_spread=max(requests.values()) * len(busy) / len(counted),
        busy_spread=max(busy) * len(busy) / sum(busy),
        ttfts=ttfts.tolist(),
    )


def boundless_hit_ratio(trace: Sequence[Prepared], replay: Replay) -> float:
    """Return the hit ratio of one cache that all workers share and that never fills up.

    No router can do better: it counts every token that was computed before anywhere.
    """
    by_id = {prepared.request.id: prepared for prepared in trace}
    known: set[bytes] = set()
    hits: dict[str, int] = {}
    for request_id in replay.outcomes:
        prompt = by_id[request_id].prompt
        digests = prompt.digests[: prompt.reusable]
        leading = next(
            (n for n, digest in enumerate(digests) if digest not in known), len(digests)
        )
        hits[request_id] = leading * prompt.block_size
        known.update(by_id[request_id].digests)
    counted = after_warm_up(replay.outcomes)
    prompt_tokens = sum(by_id[name].prompt.num_tokens for name in counted)
    return sum(hits[name] for name in counted) / prompt_tokens


def after_warm_up(in_order_of_arrival: Iterable[T]) -> list[T]:
    outcomes = list(in_order_of_arrival)
    return outcomes[int(len(outcomes) * WARM_UP_SHARE) :]


def table(figures: Mapping[str, Figures]) -> list[str]:
    """Lines of a table, one for each policy."""
    head = (
        f"  {'policy':13} {'hit':>6} {'TTFT p50':>9} {'p95':>7} {'p99':>7} {'mean':>7} "
        f"{'latency':>8} {'requests':>9} {'busy':>6}"
    )
    units = (
        f"  {'':13} {'ratio':>6} {'ms':>9} {'ms':>7} {'ms':>7} {'ms':>7} "
        f"{'ms':>8} {'max/mean':>9} {'':>6}"
    )
    rows = [
        f"  {name:13} {f.hit_ratio:6.3f} {f.ttft[50] * 1e3:9.1f} {f.ttft[95] * 1e3:7.1f} "
        f"{f.ttft[99] * 1e3:7.1f} {f.ttft_mean * 1e3:7.1f} {f.latency_mean * 1e3:8.0f} "
        f"{f.requests_spread:9.2f} {f.busy_spread:6.2f}"
        for name, f in figures.items()
    ]
    return [head, units, *rows]


def worst_over_least_loaded(traces: Mapping[str, Mapping[str, Figures]]) -> tuple[float, str]:
    """Return the highest ratio of kv's TTFT to least-loaded's, and where it is.

    Over all traces, the mean and each of the percentiles.
    """
    ratios = {}
    for name, figures in traces.items():
        kv, other = figures["kv"], figures["least-loaded"]
        ratios[f"{name}, mean"] = kv.ttft_mean / other.ttft_mean
        for percent in PERCENTILES:
            ratios[f"{name}, p{percent}"] = kv.ttft[percent] / other.ttft[percent]
    where = max(ratios, key=lambda key: ratios[key])
    return ratios[where], where


def metrics_of(traces: Mapping[str, Mapping[str, Figures]]) -> list[Metric]:
    """The metrics that have goals; those of a trace that was not replayed have no value."""
    metrics = []
    zipf = traces.get(ZIPF)
    if zipf is None:
        why = f"the trace {ZIPF} was not replayed"
        metrics += [Metric(name, None, "ratio", GOALS[name], why) for name in (HIT, FASTER)]
    else:
        kv = zipf["kv"]
        hit = kv.hit_ratio / zipf[ORACLE].hit_ratio
        faster = kv.ttft[50] / zipf["round-robin"].ttft[50]
        metrics += [
            Metric(HIT, rounded(hit), "ratio", GOALS[HIT]),
            Metric(FASTER, rounded(faster), "ratio", GOALS[FASTER]),
        ]
    worst, _ = worst_over_least_loaded(traces)
    return [*metrics, Metric(WORST, rounded(worst, 4), "ratio", GOALS[WORST])]



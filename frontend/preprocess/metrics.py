"""Prometheus metrics of preprocessing."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram


class PreprocessMetrics:
    """Counts what happens to items that are given to preprocess processes."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.waiting = Gauge(
            "foveal_preprocess_waiting", "Items that wait for a preprocess process.",
            registry=registry,
        )
        self.processes = Gauge(
            "foveal_preprocess_processes", "Preprocess processes that are up.",
            registry=registry,
        )
        self.seconds = Histogram(
            "foveal_preprocess_seconds",
            "Seconds a preprocess process spent on an item.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.waited = Histogram(
            "foveal_preprocess_wait_seconds",
            "Seconds an item waited for a preprocess process.",
            buckets=(0.001, 0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.crashes = Counter(
            "foveal_preprocess_crashes", "Preprocess processes that ended over an item.",
            registry=registry,
        )
        self.shared = Counter(
            "foveal_preprocess_shared",
            "Items that were being processed already when they were asked for.",
            registry=registry,
        )
        self.skipped = Counter(
            "foveal_preprocess_skipped",
            "Items not processed because nobody waited for them any more.",
            registry=registry,
        )
        self.refused = Counter(
            "foveal_preprocess_refused", "Items answered with an error.", ["reason"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "foveal_preprocess_fallbacks",
            "Items left to be processed in the frontend's own process.", ["reason"],
            registry=registry,
        )

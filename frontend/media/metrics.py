"""Prometheus metrics of the URL cache, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.media.url_cache import UrlCacheStats


class UrlCacheCollector(Collector):
    def __init__(self, stats: UrlCacheStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        answered = CounterMetricFamily(
            "foveal_url_cache_lookups",
            "Media asked for by URL: found fresh, found and confirmed by the server, or "
            "fetched.",
            labels=["result"],
        )
        answered.add_metric(["hit"], self._stats.hits)
        answered.add_metric(["renewed"], self._stats.renewed)
        answered.add_metric(["miss"], self._stats.misses)
        yield answered
        yield GaugeMetricFamily(
            "foveal_url_cache_bytes", "Memory that the URL cache takes.", self._stats.nbytes
        )
        yield GaugeMetricFamily(
            "foveal_url_cache_entries", "Responses in the URL cache.", self._stats.entries
        )

"""Prometheus metrics of our own, beside vLLM's at ``/metrics``.

What others already count (arena, router) is read when Prometheus asks; only what nobody
else keeps is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.arena_cache import ArenaProcessorCache
from frontend.nixl_offers import NixlOffers
from frontend.receipt import Routed
from frontend.router.kv_plane import KvPlane
from frontend.worker_pool import WorkerPool
from transfer.arena import Arena


class FrontendMetrics:
    """Counts what happens to requests."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._routed = Counter(
            "foveal_requests_routed", "Requests sent to a worker.", ["worker", "transfer"],
            registry=registry,
        )
        self._overlap = Counter(
            "foveal_overlap_blocks", "Prompt blocks that the chosen worker had cached.",
            registry=registry,
        )
        self._prompt = Counter(
            "foveal_prompt_blocks", "Full blocks of routed prompts.", registry=registry
        )
        self._embeddings = Counter(
            "foveal_embeddings", "Images of routed requests beyond the cached blocks, by "
            "whether the worker or its host held the encoder's output.", ["held"],
            registry=registry,
        )
        self._encode_jobs = Counter(
            "foveal_encode_jobs", "Images sent to encode workers.", ["outcome"],
            registry=registry,
        )
        self.moved = Counter(
            "foveal_requests_moved", "Requests sent anew because their worker was lost.",
            registry=registry,
        )
        self.failed = Counter(
            "foveal_requests_failed", "Requests ended because their worker was lost.",
            registry=registry,
        )
        self.tensors_missing = Counter(
            "foveal_tensors_missing",
            "Times a worker could not read what a request referred to.",
            registry=registry,
        )

    def count(self, routed: Routed) -> None:
        self._routed.labels(routed.worker, routed.transfer).inc()
        self._overlap.inc(routed.overlap_blocks)
        self._prompt.inc(routed.prompt_blocks)
        if routed.embeddings_needed:
            missing = routed.embeddings_needed - routed.embeddings_held
            self._embeddings.labels("yes").inc(routed.embeddings_held)
            self._embeddings.labels("no").inc(missing)

    def count_encode_job(self, outcome: str) -> None:
        """``outcome``: ``encoded`` or ``failed``."""
        self._encode_jobs.labels(outcome).inc()


class FleetCollector(Collector):
    """Reads the state of the pool, the KV plane, the cache and the arena."""

    def __init__(
        self,
        pool: WorkerPool,
        plane: KvPlane,
        cache: ArenaProcessorCache,
        arena: Arena | None,
        nixl: NixlOffers,
    ) -> None:
        self._pool = pool
        self._plane = plane
        self._cache = cache
        self._arena = arena
        self._nixl = nixl

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "foveal_worker_ready", "Whether a worker takes requests.",
            labels=["worker", "transfer"],
        )
        for worker in self._pool.workers:
            takes = worker.ready and not worker.draining
            workers.add_metric([worker.name, worker.transfer], float(takes))
        yield workers
        for name, text, count in (
            ("foveal_kv_deltas", "KV deltas applied.", self._plane.deltas),
            ("foveal_kv_gaps", "Times KV deltas were found missing.", self._plane.gaps),
            ("foveal_kv_snapshots", "KV snapshots applied.", self._plane.snapshots),
            ("foveal_items_without_room", "Items sent inline because the arena was full.",
             self._cache.inlined),
        ):
            yield CounterMetricFamily(name, text, value=count)
        yield from self._nixl_metrics()
        if self._arena is None:
            return
        arena = self._arena.stats()
        for name, text, size in (
            ("foveal_arena_bytes", "Size of the arena.", arena.bytes_total),
            ("foveal_arena_bytes_used", "Bytes of the arena in use.", arena.bytes_used),
            ("foveal_arena_entries", "Entries in the arena.", arena.entries),
            ("foveal_arena_entries_leased", "Entries that requests hold.",
             arena.leased_entries),
        ):
            yield GaugeMetricFamily(name, text, value=size)
        yield CounterMetricFamily(
            "foveal_arena_evictions", "Entries evicted.", value=arena.evictions
        )
        yield CounterMetricFamily(
            "foveal_arena_bytes_written", "Bytes of processed tensors written.",
            value=arena.bytes_written,
        )

    def _nixl_metrics(self) -> Iterator[Metric]:
        for name, text, value in (
            ("foveal_nixl_agents", "NIXL agents of this process.", self._nixl.agents),
            ("foveal_nixl_switched_off", "Whether NIXL does not work in this process.",
             bool(self._nixl.unusable)),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))
        pulls = CounterMetricFamily(
            "foveal_nixl_pulls", "Entries that workers read by NIXL.", labels=["worker"]
        )
        nbytes = CounterMetricFamily(
            "foveal_nixl_bytes", "Bytes that workers read by NIXL.", labels=["worker"]
        )
        failures = CounterMetricFamily(
            "foveal_nixl_failures", "Entries that workers could not read by NIXL.",
            labels=["worker"],
        )
        for worker, total in self._nixl.pulls.items():
            pulls.add_metric([worker], total.pulls)
            nbytes.add_metric([worker], total.nbytes)
            failures.add_metric([worker], total.failures)
        yield from (pulls, nbytes, failures)

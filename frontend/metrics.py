"""Prometheus metrics of our own, beside vLLM's at ``/metrics``.

What others already count (arena, router) is read when Prometheus asks; only what nobody
else keeps is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.arena_cache import ArenaProcessorCache
from frontend.nixl_offers import NixlOffers
from frontend.receipt import Routed
from frontend.router.router import Router
from frontend.worker_pool import WorkerPool
from transfer.arena import Arena

MOST_GONE_WORKERS = 64
"""Workers that are gone and whose figures are still shown. Names of workers are fresh with
each start, so that without a bound there would be more and more of them."""

DECISION_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5,
)
FIRST_TOKEN_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
DELTA_AGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class FrontendMetrics:
    """Counts what happens to requests."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foveal_{name}", text, labels, registry=registry)

        self._routed = counter(
            "requests_routed", "Requests sent to a worker.", "worker", "transfer"
        )
        self.finished = counter(
            "requests_finished",
            "Requests that are over, by how they ended: stop, length, abort, error or "
            "repetition, as the engine says; lost with their worker; or no_worker, when "
            "none was ready and worker is empty.",
            "worker", "outcome",
        )
        self._overlap = counter(
            "overlap_blocks", "Prompt blocks that the chosen worker had cached."
        )
        self._embeddings = counter(
            "embeddings", "Images of routed requests beyond the cached blocks, by whether "
            "the worker or its host held the encoder's output.", "held",
        )
        self._encode_jobs = counter("encode_jobs", "Images sent to encode workers.", "outcome")
        self._embedding_moves = counter(
            "embedding_moves", "Encoder outputs moved from encode workers to other hosts.",
            "outcome",
        )
        self._prompt = counter("prompt_blocks", "Full blocks of routed prompts.")
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of requests that have a first token.", "worker"
        )
        self._overlap_tokens = counter(
            "overlap_tokens",
            "Of these, those that the router found in the worker's cache.", "worker",
        )
        self._promised_tokens = counter(
            "promised_tokens",
            "Of these, those behind them that the worker had been promised.", "worker",
        )
        self._cached_tokens = counter(
            "cached_tokens",
            "Of these, those that the engine says it took from its cache.", "worker",
        )
        self._missed_tokens = counter(
            "overlap_missed_tokens",
            "Tokens that the router found in the worker's cache and the engine did not.",
            "worker",
        )
        self._first_token = Histogram(
            "foveal_time_to_first_token_seconds",
            "Seconds from being routed to the first token.",
            ["worker"], buckets=FIRST_TOKEN_BUCKETS, registry=registry,
        )
        self.decision = Histogram(
            "foveal_router_decision_seconds",
            "Seconds to hash a prompt's blocks and choose a worker.",
            buckets=DECISION_BUCKETS, registry=registry,
        )
        self.delta_age = Histogram(
            "foveal_kv_delta_age_seconds",
            "Seconds from an engine's KV events to the index, by the clocks of both hosts.",
            buckets=DELTA_AGE_BUCKETS, registry=registry,
        )
        self.moved = counter(
            "requests_moved", "Requests sent anew because their worker was lost."
        )
        self.failed = counter(
            "requests_failed", "Requests ended because their worker was lost."
        )
        self.tensors_missing = counter(
            "tensors_missing", "Times a worker could not read what a request referred to."
        )
        self.inline_bytes = 0
        """Bytes of requests with their tensors in them."""
        self.inline_seconds = 0.0
        self._by_worker = (
            self._routed, self.finished, self._prompt_tokens, self._overlap_tokens,
            self._promised_tokens, self._cached_tokens, self._missed_tokens,
            self._first_token,
        )
        self._gone: dict[str, None] = {}

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

    def count_embedding_move(self, outcome: str) -> None:
        """``outcome``: ``moved`` or ``failed``."""
        self._embedding_moves.labels(outcome).inc()

    def answered(
        self,
        worker: str,
        *,
        prompt_tokens: int,
        overlap_tokens: int,
        promised_tokens: int,
        cached_tokens: int | None,
        seconds: float,
    ) -> None:
        """Compare what the router expected with what the engine says it reused.

        ``cached_tokens`` is None where the engine does not say.
        """
        self._first_token.labels(worker).observe(seconds)
        if cached_tokens is None:
            return
        self._prompt_tokens.labels(worker).inc(prompt_tokens)
        self._overlap_tokens.labels(worker).inc(overlap_tokens)
        self._promised_tokens.labels(worker).inc(promised_tokens)
        self._cached_tokens.labels(worker).inc(cached_tokens)
        self._missed_tokens.labels(worker).inc(max(0, overlap_tokens - cached_tokens))

    def sent_inline(self, nbytes: int, seconds: float) -> None:
        """A request of ``nbytes`` was sent with its tensors in it."""
        self.inline_bytes += nbytes
        self.inline_seconds += seconds

    def worker_came(self, worker: str) -> None:
        self._gone.pop(worker, None)

    def worker_gone(self, worker: str) -> None:
        """Show a worker's figures for a while still, and then no more."""
        self._gone[worker] = None
        while len(self._gone) > MOST_GONE_WORKERS:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            for metric in self._by_worker:
                metric.remove_by_labels({"worker": oldest})


class FleetCollector(Collector):
    """Reads the state of the pool, the router, the cache and the arena."""

    def __init__(
        self,
        pool: WorkerPool,
        router: Router,
        cache: ArenaProcessorCache,
        arena: Arena | None,
        nixl: NixlOffers,
        metrics: FrontendMetrics,
    ) -> None:
        self._pool = pool
        self._router = router
        self._cache = cache
        self._arena = arena
        self._nixl = nixl
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._worker_metrics()
        plane, hits = self._router.plane, self._cache.make_stats()
        for name, text, count in (
            ("foveal_kv_deltas", "KV deltas applied.", plane.deltas),
            ("foveal_kv_gaps", "Times KV deltas were found missing.", plane.gaps),
            ("foveal_kv_snapshots", "KV snapshots applied.", plane.snapshots),
            ("foveal_items_without_room", "Items sent inline because the arena was full.",
             self._cache.inlined),
        ):
            yield CounterMetricFamily(name, text, value=count)
        lookups = CounterMetricFamily(
            "foveal_processor_cache_lookups",
            "Images and other media asked of the processor cache: processed before, or not.",
            labels=["result"],
        )
        lookups.add_metric(["hit"], hits.hits)
        lookups.add_metric(["miss"], hits.total - hits.hits)
        yield lookups
        yield from self._transfer_metrics()
        yield from self._nixl_metrics()
        yield from self._arena_metrics()

    def _worker_metrics(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "foveal_worker_ready", "Whether a worker takes requests.",
            labels=["worker", "transfer"],
        )
        by_worker = ["worker"]
        requests = GaugeMetricFamily(
            "foveal_worker_requests", "Requests in flight, of all frontends.",
            labels=by_worker,
        )
        prefill = GaugeMetricFamily(
            "foveal_worker_prefill_tokens",
            "Tokens of prefill that requests without a first token still need, of all "
            "frontends.",
            labels=by_worker,
        )
        blocks = GaugeMetricFamily(
            "foveal_worker_kv_blocks_held", "KV blocks that requests in flight hold.",
            labels=by_worker,
        )
        size = GaugeMetricFamily(
            "foveal_worker_kv_blocks", "KV blocks that the engine has.", labels=by_worker
        )
        caught_up = GaugeMetricFamily(
            "foveal_kv_caught_up",
            "Whether the index has all that the worker is known to have published.",
            labels=by_worker,
        )
        behind = GaugeMetricFamily(
            "foveal_kv_deltas_behind",
            "KV deltas that the worker is known to have published and the index lacks.",
            labels=by_worker,
        )
        plane = self._router.plane
        for worker in self._pool.workers:
            takes = worker.ready and not worker.draining
            ready.add_metric([worker.name, worker.transfer], float(takes))
            if not worker.ready:
                continue
            load = self._router.load.load(worker.name)
            name = [worker.name]
            requests.add_metric(name, load.requests)
            prefill.add_metric(name, load.prefill_tokens)
            blocks.add_metric(name, max(load.blocks, load.engine_blocks))
            size.add_metric(name, worker.facts.num_kv_blocks if worker.facts else 0)
            caught_up.add_metric(name, float(plane.caught_up(worker.name)))
            behind.add_metric(name, plane.behind(worker.name))
        yield from (ready, requests, prefill, blocks, size, caught_up, behind)

    def _transfer_metrics(self) -> Iterator[Metric]:
        nbytes = CounterMetricFamily(
            "foveal_transfer_bytes",
            "Bytes of tensors copied: shm, into the arena, once for each image; nixl, by "
            "workers from there; inline, in requests.",
            labels=["path"],
        )
        seconds = CounterMetricFamily(
            "foveal_transfer_seconds", "Seconds that these copies took, added up.",
            labels=["path"],
        )
        written = self._arena.stats().bytes_written if self._arena is not None else 0
        pulls = self._nixl.all_pulls
        for path, size, time in (
            ("shm", written, self._cache.copy_seconds),
            ("nixl", pulls.nbytes, pulls.read_seconds),
            ("inline", self._metrics.inline_bytes, self._metrics.inline_seconds),
        ):
            nbytes.add_metric([path], size)
            seconds.add_metric([path], time)
        yield from (nbytes, seconds)

    def _arena_metrics(self) -> Iterator[Metric]:
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

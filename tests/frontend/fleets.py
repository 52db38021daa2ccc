"""One real frontend, less HTTP and rendering, and the fake workers that a test starts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.v1.engine import EngineCoreOutput

from frontend.arena_cache import ArenaProcessorCache
from frontend.engine_client import RoutedEngineClient
from frontend.metrics import FleetCollector, FrontendMetrics
from frontend.nixl_offers import NixlOffers
from frontend.router.cost import RouterSettings
from frontend.router.router import Router
from frontend.worker_pool import WorkerPool
from tests.fakes import HASHER, FakeWorker, eventually, make_request, within
from transfer.arena import Arena
from transfer.messages import PROTOCOL_VERSION, Hello, WorkerFacts
from transfer.registry import Registry


def tokens_of(answer: list[EngineCoreOutput]) -> list[int]:
    return [token for output in answer for token in output.new_token_ids]


class Fleet:
    """An async context: within, the frontend looks for workers."""

    def __init__(
        self,
        registry: Registry,
        *,
        arena_bytes: int = 1 << 20,
        transfer: str = "auto",
        mode: str = "kv",
        wait: float = 20.0,
        migration_limit: int = 3,
        addresses: Sequence[str] = (),
        expected: dict[str, object] | None = None,
        frontend: str = "frontend-1",
    ) -> None:
        self.registry = registry
        self.arena = Arena(arena_bytes)
        self.cache = ArenaProcessorCache(self.arena, HASHER, "demo")
        self.metrics = CollectorRegistry()
        self.counted = FrontendMetrics(self.metrics)
        self.client = RoutedEngineClient(
            supported_tasks=("generate",),
            cache=self.cache,
            arena=self.arena,
            router=Router(mode, RouterSettings(), time.monotonic, random.Random(1)),
            metrics=self.counted,
            worker_wait_timeout=wait,
            migration_limit=migration_limit,
        )
        self.hello = Hello(
            frontend=frontend,
            protocol=PROTOCOL_VERSION,
            arena=self.arena.id,
            transfer=transfer,
            identity_seed_fingerprint=HASHER.fingerprint,
        )
        self.nixl = NixlOffers(self.arena, transfer)
        self.pool = WorkerPool(
            self.hello, registry, addresses, expected or {}, self.client, self.nixl
        )
        self.learned: list[WorkerFacts] = []
        self._workers = AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        self.client.start(self.pool, self.learned.append)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.shutdown()
        await within(self.client.closed())
        await self._workers.aclose()
        self.arena.close()

    async def start(self, name: str = "worker-1", **settings: Any) -> FakeWorker:
        """Start a worker and wait until requests may go to it."""
        worker = FakeWorker(self.registry, name, **settings)
        await self._workers.enter_async_context(worker)
        await self.until_ready(name)
        return worker

    async def introduce(self, name: str = "worker-1", **settings: Any) -> FakeWorker:
        """Start a worker and do not wait."""
        worker = FakeWorker(self.registry, name, **settings)
        await self._workers.enter_async_context(worker)
        return worker

    async def until_ready(self, name: str) -> None:
        await eventually(lambda: name in self.pool.ready_workers())

    async def until_gone(self, name: str) -> None:
        await eventually(lambda: name not in self.pool.ready_workers())

    def collect(self, **instead: Any) -> None:
        """Show the state of the fleet among the metrics."""
        parts = {
            "pool": self.pool, "router": self.client.router, "cache": self.cache,
            "arena": self.arena, "nixl": self.nixl, "metrics": self.counted,
        }
        self.metrics.register(FleetCollector(**{**parts, **instead}))

    async def hold_request(self, worker: FakeWorker, max_tokens: int = 3) -> None:
        """Have the worker's engine keep request ``r`` and say nothing of it."""
        worker.engine.stalled = True
        await self.client.add_request_async(make_request("r", max_tokens=max_tokens))
        await within(worker.engine.added.get())

    async def answer(self, request_id: str) -> list[EngineCoreOutput]:
        """The outputs of a request up to its last, others' left out."""
        answer = []
        while not answer or not answer[-1].finished:
            outputs = await within(self.client.get_output_async())
            assert outputs.engine_index == 0
            answer += [o for o in outputs.outputs if o.request_id == request_id]
        return answer

    @property
    def in_flight(self) -> int:
        """Requests that some worker may still be working on."""
        return int(self.client.describe()["requests"])

    def at_rest(self) -> bool:
        """Whether nothing is kept or counted for any request."""
        client = self.client
        return not (
            client.requests._sent
            or client.requests._families
            or client._calls
            or len(client.router.load)
            or self.arena.stats().leased_entries
        )

    def count(self, metric: str) -> float:
        return self.metrics.get_sample_value(f"foveal_{metric}_total") or 0.0

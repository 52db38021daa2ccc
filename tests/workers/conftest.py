"""A worker, a line to it, and what is behind them. Modules say what their worker is like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.arena_cache import ArenaProcessorCache
from tests.fakes import HASHER, FakeWorker
from tests.workers.lines import Line
from transfer.arena import Arena
from transfer.embeddings.home import EmbeddingHome
from transfer.embeddings.store import EmbeddingStore
from transfer.registry import Registry
from workers.embedding_cache import HostEmbeddings


@pytest.fixture
def arena() -> Iterator[Arena]:
    """A frontend's."""
    with Arena(1 << 16, populate=False) as arena:
        yield arena


@pytest.fixture
def cache(arena: Arena) -> ArenaProcessorCache:
    return ArenaProcessorCache(arena, HASHER, "model")


@pytest.fixture
def store_bytes() -> int:
    """How much the host's cache of encoder outputs holds."""
    return 1 << 16


@pytest.fixture
def store(tmp_path: Path, store_bytes: int) -> Iterator[EmbeddingStore]:
    store = EmbeddingStore(tmp_path / "outputs", "key", store_bytes)
    yield store
    store.close()


@pytest.fixture
def embeddings(store: EmbeddingStore, tmp_path: Path) -> HostEmbeddings:
    return HostEmbeddings(EmbeddingHome(bytes(32), "ns", tmp_path), store)


@pytest.fixture
def worker_settings() -> dict[str, Any]:
    """What ``worker`` is made with, beside its registry."""
    return {}


@pytest.fixture
async def worker(
    registry: Registry, worker_settings: dict[str, Any]
) -> AsyncIterator[FakeWorker]:
    async with FakeWorker(registry, **worker_settings) as worker:
        yield worker


@pytest.fixture
async def line(worker: FakeWorker, arena: Arena) -> AsyncIterator[Line]:
    """From a frontend that has not greeted the worker yet."""
    async with Line(worker, arena=arena) as line:
        yield line

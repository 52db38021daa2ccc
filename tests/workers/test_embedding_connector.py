"""The connector between vLLM and the shared outputs: what the engine is told, and tells."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.ec_transfer import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from tests.fakes import make_item
from transfer.embeddings.store import EmbeddingStore
from transfer.pack import plan, strip
from workers import embedding_connector
from workers.embedding_connector import EmbeddingConnector, EmbeddingNews

A, B = "image-" + "a" * 32, "image-" + "b" * 32
OUTPUT = torch.arange(32, dtype=torch.float32).view(4, 8)


def feature(identifier: str, offset: int = 0, data: Any = None) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=4)
    return SimpleNamespace(
        identifier=identifier, mm_position=position, data=data or make_item(1.0)
    )


def request_of(*features: SimpleNamespace) -> Any:
    return SimpleNamespace(request_id="r", mm_features=list(features))


class Step:
    """A SchedulerOutput, as far as the connector looks at it."""

    def __init__(self, runs: dict[str, list[int]] | None = None) -> None:
        self.scheduled_encoder_inputs = runs or {}
        self.ec_connector_metadata: Any = None


class Pair:
    """The connectors of one engine: in its scheduler and in its model runner."""

    def __init__(self, directory: Path, role: str = "ec_both") -> None:
        self.store = EmbeddingStore(directory, "key", 1 << 20)
        config: Any = SimpleNamespace(
            max_concurrent_batches=2,
            device_config=SimpleNamespace(device="cpu"),
            ec_transfer_config=ECTransferConfig(
                ec_connector="EmbeddingConnector",
                ec_role=role,  # type: ignore[arg-type]
                ec_connector_extra_config={
                    "directory": str(directory), "model_key": "key",
                    "capacity_bytes": 1 << 20,
                },
            ),
        )
        self.scheduler = EmbeddingConnector(config, ECConnectorRole.SCHEDULER)
        self.runner = EmbeddingConnector(config, ECConnectorRole.WORKER)

    def run(self, step: Step, encoded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step; ``encoded`` is what the encoder computes. Returns its cache."""
        meta = self.scheduler.build_connector_meta(step)  # type: ignore[arg-type]
        step.ec_connector_metadata = pickle.loads(pickle.dumps(meta))
        cache: dict[str, torch.Tensor] = {}
        self.runner.fetch(step)  # type: ignore[arg-type]
        self.runner.bind_connector_metadata(step.ec_connector_metadata)
        self.runner.start_load_caches(cache)
        for identifier, tensor in encoded.items():
            cache[identifier] = tensor
            self.runner.save_caches(cache, identifier)
        news = self.runner.build_connector_worker_meta()
        if news is not None:
            self.scheduler.update_connector_output(
                SimpleNamespace(ec_connector_worker_meta=news)  # type: ignore[arg-type]
            )
        return cache

    def counts(self) -> dict[str, int]:
        stats = self.scheduler.get_ec_connector_stats()
        assert stats is not None
        return {name: count for name, count in stats.data.items() if count}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(embedding_connector, "get_tensor_model_parallel_rank", lambda: 0)
    return Pair(tmp_path / "s")


def test_what_one_engine_encodes_another_loads(pair: Pair):
    request = request_of(feature(A))
    assert not pair.scheduler.has_cache_item(A)
    pair.scheduler.update_state_after_alloc(request, 0)
    pair.run(Step({"r": [0]}), {A: OUTPUT})
    assert pair.counts() == {"encoded": 1, "saved": 1}
    other = Pair(pair.store.directory)
    assert other.scheduler.has_cache_item(A)
    other.scheduler.update_state_after_alloc(request, 0)
    cache = other.run(Step(), {})
    assert torch.equal(cache[A], OUTPUT)
    assert other.counts() == {"loaded": 1}
    assert other.counts() == {}


def test_an_output_that_cannot_be_read_is_encoded_after_all(pair: Pair):
    pair.store.save(A, OUTPUT)
    assert pair.scheduler.has_cache_item(A)
    pair.scheduler.update_state_after_alloc(request_of(feature(B), feature(A)), 1)
    path = pair.store.directory / A
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    step = Step({"r": [0]})
    cache = pair.run(step, {})
    assert step.scheduled_encoder_inputs == {"r": [0, 1]}
    assert cache == {}
    assert pair.counts() == {"encoded": 2, "loaded": 1, "unreadable": 1}
    assert not pair.scheduler.has_cache_item(A)


def test_an_output_removed_since_it_was_scheduled_is_loaded_all_the_same(pair: Pair):
    pair.store.save(A, OUTPUT)
    pair.scheduler.has_cache_item(A)
    pair.scheduler.update_state_after_alloc(request_of(feature(A)), 0)
    pair.store.clear()
    assert torch.equal(pair.run(Step(), {})[A], OUTPUT)


def test_a_request_without_pixels_waits_for_nothing_where_the_output_is(pair: Pair):
    item = make_item(2.0)
    tensors = plan(item)
    assert tensors is not None
    request = request_of(feature(A, offset=8, data=strip(tensors, item)))
    pair.store.save(A, OUTPUT)
    assert pair.scheduler.ensure_cache_available(request, 0)
    assert pair.scheduler.take_unavailable_requests() == set()


def test_a_request_without_pixels_fails_where_the_output_has_gone(pair: Pair):
    item = make_item(2.0)
    tensors = plan(item)
    assert tensors is not None
    request = request_of(feature(A, offset=8, data=strip(tensors, item)))
    assert not pair.scheduler.ensure_cache_available(request, 0)
    assert pair.scheduler.take_unavailable_requests() == {"r"}
    assert pair.scheduler.take_unavailable_requests() == set()
    # Behind it, its output is needed no more.
    assert pair.scheduler.ensure_cache_available(request, 12)


def test_a_request_with_pixels_never_fails_for_want_of_an_output(pair: Pair):
    assert pair.scheduler.ensure_cache_available(request_of(feature(A)), 0)


def test_other_ranks_of_a_worker_save_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedding_connector, "get_tensor_model_parallel_rank", lambda: 1)
    pair.run(Step({"r": [0]}), {A: OUTPUT})
    assert pair.store.identifiers() == []


def test_an_engine_that_only_encodes_loads_nothing(tmp_path: Path):
    producer = Pair(tmp_path / "p", "ec_producer")
    producer.store.save(A, OUTPUT)
    assert not producer.scheduler.has_cache_item(A)


def test_news_of_several_ranks_add_up():
    both = EmbeddingNews(Counter(saved=1)).aggregate(
        EmbeddingNews(Counter(saved=2, unreadable=1))
    )
    assert isinstance(both, EmbeddingNews)
    assert both.counts == {"saved": 3, "unreadable": 1}

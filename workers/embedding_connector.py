"""vLLM's encoder cache connector, with the host's shared encoder outputs behind it.

One class, two places: in the scheduler it says which outputs need not be computed, in the
model runner it loads those and saves what the encoder computes. An output that cannot be
loaded is encoded after all: ``fetch``, called by our worker class before the step, turns
the load into a run of the encoder.

vLLM names relied on: ECConnectorBase and which of its methods the scheduler and the model
runners call (has_cache_item before update_state_after_alloc in one step,
ensure_cache_available before both, start_load_caches with the runner's encoder cache,
save_caches for each new output); SchedulerOutput.scheduled_encoder_inputs;
ECConnectorStats; Request.mm_features; get_ec_transfer, has_ec_transfer;
VllmConfig.max_concurrent_batches, ec_transfer_config.ec_connector_extra_config;
get_tensor_model_parallel_rank.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from transfer.embeddings.entry import read_description, read_elements
from transfer.embeddings.store import EmbeddingStore
from transfer.errors import StaleRef
from transfer.pack import lacks_tensors
from workers.embedding_loads import EmbeddingLoad, EmbeddingLoads

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class EmbeddingMetadata(ECConnectorMetadata):
    """From the scheduler to the model runner, with every step."""

    loads: list[EmbeddingLoad] = field(default_factory=list)


@dataclass
class EmbeddingNews(ECConnectorWorkerMetadata):
    """From the model runner to the scheduler: what it did that was not told to it."""

    counts: Counter[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, EmbeddingNews)
        return EmbeddingNews(self.counts + other.counts)


class EmbeddingStats(ECConnectorStats):
    """Counts since the last step: ``encoded``, ``loaded``, ``saved``, ``unreadable``."""

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        return EmbeddingStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return self.data

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class EmbeddingConnector(ECConnectorBase):
    """Named to vLLM by ``workers.embedding_cache``."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        self._store = EmbeddingStore(
            Path(extra["directory"]), extra["model_key"], extra["capacity_bytes"]
        )
        self._loads = EmbeddingLoads(self._store, vllm_config.max_concurrent_batches + 1)
        self._unavailable: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._fetched: dict[str, torch.Tensor] = {}

    # In the scheduler.

    def has_cache_item(self, identifier: str) -> bool:
        return self.is_consumer and self._loads.offer(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False, and the request fails, if it needs an output that has gone for good."""
        needed = [
            (index, feature.identifier)
            for index, feature in enumerate(request.mm_features)
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
            and (feature.data is None or lacks_tensors(feature.data))
        ]
        if not needed or self._loads.hold(request.request_id, needed):
            return True
        logger.error("request %r: an encoder output has gone", request.request_id)
        self._unavailable.add(request.request_id)
        return False

    def take_unavailable_requests(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if self.is_consumer:
            identifier = request.mm_features[index].identifier
            self._loads.take(request.request_id, index, identifier)

    def update_state_after_free(self, request: Request, index: int) -> None:
        self._loads.free(request.request_id, index)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._loads.finish(request.request_id)
        return False, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingMetadata:
        loads = self._loads.next_step()
        runs = scheduler_output.scheduled_encoder_inputs.values()
        self._counts["encoded"] += sum(map(len, runs))
        self._counts["loaded"] += len(loads)
        return EmbeddingMetadata(loads)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        news = connector_output.ec_connector_worker_meta
        if isinstance(news, EmbeddingNews):
            self._counts += news.counts

    def get_ec_connector_stats(self) -> EmbeddingStats | None:
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        counts, self._counts = self._counts, Counter()
        return EmbeddingStats(dict(counts))

    @classmethod
    def build_ec_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> EmbeddingStats | None:
        return EmbeddingStats(data or {})

    # In the model runner.

    def fetch(self, scheduler_output: SchedulerOutput) -> None:
        """Read what this step is to load; what cannot be read is scheduled to be encoded."""
        metadata = scheduler_output.ec_connector_metadata
        if not isinstance(metadata, EmbeddingMetadata):
            return
        self._fetched.clear()
        for load in metadata.loads:
            tensor = self._read(load)
            if tensor is not None:
                self._fetched[load.identifier] = tensor
                continue
            logger.error("cannot load %s: it is encoded", load.identifier)
            self._counts.update(unreadable=1, encoded=1)
            runs = scheduler_output.scheduled_encoder_inputs
            runs.setdefault(load.request_id, []).append(load.index)

    def start_load_caches(
        self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any
    ) -> None:
        device = self._vllm_config.device_config.device
        for identifier, tensor in self._fetched.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = tensor.to(device)
        self._fetched.clear()

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        output = encoder_cache[mm_hash]
        if get_tensor_model_parallel_rank() or not isinstance(output, torch.Tensor):
            return  # all ranks have the same
        try:
            self._counts["saved"] += self._store.save(mm_hash, output)
        except OSError as error:
            logger.error("cannot save an encoder output: %s", error)

    def build_connector_worker_meta(self) -> EmbeddingNews | None:
        if not any(self._counts.values()):
            return None
        counts, self._counts = self._counts, Counter()
        return EmbeddingNews(counts)

    def _read(self, load: EmbeddingLoad) -> torch.Tensor | None:
        try:
            fd = os.open(load.path, os.O_RDONLY)
        except OSError:  # the scheduler is on another host, or in another container
            return self._store.load(load.identifier)
        try:
            stated = read_description(fd, self._store.model_key, load.identifier)
            return read_elements(fd, stated)
        except (StaleRef, OSError):
            self._store.forget(load.identifier)
            return None
        finally:
            os.close(fd)


def fetch_embeddings(scheduler_output: SchedulerOutput) -> None:
    """Have this process's connector, if it is ours, prepare a step."""
    if has_ec_transfer():
        connector = get_ec_transfer()
        if isinstance(connector, EmbeddingConnector):
            connector.fetch(scheduler_output)

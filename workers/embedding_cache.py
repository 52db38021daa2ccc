"""A worker's part in the encoder outputs that its host shares.

This process looks after the directory; the engine's processes use it through
``workers.embedding_connector``. Here is also decided whether a request whose pixels are
not in this host's memory can do without them.

vLLM names relied on: ECTransferConfig; ModelConfig (model, revision, dtype, quantization,
is_encoder_decoder, hf_config, hf_overrides, multimodal_config),
MultiModalConfig.compute_hash and video_pruning_rate; EngineCoreRequest.mm_features.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.v1.engine import EngineCoreRequest

from configs.flags import BadSetting
from configs.schema import WorkerConfig
from transfer.embeddings.home import EmbeddingHome, sweep_dead_homes
from transfer.embeddings.store import EmbeddingLease, EmbeddingStore
from transfer.errors import TransferError
from transfer.pack import is_packed, without_reference
from transfer.process import place_of

logger = logging.getLogger(__name__)

GIB = 1 << 30
FORMAT = 1
"""Raised when what is written differs."""
TELL_SECONDS = 0.25
"""How soon frontends are told that an output came or went."""
REPEAT_SECONDS = 1.0
"""How often they are told anyway: they come and go, and nothing here is acknowledged."""
MOST_TOLD = 4096
LISTING_SHARE = 0.05
"""How much of its time a worker lists them at most: it passes tokens on meanwhile, too."""


def connector_config(settings: WorkerConfig) -> ECTransferConfig | None:
    """What vLLM must be told so that its engine uses the cache; None without a cache.

    An engine that only produces is one that only encodes, to vLLM: it loads no language
    model.

    Raises:
        BadSetting: an encode worker has nowhere to put what it encodes.
    """
    encodes = settings.role == "encode"
    if settings.multimodal_embedding_cache_capacity_gb == 0:
        if encodes:
            raise BadSetting(
                "--role encode needs --multimodal-embedding-cache-capacity-gb: what is "
                "encoded is handed over there"
            )
        return None
    return ECTransferConfig(
        ec_connector="EmbeddingConnector",
        ec_connector_module_path="workers.embedding_connector",
        ec_role="ec_producer" if encodes else "ec_both",
    )


def open_embeddings(
    settings: WorkerConfig, config: VllmConfig, seed: bytes
) -> HostEmbeddings | None:
    """Join the host's cache and let the engine of ``config`` know where it is.

    None, and an engine without it, where it is off or cannot be had.

    Raises:
        BadSetting: it cannot be had and the worker only encodes.
    """
    if config.ec_transfer_config is None:
        return None
    home: EmbeddingHome | None = None
    try:
        if not config.model_config.supports_multimodal_inputs:
            raise TransferError("the model takes text only")
        if config.model_config.is_encoder_decoder:
            # vLLM's scheduler asks a connector for these too, its runner does not load them.
            raise TransferError("the model is an encoder-decoder, which vLLM does not cache")
        home = EmbeddingHome(seed, settings.namespace)
        for name in sweep_dead_homes():  # not what this deployment itself left behind
            logger.info("removed %s, left by processes that are gone", name)
        key = model_key(config)
        store = EmbeddingStore(
            home.path / key,
            key,
            int(settings.multimodal_embedding_cache_capacity_gb * GIB),
        )
    except (TransferError, OSError) as error:
        if home is not None:
            home.leave()
        if settings.role == "encode":
            raise BadSetting(f"--role encode has no embedding cache: {error}") from error
        logger.error("no embedding cache: %s", error)
        config.ec_transfer_config = None
        return None
    config.ec_transfer_config.ec_connector_extra_config.update(
        directory=str(store.directory), model_key=key, capacity_bytes=store.capacity
    )
    logger.info(
        "up to %.2f GiB of %s for encoder outputs", store.capacity / GIB, store.directory
    )
    return HostEmbeddings(home, store)


def model_key(config: VllmConfig) -> str:
    """Name all that an encoder's output depends on besides its input: 24 hex digits."""
    model, multimodal = config.model_config, config.model_config.multimodal_config
    factors: list[Any] = [
        FORMAT,
        vllm.__version__,
        torch.__version__,
        config.device_config.device_type,
        model.model,
        model.revision,
        getattr(model.hf_config, "_commit_hash", None),
        _files_of(Path(model.model)),
        str(model.dtype),
        model.quantization,
        str(model.hf_overrides),
        config.load_config.load_format,
    ]
    if multimodal is not None:
        factors += [
            multimodal.compute_hash(),
            multimodal.mm_processor_kwargs,
            multimodal.video_pruning_rate,
        ]
    text = json.dumps(factors, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _files_of(directory: Path) -> list[tuple[str, int, int]]:
    """What a local checkpoint is made of: another one may come to stand in its place."""
    if not directory.is_dir():
        return []
    files = ((path.name, path.stat()) for path in directory.iterdir() if path.is_file())
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in files)


class HostEmbeddings:
    """The cache as the worker process sees it. Used on one thread, but for ``keep``."""

    def __init__(self, home: EmbeddingHome, store: EmbeddingStore) -> None:
        self._home = home
        self._store = store
        self._told_version: int | None = None
        self._told_at = 0.0
        self._listing_seconds = 0.0
        self.clears = 0
        """How often this process was told to forget all outputs."""
        self.name = f"{store.model_key}@{place_of(store.directory)}"
        """Two workers share their outputs exactly if they say the same name."""

    def news(self) -> list[str] | None:
        """What is held, the most recently used last, if it is time to tell."""
        now, version = time.monotonic(), self._store.version()
        due = TELL_SECONDS if version != self._told_version else REPEAT_SECONDS
        if now - self._told_at < max(due, self._listing_seconds / LISTING_SHARE):
            return None
        self._told_version, self._told_at = version, now
        held = self._store.identifiers()[-MOST_TOLD:]
        self._listing_seconds = time.monotonic() - now
        return held

    def take(self, request: EngineCoreRequest) -> list[EmbeddingLease]:
        """Let a request do without the pixels of images whose encoder output is here.

        What it refers to need then not be fetched. Keep the result until it is over.
        """
        leases = []
        features = list(request.mm_features or ())
        for index, feature in enumerate(features):
            if feature.data is None or not is_packed(feature.data):
                continue
            lease = self._store.lease_whole(feature.identifier)
            if lease is not None:
                leases.append(lease)
                features[index] = replace(feature, data=without_reference(feature.data))
        if leases:
            request.mm_features = features
        return leases

    def lease(self, identifier: str) -> EmbeddingLease | None:
        """Lease an output if it is here."""
        return self._store.lease(identifier)

    def keep(self, identifier: str, entry: memoryview) -> bool:
        """Keep an output of another host, given as the bytes of its file there.

        Tells whether it is here now. May take a while; may be called on another thread.

        Raises:
            StaleRef: the bytes are not this output, or not of this model.
            OSError: they cannot be written.
        """
        return self._store.save_entry(identifier, entry)

    def forget(self, identifier: str) -> None:
        """Remove an output that is not what it was."""
        self._store.forget(identifier)

    def clear(self) -> None:
        """Forget all outputs, on this host: the weights may be others now."""
        self.clears += 1
        self._store.clear()

    def leave(self) -> None:
        """Go; the last process of the deployment removes what is there."""
        self._home.leave()

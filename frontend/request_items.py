"""The multimodal items of a request: their identities, and what of them travels.

vLLM names relied on: EngineCoreRequest.mm_features, MultiModalFeatureSpec;
InputProcessor._get_mm_identifier puts a LoRA adapter's name before the hash.
"""

from __future__ import annotations

import copy
from collections.abc import Set
from dataclasses import replace

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest

from frontend.arena_cache import ArenaProcessorCache, IdentifiedItem
from frontend.embedding_checks import EmbeddingLimits, check_embeddings
from transfer.arena import Arena
from transfer.pack import is_packed, read_reference, resolve


def identify(
    request: EngineCoreRequest,
    cache: ArenaProcessorCache,
    limits: EmbeddingLimits | None = None,
) -> None:
    """Give every item of ``request`` its canonical identity.

    What has not come through the processor cache (embeddings that clients send, for
    example) goes into the arena here.

    Raises:
        VLLMValidationError: an item holds a reference instead of data, or neither, or
            embeddings that are not within ``limits``.
    """
    identified = []
    for feature in request.mm_features or ():
        item = feature.data
        if item is None:
            raise VLLMValidationError("a multimodal item without data")
        if limits is not None:
            check_embeddings(feature, limits)
        if not isinstance(item, IdentifiedItem):
            item = cache.store(item)
        # With vision LoRA vLLM puts the adapter before the hash: the encoder's output
        # differs by adapter. The processed pixels do not.
        adapter = ""
        if feature.mm_hash and feature.identifier.endswith(feature.mm_hash):
            adapter = feature.identifier.removesuffix(feature.mm_hash)
        identity = f"{feature.modality}-{item.identity}"
        identified.append(
            replace(feature, data=item, identifier=adapter + identity, mm_hash=identity)
        )
    if identified:
        request.mm_features = identified


def is_by_reference(request: EngineCoreRequest) -> bool:
    """Whether all items are references: none had to stay whole for want of room."""
    return all(f.data is not None and is_packed(f.data) for f in request.mm_features or ())


def with_tensors(
    request: EngineCoreRequest, arena: Arena | None, without: Set[str] = frozenset()
) -> EngineCoreRequest:
    """``request`` with tensors, over the arena's memory, in place of references.

    Items whose identifier is in ``without`` keep their references: the worker has what the
    encoder made of them. The original must live as long as the result: it leases the memory.
    """
    features = []
    for feature in request.mm_features or ():
        item = feature.data
        spared = feature.identifier in without
        if item is not None and is_packed(item) and arena is not None and not spared:
            reference = read_reference(item)
            item = resolve(item, arena.view(reference.entry), reference)
        features.append(replace(feature, data=item))
    copied = copy.copy(request)
    copied.mm_features = features
    return copied

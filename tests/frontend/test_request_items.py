"""The items of a request: identities on the way out, tensors where they must travel."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest

from frontend.arena_cache import ArenaProcessorCache, IdentifiedItem
from frontend.request_items import identify, is_by_reference, with_tensors
from tests.fakes import HASHER, make_item, make_request
from transfer.arena import Arena
from transfer.pack import is_packed


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(1 << 16, populate=False) as arena:
        yield arena


@pytest.fixture
def cache(arena: Arena) -> ArenaProcessorCache:
    return ArenaProcessorCache(arena, HASHER, "model")


def identifiers(request: EngineCoreRequest) -> list[str]:
    return [feature.identifier for feature in request.mm_features or ()]


def test_the_canonical_identity_takes_the_place_of_the_hash(
    cache: ArenaProcessorCache,
) -> None:
    stored = cache.store(make_item(1.0))
    request = make_request(items=[stored, make_item(2.0)])
    identify(request, cache)
    first, second = request.mm_features or ()
    assert first.identifier == first.mm_hash == f"image-{stored.identity}"
    assert first.data is stored
    assert isinstance(second.data, IdentifiedItem)
    assert second.identifier == second.mm_hash == f"image-{second.data.identity}"
    assert first.identifier != second.identifier


def test_the_same_pixels_under_two_hashes_are_one_image(cache: ArenaProcessorCache) -> None:
    request = make_request(items=[make_item(1.0), make_item(1.0)])
    identify(request, cache)
    one, other = identifiers(request)
    assert one == other


def test_modalities_do_not_share_identities(cache: ArenaProcessorCache) -> None:
    request = make_request(items=[make_item(1.0), make_item(1.0)])
    features = request.mm_features or []
    request.mm_features = [features[0], replace(features[1], modality="video")]
    identify(request, cache)
    one, other = identifiers(request)
    assert one.startswith("image-") and other.startswith("video-")


def test_an_adapter_stays_before_the_identity_and_out_of_the_hash(
    cache: ArenaProcessorCache,
) -> None:
    request = make_request(items=[make_item(1.0)])
    (feature,) = request.mm_features or ()
    request.mm_features = [replace(feature, identifier=f"adapter:{feature.mm_hash}")]
    identify(request, cache)
    (feature,) = request.mm_features
    assert feature.mm_hash is not None
    assert feature.identifier == f"adapter:{feature.mm_hash}"
    assert feature.mm_hash.startswith("image-")


def test_requests_that_share_their_features_get_the_same_identities(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    parent = make_request(items=[make_item(1.0), cache.store(make_item(2.0))])
    children = [copy(parent) for _ in range(3)]
    for child in [*children, parent, children[0]]:
        identify(child, cache)
    assert len({tuple(identifiers(r)) for r in [*children, parent]}) == 1
    assert arena.stats().entries == 2


def test_an_item_that_passed_the_cache_by_goes_into_the_arena(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    request = make_request(items=[make_item(1.0)])
    assert not is_by_reference(request)
    identify(request, cache)
    assert is_by_reference(request)
    assert arena.stats().leased_entries == 1
    del request
    assert arena.stats().leased_entries == 0


def test_an_item_without_data_is_refused(cache: ArenaProcessorCache) -> None:
    with pytest.raises(VLLMValidationError, match="without data"):
        identify(make_request(items=[None]), cache)


def test_a_reference_from_outside_is_refused(cache: ArenaProcessorCache) -> None:
    theirs = MultiModalKwargsItem(dict(cache.store(make_item(1.0))))
    with pytest.raises(VLLMValidationError, match="not references"):
        identify(make_request(items=[theirs]), cache)


def test_a_request_without_items_is_left_alone(cache: ArenaProcessorCache) -> None:
    request = make_request()
    identify(request, cache)
    assert request.mm_features is None
    assert is_by_reference(request)
    assert with_tensors(request, None).mm_features == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_tensors_come_back_bit_for_bit(
    cache: ArenaProcessorCache, arena: Arena, dtype: torch.dtype
) -> None:
    pixels = (torch.rand(30, 60) * 200).to(dtype)
    request = make_request(items=[make_item(pixels)])
    identify(request, cache)
    (sent,) = with_tensors(request, arena).mm_features or ()
    assert sent.data is not None and not is_packed(sent.data)
    assert sent.data["pixel_values"].data.dtype == dtype
    assert torch.equal(sent.data["pixel_values"].data, pixels)
    assert sent.data.keys() == make_item().keys()


def test_the_original_still_refers_and_nothing_is_copied(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    request = make_request(items=[make_item(1.0)])
    identify(request, cache)
    one, other = (with_tensors(request, arena).mm_features or () for _ in range(2))
    assert is_by_reference(request)
    assert one[0].data is not None and other[0].data is not None
    addresses = {f.data["pixel_values"].data.data_ptr() for f in (one[0], other[0]) if f.data}
    assert len(addresses) == 1
    assert (one[0].identifier, one[0].mm_position) == (
        identifiers(request)[0],
        (request.mm_features or ())[0].mm_position,
    )

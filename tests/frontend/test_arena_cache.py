"""The processor cache: what is written once, found again, held, and let go."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from frontend.arena_cache import HOLD_SECONDS, ArenaProcessorCache, IdentifiedItem
from tests.fakes import HASHER, make_item
from transfer import pack
from transfer.arena import Arena
from transfer.payload import encode_payload

ITEM_BYTES = 4096
"""What ``make_item`` takes in an arena: its pixels have 3200 bytes."""

UPDATES: Any = ("a prompt update",)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena(16 * ITEM_BYTES, populate=False) as arena:
        yield arena


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(arena: Arena, clock: Clock) -> ArenaProcessorCache:
    return ArenaProcessorCache(arena, HASHER, "model", clock)


def miss(
    cache: ArenaProcessorCache,
    mm_hash: str,
    item: MultiModalKwargsItem,
    updates: Sequence[Any] = UPDATES,
) -> IdentifiedItem:
    stored, returned = cache.get_and_update_item((item, updates), mm_hash)
    assert returned == updates
    assert isinstance(stored, IdentifiedItem)
    return stored


def hit(cache: ArenaProcessorCache, mm_hash: str) -> IdentifiedItem:
    item, updates = cache.get_and_update_item(None, mm_hash)
    assert updates == UPDATES
    assert isinstance(item, IdentifiedItem)
    return item


def pixels_of(item: MultiModalKwargsItem, arena: Arena) -> torch.Tensor:
    reference = pack.read_reference(item)
    data = pack.resolve(item, arena.view(reference.entry), reference)["pixel_values"].data
    assert isinstance(data, torch.Tensor)
    return data


def small_item(number: int) -> MultiModalKwargsItem:
    tensor = torch.tensor([number])
    return MultiModalKwargsItem({"x": MultiModalFieldElem(tensor, MultiModalBatchedField())})


def fill(cache: ArenaProcessorCache, start: int = 1000, count: int = 16) -> None:
    """Put so much through the arena that nothing of before is left unless it is in use."""
    for number in range(start, start + count):
        miss(cache, f"filler-{number}", make_item(float(number)))


def test_a_miss_writes_the_tensors_once(cache: ArenaProcessorCache, arena: Arena) -> None:
    assert not cache.is_cached_item("h")
    item = make_item(3.0)
    stored = miss(cache, "h", item)
    assert torch.equal(pixels_of(stored, arena), item["pixel_values"].data)
    assert stored["pixel_values"].data is None
    assert torch.equal(stored["image_grid_thw"].data, item["image_grid_thw"].data)
    assert arena.stats().bytes_written == 3200


def test_a_hit_is_a_new_lease_on_the_same_entry(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    stored = miss(cache, "h", make_item(3.0))
    assert cache.is_cached_item("h")
    found = hit(cache, "h")
    assert found is not stored
    assert found.identity == stored.identity
    assert found.lease is not stored.lease
    assert found.lease is not None and stored.lease is not None
    assert found.lease.entry == stored.lease.entry
    assert dict(found) == dict(stored)
    assert arena.stats().bytes_written == 3200


def test_the_same_pixels_from_other_bytes_share_an_entry(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    png, jpeg = miss(cache, "png", make_item(3.0)), miss(cache, "jpeg", make_item(3.0))
    assert png.identity == jpeg.identity
    assert arena.stats().entries == 1
    assert arena.stats().bytes_written == 3200
    del png
    assert cache.is_cached_item("png")


def test_an_entry_lives_as_long_as_an_item_that_refers_to_it(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    stored = miss(cache, "h", make_item(3.0))
    fill(cache)
    assert cache.is_cached_item("h")
    assert torch.equal(pixels_of(stored, arena), torch.full((8, 100), 3.0))
    hit(cache, "h")
    assert arena.stats().leased_entries == 1
    del stored
    gc.collect()
    assert arena.stats().leased_entries == 0


def test_what_was_evicted_is_not_reported_as_cached(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    miss(cache, "h", make_item(3.0))
    fill(cache)
    assert arena.stats().evictions > 0
    assert not cache.is_cached_item("h")


def test_what_was_evicted_and_written_anew_under_another_hash_is_not_mixed_up(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    miss(cache, "png", make_item(3.0))
    fill(cache)
    again = miss(cache, "jpeg", make_item(3.0))
    # The entry that the first sight refers to has another generation.
    assert not cache.is_cached_item("png")
    assert torch.equal(pixels_of(again, arena), torch.full((8, 100), 3.0))


def test_what_was_reported_as_cached_stays_until_it_is_fetched(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    miss(cache, "h", make_item(3.0))
    assert cache.is_cached_item("h")
    fill(cache)
    found = hit(cache, "h")
    assert torch.equal(pixels_of(found, arena), torch.full((8, 100), 3.0))
    del found
    fill(cache, 2000)
    assert not cache.is_cached_item("h")


def test_two_requests_that_were_told_so_both_find_it(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    miss(cache, "h", make_item(3.0))
    assert cache.is_cached(["h", "h"]) == [True, True]
    hit(cache, "h")
    fill(cache)
    hit(cache, "h")
    assert arena.stats().leased_entries == 0


def test_nothing_is_held_for_ever_for_a_request_that_never_fetches(
    cache: ArenaProcessorCache, arena: Arena, clock: Clock
) -> None:
    miss(cache, "h", make_item(3.0))
    assert cache.is_cached_item("h")
    clock.now = HOLD_SECONDS - 1
    assert not cache.is_cached_item("other")
    assert arena.stats().leased_entries == 1
    clock.now = HOLD_SECONDS + 1
    assert not cache.is_cached_item("other")
    assert arena.stats().leased_entries == 0


def test_being_asked_again_extends_the_hold(
    cache: ArenaProcessorCache, arena: Arena, clock: Clock
) -> None:
    miss(cache, "h", make_item(3.0))
    cache.is_cached_item("h")
    clock.now = HOLD_SECONDS - 1
    cache.is_cached_item("h")
    clock.now = HOLD_SECONDS + 1
    cache.is_cached_item("other")
    assert arena.stats().leased_entries == 1


def test_an_item_lost_after_its_hold_is_the_clients_to_send_again(
    cache: ArenaProcessorCache, clock: Clock
) -> None:
    miss(cache, "h", make_item(3.0))
    assert cache.is_cached_item("h")
    clock.now = HOLD_SECONDS + 1
    cache.is_cached_item("other")
    fill(cache)
    with pytest.raises(VLLMValidationError, match="send it again"):
        cache.get_and_update_item(None, "h")


def test_an_item_never_seen_is_the_clients_to_send(cache: ArenaProcessorCache) -> None:
    with pytest.raises(VLLMValidationError, match="send it again"):
        cache.get_and_update_item(None, "never")


def test_a_full_arena_leaves_the_item_whole_and_counts_it(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    in_use = [miss(cache, f"h{number}", make_item(float(number))) for number in range(16)]
    assert arena.stats().leased_entries == 16
    item = make_item(99.0)
    whole = miss(cache, "whole", item)
    assert not pack.is_packed(whole)
    assert torch.equal(whole["pixel_values"].data, item["pixel_values"].data)
    assert len(whole.identity) == 32
    assert cache.inlined == 1
    # It is not kept: it would be memory that nobody counts.
    assert not cache.is_cached_item("whole")
    assert all(item.lease is not None for item in in_use)


def test_an_item_larger_than_the_arena_is_left_whole(cache: ArenaProcessorCache) -> None:
    assert not pack.is_packed(miss(cache, "h", make_item(torch.zeros(100, 1000))))
    assert cache.inlined == 1


def test_without_an_arena_items_are_left_whole() -> None:
    cache = ArenaProcessorCache(None, HASHER, "model")
    stored = miss(cache, "h", make_item(3.0))
    assert not pack.is_packed(stored)
    assert stored.lease is None
    assert not cache.is_cached_item("h")
    cache.clear_cache()
    cache.close()


def test_a_reference_from_outside_is_refused(cache: ArenaProcessorCache) -> None:
    mine = MultiModalKwargsItem(dict(miss(cache, "h", make_item(3.0))))
    with pytest.raises(VLLMValidationError, match="not references"):
        cache.get_and_update_item((mine, UPDATES), "theirs")
    with pytest.raises(VLLMValidationError, match="not references"):
        cache.validate_input_item(mine, "theirs")
    assert not cache.is_cached_item("theirs")


def test_an_item_of_this_cache_is_valid(cache: ArenaProcessorCache) -> None:
    cache.validate_input_item(miss(cache, "h", make_item(3.0)), "h")
    cache.validate_input_item(make_item(4.0), "h")


def test_an_item_with_a_field_without_data_is_the_clients_mistake(
    cache: ArenaProcessorCache,
) -> None:
    empty = MultiModalFieldElem(None, MultiModalBatchedField())  # type: ignore[arg-type]
    with pytest.raises(VLLMValidationError, match="without data"):
        cache.store(MultiModalKwargsItem({"pixel_values": empty}))


def test_items_that_came_processed_are_not_for_others_to_find(
    cache: ArenaProcessorCache,
) -> None:
    # Under a hash of the client's choice, which might be that of another picture.
    miss(cache, "chosen", make_item(3.0), updates=())
    assert not cache.is_cached_item("chosen")


def test_clearing_forgets_all_but_what_is_in_use(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    in_use = miss(cache, "a", make_item(1.0))
    miss(cache, "b", make_item(2.0))
    miss(cache, "c", make_item(3.0))
    assert cache.is_cached_item("c")
    cache.clear_cache()
    assert cache.is_cached(["a", "b", "c"]) == [False, False, False]
    assert arena.stats().entries == 1
    assert torch.equal(pixels_of(in_use, arena), torch.full((8, 100), 1.0))
    assert cache.make_stats() == (0, 0)


def test_statistics_count_all_and_what_is_new(cache: ArenaProcessorCache) -> None:
    miss(cache, "a", make_item(1.0))
    hit(cache, "a")
    assert cache.make_stats(delta=True) == (1, 2)
    assert cache.make_stats(delta=True) == (0, 0)
    hit(cache, "a")
    assert cache.make_stats(delta=True) == (1, 1)
    assert cache.make_stats() == (2, 3)


@pytest.mark.parametrize("with_arena", [True, False])
def test_the_map_stays_bounded(arena: Arena, with_arena: bool) -> None:
    cache = ArenaProcessorCache(arena if with_arena else None, HASHER, "model")
    for number in range(10_000):
        miss(cache, f"h{number}", small_item(number))
    assert len(cache._processed) <= 1024
    assert cache.is_cached_item("h9999")
    assert not cache.is_cached_item("h0")


def test_small_items_are_kept_without_the_arena(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    stored = miss(cache, "h", small_item(5))
    assert cache.is_cached_item("h")
    assert dict(hit(cache, "h")) == dict(stored) == dict(small_item(5))
    assert arena.stats().entries == 0


def test_the_model_is_part_of_the_identity(arena: Arena) -> None:
    one, other = (
        ArenaProcessorCache(arena, HASHER, model).store(make_item(1.0)).identity
        for model in ("one", "other")
    )
    assert one != other


def test_closing_removes_the_arena(cache: ArenaProcessorCache, arena: Arena) -> None:
    miss(cache, "h", make_item(1.0))
    cache.close()
    cache.close()
    assert not cache.is_cached_item("h")


def test_many_threads_at_once_end_with_one_entry_per_picture(
    cache: ArenaProcessorCache, arena: Arena
) -> None:
    problems: list[Exception] = []

    def work() -> None:
        try:
            for turn in range(60):
                number = turn % 4
                if cache.is_cached_item(f"h{number}"):
                    item = hit(cache, f"h{number}")
                else:
                    item = miss(cache, f"h{number}", make_item(float(number)))
                expected = torch.full((8, 100), float(number))
                assert torch.equal(pixels_of(item, arena), expected)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert arena.stats().entries == 4
    assert arena.stats().leased_entries == 0


def test_a_held_item_stays_until_the_hold_is_dropped(
    arena: Arena, cache: ArenaProcessorCache
) -> None:
    assert cache.hold("a") is None
    miss(cache, "a", make_item(1.0))
    held = cache.hold("a")
    assert held is not None
    arena.drop_unleased()
    assert arena.stats().entries == 1
    del held
    arena.drop_unleased()
    assert arena.stats().entries == 0
    assert cache.hold("a") is None


def test_an_item_made_elsewhere_is_found_and_is_no_hit_the_first_time(
    arena: Arena, cache: ArenaProcessorCache
) -> None:
    stored = cache.store(make_item(1.0))
    held = cache.add("a", bytes.fromhex(stored.identity), stored, stored.lease, UPDATES)
    assert cache.is_cached_item("a")
    assert hit(cache, "a").identity == stored.identity
    assert cache.make_stats().hits == 0
    assert hit(cache, "a").identity == stored.identity
    assert (cache.make_stats().hits, cache.make_stats().total) == (1, 2)
    del held


def test_an_image_seen_again_is_not_encoded_again(cache: ArenaProcessorCache) -> None:
    stored = miss(cache, "h", make_item(1.0))
    encode_payload(stored)
    again = hit(cache, "h")
    assert again.encoding.of(again.data) is not None
    assert again.encoding is stored.encoding
    assert again.data == stored.data


def test_the_encoding_goes_with_the_entry(cache: ArenaProcessorCache, arena: Arena) -> None:
    before = miss(cache, "h", make_item(1.0))
    old = bytes(encode_payload(before)[0])
    del before
    arena.drop_unleased()
    assert not cache.is_cached_item("h")
    after = miss(cache, "h", make_item(1.0))
    assert bytes(encode_payload(after)[0]) != old
    assert bytes(encode_payload(hit(cache, "h"))[0]) == bytes(encode_payload(after)[0])


def test_what_becomes_of_one_request_does_not_show_in_the_next(
    cache: ArenaProcessorCache,
) -> None:
    miss(cache, "h", make_item(1.0))
    one = hit(cache, "h")
    keys = list(one)
    one.pop(keys[0])
    assert list(hit(cache, "h")) == keys

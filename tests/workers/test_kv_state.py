"""What a worker publishes equals what its engine's events say is resident."""

from __future__ import annotations

import contextlib
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
)

from transfer.errors import BadMessage
from transfer.messages import RESUME_POINTS, KvDelta
from workers.kv_state import KvState

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def stored(
    *digests, block_size=32, medium="GPU", group=0, kind="full_attention", parent=None,
    window=None,
):
    return BlockStored(
        block_hashes=list(digests),
        parent_block_hash=parent,
        token_ids=list(range(block_size * len(digests))),
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[("an image", 3)] * len(digests),
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


def removed(*digests, medium="GPU", group=0):
    return BlockRemoved(block_hashes=list(digests), medium=medium, group_idx=group)


def batch(*events):
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))


def state_after(*events):
    state = KvState(32, "e1")
    state.apply(batch(*events))
    return state


def resident(state):
    return {medium: set(blocks) for medium, blocks in state.snapshot().blocks.items()}


def test_blocks_are_told_of_in_the_order_of_the_prompt():
    digests = [bytes([n]) * 32 for n in range(100)]
    state = KvState(32, "e1")
    delta = state.apply(batch(stored(*digests[:60]), stored(*digests[60:])))
    assert delta.stored == state.snapshot().blocks == {"GPU": digests}
    delta = state.apply(batch(*(removed(digest) for digest in reversed(digests))))
    assert delta.removed == {"GPU": digests[::-1]}


def test_stored_and_removed_blocks_become_numbered_deltas():
    state = KvState(32, "e1")
    first = state.apply(batch(stored(A)))
    second = state.apply(batch(removed(A), stored(B)))
    assert first == KvDelta(epoch="e1", seq=1, stored={"GPU": [A]}, at=1.0)
    assert second == KvDelta(
        epoch="e1", seq=2, stored={"GPU": [B]}, removed={"GPU": [A]}, at=1.0
    )
    assert state.snapshot().epoch == "e1"
    assert state.snapshot().seq == 2
    assert state.snapshot().blocks == {"GPU": [B]}


def test_a_block_stored_twice_survives_its_first_removal():
    state = state_after(stored(A), stored(A))
    assert state.apply(batch(removed(A))) is None
    assert resident(state) == {"GPU": {A}}
    assert state.apply(batch(removed(A))).removed == {"GPU": [A]}


def test_a_block_stored_and_removed_in_one_batch_is_not_mentioned():
    state = KvState(32, "e1")
    assert state.apply(batch(stored(A), removed(A))) is None
    assert state.apply(batch(stored(B))).seq == 1


def test_a_block_removed_and_stored_in_one_batch_is_not_mentioned():
    state = state_after(stored(A))
    assert state.apply(batch(removed(A), stored(A))) is None
    assert resident(state) == {"GPU": {A}}


def test_removing_an_unknown_block_changes_nothing():
    state = state_after(stored(A))
    assert state.apply(batch(removed(B), removed(C, group=5))) is None


def test_media_are_kept_apart_and_none_means_gpu():
    state = state_after(stored(A, medium=None), stored(A, medium="CPU"))
    assert resident(state) == {"GPU": {A}, "CPU": {A}}
    assert state.apply(batch(removed(A, medium="CPU"))).removed == {"CPU": [A]}
    assert resident(state) == {"GPU": {A}}


def test_a_cleared_engine_holds_nothing():
    state = state_after(stored(A), stored(A))
    delta = state.apply(batch(AllBlocksCleared()))
    assert (delta.cleared, delta.stored, delta.removed) == (True, {}, {})
    assert resident(state) == {}
    assert state.apply(batch(removed(A))) is None


def test_blocks_stored_after_a_clear_in_one_batch_remain():
    state = state_after(stored(A, B))
    delta = state.apply(batch(stored(C), AllBlocksCleared(), stored(A)))
    assert (delta.cleared, delta.stored, delta.removed) == (True, {"GPU": [A]}, {})
    assert resident(state) == {"GPU": {A}}


def test_clearing_an_empty_state_says_nothing():
    state = KvState(32, "e1")
    assert state.clear() is None
    assert state.apply(batch(AllBlocksCleared())) is None


def test_a_reset_need_not_wait_for_the_engine():
    state = state_after(stored(A))
    assert state.clear() == KvDelta(epoch="e1", seq=2, cleared=True)
    assert resident(state) == {}


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", None])
def test_prefix_groups_count(kind):
    assert resident(state_after(stored(A, kind=kind))) == {"GPU": {A}}


@pytest.mark.parametrize("kind", ["unknown", "of the future", "cross_attention"])
def test_with_a_group_that_cannot_be_counted_nothing_is_promised(kind, caplog):
    state = state_after(stored(A))
    delta = state.apply(batch(stored(A, group=1, kind=kind), stored(B, group=1, kind=kind)))
    assert delta.removed == {"GPU": [A]}
    assert state.apply(batch(stored(B))) is None
    assert resident(state) == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"no reuse of cached blocks will be promised: cache group 1 is {kind}"
    ]


WINDOWS = ["sliding_window", "sliding_window_mla"]


@pytest.mark.parametrize("kind", [*WINDOWS, "mamba", "chunked_local_attention"])
def test_a_single_group_counts_whatever_its_kind(kind, caplog):
    state = state_after(stored(A, B, kind=kind))
    assert resident(state) == {"GPU": {A, B}}
    assert not state.snapshot().to_resume_points
    [record] = caplog.records
    assert f"cache group 0 is {kind}: less may be promised" in record.getMessage()


def test_a_block_that_a_group_with_chunks_lacks_is_not_promised(caplog):
    kind = "chunked_local_attention"
    state = state_after(stored(A, B), stored(A, B, group=1, kind=kind))
    assert resident(state) == {"GPU": {A, B}}
    assert state.apply(batch(removed(A, group=1))).removed == {"GPU": [A]}
    state.apply(batch(stored(C, group=1, kind=kind)))
    assert resident(state) == {"GPU": {B}}
    [record] = caplog.records
    assert f"cache group 1 is {kind}: less may be promised" in record.getMessage()


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("full_first", [True, False])
def test_beside_full_attention_a_window_tells_where_to_go_on(kind, full_first, caplog):
    events = [stored(A, B, C), stored(B, C, group=1, kind=kind, window=65)]
    state = KvState(32, "e1")
    delta = state.apply(batch(*(events if full_first else reversed(events))))
    assert delta.to_resume_points
    assert {medium: set(blocks) for medium, blocks in delta.stored.items()} == {
        "GPU": {A, B, C}, RESUME_POINTS: {C},
    }
    assert state.snapshot().to_resume_points
    assert resident(state) == {"GPU": {A, B, C}, RESUME_POINTS: {C}}
    assert state.apply(batch(removed(B, group=1))).removed == {RESUME_POINTS: [C]}
    assert not caplog.records


@pytest.mark.parametrize(
    ("window", "points"), [(1, {B, C}), (33, {B, C}), (34, {C}), (66, set())]
)
def test_a_window_needs_the_blocks_that_it_reaches_into(window, points):
    seen = stored(B, C, group=1, kind="sliding_window", window=window)
    state = state_after(stored(A, B, C), seen)
    assert resident(state).get(RESUME_POINTS, set()) == points


def test_states_are_resume_points():
    state = state_after(stored(A, B, C), stored(B, group=1, kind="mamba"))
    assert resident(state) == {"GPU": {A, B, C}, RESUME_POINTS: {B}}


def test_a_resume_point_that_full_attention_has_lost_is_none():
    state = state_after(stored(A, B), stored(B, group=1, kind="mamba"))
    delta = state.apply(batch(removed(B)))
    assert delta.removed == {"GPU": [B], RESUME_POINTS: [B]}
    assert state.apply(batch(stored(B, parent=A))).stored == {"GPU": [B], RESUME_POINTS: [B]}


def test_a_window_that_appears_late_leaves_what_it_does_not_know_of_unpromised():
    state = state_after(stored(A))
    delta = state.apply(batch(stored(B, group=1, kind="mamba"), stored(B, parent=A)))
    assert delta.to_resume_points
    assert resident(state) == {"GPU": {A, B}, RESUME_POINTS: {B}}


def test_cleared_resume_points_are_gone():
    state = state_after(stored(A), stored(A, group=1, kind="mamba"))
    delta = state.apply(batch(AllBlocksCleared()))
    assert (delta.cleared, delta.stored, delta.removed) == (True, {}, {})
    assert resident(state) == {}
    state.apply(batch(stored(B), stored(B, group=1, kind="mamba")))
    assert resident(state) == {"GPU": {B}, RESUME_POINTS: {B}}


def test_an_engine_that_drops_its_last_match_is_promised_less():
    state = KvState(32, "e1", drops_last_match=True)
    state.apply(batch(stored(A, B), stored(B, group=1, kind="sliding_window", window=8)))
    assert resident(state) == {"GPU": {B}}
    assert not state.snapshot().to_resume_points


def test_a_block_is_held_only_when_all_prefix_groups_hold_it():
    state = state_after(stored(A, B), stored(A, group=1))
    assert resident(state) == {"GPU": {A}}
    assert state.apply(batch(stored(B, group=1))).stored == {"GPU": [B]}
    assert state.apply(batch(removed(A, group=0))).removed == {"GPU": [A]}


def test_a_prefix_group_that_appears_late_retracts_what_it_does_not_hold():
    state = state_after(stored(A, B))
    assert state.apply(batch(stored(A, group=1))).removed == {"GPU": [B]}


def test_with_blocks_of_another_size_nothing_is_promised(caplog):
    state = state_after(stored(A), stored(A, block_size=64, group=1), stored(B))
    assert resident(state) == {}
    [record] = caplog.records
    assert "has blocks of 64 tokens, and prompts are hashed by 32" in record.getMessage()


def test_integer_hashes_are_refused_with_the_remedy_and_change_nothing():
    state = state_after(stored(A))
    for event in (stored(7), removed(7)):
        with pytest.raises(BadMessage, match="VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"):
            state.apply(batch(removed(A), event))
    assert resident(state) == {"GPU": {A}}


def test_events_of_unknown_types_are_skipped_and_reported_once(caplog):
    unknown = [{"type": "BlockMoved", "block_hashes": [A]}, {"type": [1]}, 7]
    state = KvState(32, "e1")
    for _ in range(2):
        payload = msgspec.msgpack.encode(EventBatch(1.0, [*unknown, stored(A), removed(B)], 0))
        state.apply(payload)
    assert resident(state) == {"GPU": {A}}
    assert len(caplog.records) == 3


def test_a_malformed_event_of_a_known_type_is_refused_and_changes_nothing():
    state = state_after(stored(A))
    payload = msgspec.msgpack.encode(
        EventBatch(1.0, [removed(A), {"type": "BlockStored", "block_hashes": 3}])
    )
    with pytest.raises(BadMessage):
        state.apply(payload)
    assert resident(state) == {"GPU": {A}}


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_a_bad_message(payload):
    with contextlib.suppress(BadMessage):
        KvState(32, "e1").apply(payload)



def test_every_cut_off_batch_is_a_bad_message():
    payload = batch(stored(A, B), removed(A))
    for size in range(len(payload)):
        with pytest.raises(BadMessage):
            KvState(32, "e1").apply(payload[:size])


digest_lists = st.lists(st.sampled_from([A, B, C]), max_size=3)
media = st.sampled_from(["GPU", "CPU", None])
events = st.one_of(
    st.builds(lambda d, m: stored(*d, medium=m), digest_lists, media),
    st.builds(lambda d, m: removed(*d, medium=m), digest_lists, media),
    st.just(AllBlocksCleared()),
)


def replay(held, delta):
    """Apply a delta as a frontend does."""
    if delta.cleared:
        held.clear()
    for medium, digests in delta.removed.items():
        # Nothing is taken away that the frontend was not told of.
        assert set(digests) <= held[medium]
        held[medium] -= set(digests)
    for medium, digests in delta.stored.items():
        held.setdefault(medium, set())
        assert not set(digests) & held[medium]
        held[medium] |= set(digests)
    for medium in delta.stored.keys() & delta.removed.keys():
        assert not set(delta.stored[medium]) & set(delta.removed[medium])


@settings(deadline=None)
@given(st.lists(st.lists(events, max_size=5), max_size=10))
def test_deltas_lead_to_what_counting_copies_gives(batches):
    state, copies, held = KvState(32, "e1"), Counter(), {}
    seq = 0
    for happenings in batches:
        delta = state.apply(batch(*happenings))
        for event in happenings:
            if isinstance(event, AllBlocksCleared):
                copies.clear()
                continue
            for digest in event.block_hashes:
                key = (event.medium or "GPU", digest)
                if isinstance(event, BlockStored):
                    copies[key] += 1
                elif copies[key] > 0:
                    copies[key] -= 1
        before = {medium: set(digests) for medium, digests in held.items() if digests}
        if delta is not None:
            seq += 1
            assert delta.seq == seq
            replay(held, delta)
        expected = {}
        for (medium, digest), count in copies.items():
            if count:
                expected.setdefault(medium, set()).add(digest)
        assert {medium: blocks for medium, blocks in held.items() if blocks} == expected
        assert resident(state) == expected
        assert state.snapshot().seq == seq
        if delta is None:
            assert before == expected

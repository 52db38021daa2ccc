"""The mock's block pool beside vLLM's own: the same requests leave the same blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved
from vllm.v1.core.block_pool import BlockPool as VllmPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from workers.mock.block_pool import BlockPool

NUM_BLOCKS = 8


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("start"), st.integers(0, 3), st.integers(1, 5)),
            st.tuples(st.just("end"), st.integers(0, 7), st.just(0)),
        ),
        max_size=40,
    )
)
def test_the_same_blocks_are_found_and_evicted(actions: list[tuple[str, int, int]]) -> None:
    ours = BlockPool(NUM_BLOCKS)
    # One more, for vLLM keeps a block that stands for none.
    theirs = VllmPool(NUM_BLOCKS + 1, True, 16, enable_kv_cache_events=True)
    running = []
    for action, number, length in actions:
        if action == "end":
            if running:
                mine, other = running.pop(number % len(running))
                ours.release(mine)
                theirs.free_blocks(reversed(other))
            continue
        digests = [bytes([number, position]) * 16 for position in range(length)]
        found = ours.find(digests)
        hits = []
        for digest in digests:
            block = theirs.get_cached_block(BlockHash(digest), [0])
            if block is None:
                break
            hits += block
        assert len(hits) == len(found)
        missing = length - len(found)
        if missing > ours.num_unused - ours.count_unused(found):
            continue
        ours.use(found)
        theirs.touch(hits)
        assert ours.num_unused == theirs.get_num_free_blocks()
        new, other_new = ours.allocate(missing), theirs.get_new_blocks(missing)
        ours.cache(new, digests[len(found) :])
        for block, digest in zip(other_new, digests[len(found) :], strict=True):
            with_group = make_block_hash_with_group_id(BlockHash(digest), 0)
            theirs._insert_block_hash(with_group, block, num_tokens=16)
        running.append((found + new, hits + other_new))
        removed = [d for e in ours.take_events() if not e.stored for d in e.digests]
        told = [e for e in theirs.take_events() if isinstance(e, BlockRemoved)]
        assert [d for event in told for d in event.block_hashes] == [
            maybe_convert_block_hash(BlockHash(digest)) for digest in removed
        ]

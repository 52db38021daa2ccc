from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.mock.block_pool import BlockEvent, BlockPool, OutOfBlocks

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


def held(pool: BlockPool, digests: list[bytes]) -> list[int]:
    """Blocks that a request computes and others can find."""
    blocks = pool.allocate(len(digests))
    pool.cache(blocks, digests)
    return blocks


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError):
        BlockPool(0)


def test_only_leading_digests_are_found() -> None:
    pool = BlockPool(4)
    blocks = held(pool, [A, B, C])
    assert pool.find([A, B, D, C]) == blocks[:2]
    assert pool.leading([D, A]) == 0
    assert pool.leading([A, B, C]) == 3


def test_released_blocks_stay_until_their_space_is_needed() -> None:
    pool = BlockPool(3)
    pool.release(held(pool, [A, B]))
    assert pool.num_unused == 3
    assert pool.leading([A, B]) == 2
    pool.allocate(1)  # there is a block that holds nothing
    assert pool.leading([A, B]) == 2
    pool.allocate(1)
    assert pool.leading([A, B]) == 1


def test_the_longest_unused_goes_first_and_of_one_request_its_last_block() -> None:
    pool = BlockPool(4)
    first, second = held(pool, [A, B]), held(pool, [C, D])
    pool.release(first)
    pool.release(second)
    pool.take_events()
    pool.allocate(4)
    assert pool.take_events() == [BlockEvent(False, [B, A, D, C])]


def test_blocks_in_use_are_never_evicted() -> None:
    pool = BlockPool(2)
    pool.release(held(pool, [A]))
    pool.use(pool.find([A]))
    assert pool.num_unused == 1
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.num_unused == 1
    pool.allocate(1)
    assert pool.leading([A]) == 1


def test_a_block_of_two_requests_is_unused_when_both_have_gone() -> None:
    pool = BlockPool(1)
    blocks = held(pool, [A])
    pool.use(pool.find([A]))
    pool.release(blocks)
    assert (pool.num_unused, pool.count_unused(blocks)) == (0, 0)
    pool.release(blocks)
    assert (pool.num_unused, pool.count_unused(blocks)) == (1, 1)


def test_a_digest_in_two_blocks_survives_the_eviction_of_one() -> None:
    pool = BlockPool(2)
    pool.release(held(pool, [A]))
    again = pool.allocate(1)
    pool.cache(again, [A])
    pool.allocate(1)
    assert pool.take_events() == [
        BlockEvent(True, [A]), BlockEvent(True, [A]), BlockEvent(False, [A])
    ]
    assert pool.find([A]) == again


def test_blocks_without_a_digest_are_used_up_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, *bare = pool.allocate(3)
    pool.cache([cached], [A])
    pool.release([cached, *bare])
    assert pool.allocate(2) == bare[::-1]
    assert pool.leading([A]) == 1


def test_a_reset_forgets_everything_unless_a_block_is_in_use() -> None:
    pool = BlockPool(2)
    blocks = held(pool, [A])
    assert not pool.reset()
    assert pool.leading([A]) == 1
    pool.release(blocks)
    assert pool.reset()
    assert pool.leading([A]) == 0
    assert pool.take_events() == []


class NaivePool:
    """The same rules in the plainest way: a list of unused blocks, searched."""

    def __init__(self, num_blocks: int) -> None:
        self.unused: list[tuple[int, bytes | None]] = [(n, None) for n in range(num_blocks)]
        self.digest_of: dict[int, bytes | None] = dict.fromkeys(range(num_blocks))
        self.users = dict.fromkeys(range(num_blocks), 0)

    def cached(self) -> list[bytes]:
        return sorted(digest for digest in self.digest_of.values() if digest is not None)

    def allocate(self, count: int) -> list[int]:
        blocks = [block for block, _ in self.unused[:count]]
        self.unused = self.unused[count:]
        for block in blocks:
            self.digest_of[block] = None
            self.users[block] = 1
        return blocks

    def use(self, blocks: list[int]) -> None:
        self.unused = [(block, digest) for block, digest in self.unused if block not in blocks]
        for block in blocks:
            self.users[block] += 1

    def release(self, blocks: list[int]) -> None:
        bare = []
        for block in blocks[::-1]:
            self.users[block] -= 1
            if self.users[block] == 0:
                if self.digest_of[block] is None:
                    bare.append((block, None))
                else:
                    self.unused.append((block, self.digest_of[block]))
        self.unused = bare + self.unused


# A request is a family, which its first blocks belong to, and a number of blocks.
prompts = st.tuples(st.integers(0, 3), st.integers(1, 5))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), prompts, st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 7), st.booleans()),
    ),
    max_size=60,
)


@given(steps)
def test_it_does_what_a_naive_pool_does(actions: list[tuple[str, object, bool]]) -> None:
    pool, naive = BlockPool(8), NaivePool(8)
    running: list[list[int]] = []
    announced: list[bytes] = []
    for action, what, flag in actions:
        if action == "start":
            assert isinstance(what, tuple)
            family, length = what
            digests = [bytes([family, position]) for position in range(length)]
            found = pool.find(digests)
            missing = length - len(found)
            if missing > pool.num_unused - pool.count_unused(found):
                continue
            pool.use(found)
            naive.use(found)
            new = pool.allocate(missing)
            assert new == naive.allocate(missing)
            if flag:  # its blocks are computed whole
                pool.cache(new, digests[len(found) :])
                naive.digest_of.update(zip(new, digests[len(found) :], strict=True))
            running.append(found + new)
        elif running:
            assert isinstance(what, int)
            blocks = running.pop(what % len(running))
            pool.release(blocks)
            naive.release(blocks)
        assert pool.num_unused == len(naive.unused)
        for event in pool.take_events():
            for digest in event.digests:
                if event.stored:
                    announced.append(digest)
                else:
                    announced.remove(digest)
        assert sorted(announced) == naive.cached()
        for digest in set(announced):
            assert naive.digest_of[pool.find([digest])[0]] == digest

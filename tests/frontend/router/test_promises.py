"""Promises count until they expire, and leave nothing behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.router.promises import Promises

A, B, C, D = b"a", b"b", b"c", b"d"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_promised_prefix_counts_for_its_worker_only():
    promises = Promises(2.0, Clock())
    promises.add("w", [A, B, C])
    assert promises.leading("w", [A, B, D], 0) == 2
    assert promises.leading("v", [A, B, D], 0) == 0


def test_counting_starts_behind_what_is_confirmed():
    promises = Promises(2.0, Clock())
    promises.add("w", [B, C])
    assert promises.leading("w", [A, B, C], 0) == 0
    assert promises.leading("w", [A, B, C], 1) == 2
    assert promises.leading("w", [A, B, C], 3) == 0


def test_a_promise_expires():
    clock = Clock()
    promises = Promises(2.0, clock)
    promises.add("w", [A])
    clock.now += 1.9
    assert promises.leading("w", [A], 0) == 1
    clock.now += 0.1
    assert promises.leading("w", [A], 0) == 0
    assert len(promises) == 0


def test_a_promise_made_again_lasts_from_then_on():
    clock = Clock()
    promises = Promises(2.0, clock)
    promises.add("w", [A, B])
    clock.now += 1.5
    promises.add("w", [A])
    clock.now += 1.0
    assert promises.leading("w", [A, B], 0) == 1


def test_beyond_the_bound_the_oldest_promises_go():
    promises = Promises(2.0, Clock(), max_blocks=3)
    promises.add("w", [A, B])
    promises.add("w", [C, D])
    assert promises.leading("w", [A], 0) == 0
    assert promises.leading("w", [C, D], 0) == 2
    assert len(promises) == 2


def test_a_dropped_worker_comes_back_without_its_promises():
    clock = Clock()
    promises = Promises(2.0, clock)
    promises.add("w", [A, B])
    promises.drop_worker("w")
    assert promises.leading("w", [A], 0) == 0
    clock.now += 1.0
    promises.add("w", [A])
    clock.now += 1.5
    assert promises.leading("w", [A, B], 0) == 1


def test_promises_of_no_duration_are_not_made():
    promises = Promises(0.0, Clock())
    promises.add("w", [A])
    assert promises.leading("w", [A], 0) == 0


steps = st.tuples(
    st.sampled_from("wv"), st.lists(st.sampled_from([A, B, C, D])), st.floats(0, 1.5)
)


@settings(deadline=None)
@given(st.lists(steps, max_size=30))
def test_promises_equal_a_plain_list_of_them(made):
    clock, plain = Clock(), []
    promises = Promises(2.0, clock)
    for worker, digests, pause in made:
        promises.add(worker, digests)
        plain += [(worker, digest, clock.now + 2.0) for digest in digests]
        clock.now += pause
        for worker in "wv":
            for digest in (A, B, C, D):
                expected = any(
                    w == worker and d == digest and e > clock.now for w, d, e in plain
                )
                assert promises.leading(worker, [digest], 0) == expected
    clock.now += 2.0
    assert len(promises) == 0
    assert not promises._queue
    assert not promises._expiry
    assert promises._queued_blocks == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("wvu"), st.integers(0, 2), st.integers(0, 40))),
    st.lists(st.integers(0, 45), min_size=3, max_size=3),
)
def test_prompts_that_begin_alike_are_counted_for_each_worker(made, starts):
    # Three prompts that part after 10 blocks.
    prompts = [[b"s%d" % n for n in range(10)] + [b"%d-%d" % (p, n) for n in range(30)]
               for p in range(3)]
    promises = Promises(2.0, Clock())
    held = {worker: set() for worker in "wvu"}
    for worker, number, length in made:
        promises.add(worker, prompts[number][:length])
        held[worker].update(prompts[number][:length])
    for asked in prompts:
        expected = {}
        for worker, start in zip("wvu", starts, strict=True):
            end = start
            while end < len(asked) and asked[end] in held[worker]:
                end += 1
            if end > start:
                expected[worker] = end - start
        assert promises.all_leading(asked, dict(zip("wvu", starts, strict=True))) == expected

"""The index agrees with a plain set per worker and medium, and keeps nothing behind."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.router.kv_index import KvIndex
from transfer.messages import RESUME_POINTS

A, B, C, D = b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 32
DIGESTS = [bytes([n]) * 4 for n in range(6)]
WORKERS = ["w0", "w1", "w2", "w3"]
SHARED = [b"s%d" % n for n in range(100)]
PROMPTS = [[*SHARED, *(b"%s%d" % (name, n) for n in range(100))] for name in (b"a", b"b")]
"""Longer than what is kept together."""


def test_overlap_counts_leading_blocks_only():
    index = KvIndex()
    index.store("all", [A, B, C])
    index.store("hole", [A, C])
    index.store("tail", [B, C])
    assert index.overlap([A, B, C]) == {"all": 3, "hole": 1, "tail": 0}


def test_overlap_goes_no_further_than_the_prompt():
    index = KvIndex()
    index.store("w", [A, B, C])
    assert index.overlap([A, B]) == {"w": 2}
    assert index.overlap([]) == {"w": 0}


def test_an_unknown_block_ends_the_overlap_of_all():
    index = KvIndex()
    index.store("w", [A, C])
    index.store("v", [A])
    assert index.overlap([A, D, C]) == {"w": 1, "v": 1}


@pytest.mark.parametrize(("medium", "overlap"), [(None, 1), ("GPU", 1), ("CPU", 0)])
def test_only_blocks_that_need_no_loading_are_overlap(medium, overlap):
    index = KvIndex()
    index.store("w", [A], medium)
    assert index.overlap([A]) == {"w": overlap}
    assert index.resident("w") == {A}


def test_an_engine_that_goes_on_at_points_is_counted_up_to_the_last_of_them():
    index = KvIndex()
    for worker, points in (("none", []), ("one", [B]), ("two", [B, D]), ("beyond", [D])):
        index.store(worker, [A, B, C, D] if worker != "beyond" else [A, B, C])
        index.store(worker, points, RESUME_POINTS)
        index.go_on_at_points(worker, True)
    index.store("plain", [A, B, C])
    index.store("plain", [A], RESUME_POINTS)
    assert index.overlap([A, B, C, D]) == {
        "none": 0, "one": 2, "two": 4, "beyond": 0, "plain": 3,
    }
    assert index.overlap([A, B, C])["two"] == 2
    assert index.overlap([]) == dict.fromkeys(["none", "one", "two", "beyond", "plain"], 0)
    index.remove("one", [B], RESUME_POINTS)
    assert index.overlap([A, B, C])["one"] == 0


def test_a_worker_that_comes_anew_is_asked_anew_where_it_goes_on():
    index = KvIndex()
    index.store("w", [A])
    index.go_on_at_points("w", True)
    index.drop_worker("w")
    index.store("w", [A])
    assert index.overlap([A]) == {"w": 1}
    index.go_on_at_points("unknown", True)
    assert index.overlap([A]) == {"w": 1}


def test_a_block_leaves_one_medium_and_stays_in_the_other():
    index = KvIndex()
    index.store("w", [A], "GPU")
    index.store("w", [A], "CPU")
    index.remove("w", [A], "CPU")
    assert index.overlap([A]) == {"w": 1}
    index.remove("w", [A], "GPU")
    assert index.overlap([A]) == {"w": 0}
    assert len(index) == 0


def test_a_new_worker_in_the_place_of_a_dropped_one_holds_nothing():
    index = KvIndex()
    index.store("old", [A])
    index.drop_worker("old")
    index.store("new", [B])
    assert index.overlap([A]) == {"new": 0}
    assert index.overlap([B]) == {"new": 1}


def test_a_lost_worker_counts_no_more_before_it_is_swept():
    index = KvIndex()
    index.store("w", [A, B])
    index.store("v", [A])
    index.drop_worker("w")
    assert index.unswept
    assert index.overlap([A, B]) == {"v": 1}
    assert index.resident("w") == set()


def test_a_worker_that_comes_back_before_it_is_swept_holds_only_what_it_says():
    index = KvIndex()
    index.store("w", [A, B])
    index.clear("w")
    index.store("w", [B])
    assert index.overlap([A, B]) == {"w": 0}
    assert index.overlap([B, A]) == {"w": 1}
    index.sweep(1_000)
    assert index.resident("w") == {B}
    assert len(index) == 1


def test_a_sweep_takes_no_more_than_its_slice():
    index = KvIndex()
    index.store("w", [n.to_bytes(4, "big") for n in range(25_600)])
    index.drop_worker("w")
    for swept in range(1, 11):
        assert index.sweep(1_000)
        # A shard has 100 blocks.
        assert len(index) == 25_600 - swept * 1_000
    while index.sweep(1_000):
        pass
    assert len(index) == 0


def test_blocks_stored_during_a_sweep_stay():
    index = KvIndex()
    digests = [n.to_bytes(4, "big") for n in range(2_560)]
    index.store("old", digests)
    index.drop_worker("old")
    for position in range(0, 2_560, 100):
        index.sweep(50)
        index.store("new", digests[position : position + 100])
    while index.sweep(50):
        pass
    assert index.overlap(digests) == {"new": 2_560}


def test_worker_places_are_used_again():
    index = KvIndex()
    for n in range(1000):
        index.store(f"w{n}", [A, B])
        index.drop_worker(f"w{n}")
        index.sweep(1_000)
    index.store("last", [A])
    # With a place per worker ever seen, its bit would be the thousandth.
    assert index._bits["last"] == 1


def test_without_a_sweep_lost_workers_still_do_not_add_up():
    index = KvIndex()
    for n in range(1000):
        index.store(f"w{n}", [A, B])
        index.drop_worker(f"w{n}")
    assert max(index._slots, len(index._retired)) <= 66


def test_a_million_blocks_come_and_go_and_leave_nothing():
    index = KvIndex()
    digests = [n.to_bytes(8, "big") * 2 for n in range(50_000)]
    tracemalloc.start()
    try:
        index.store("w0", digests[:1])
        before = tracemalloc.get_traced_memory()[0]
        for n in range(10):
            index.store("w1", digests)
            index.store("w2", digests)
            index.remove("w1", digests)
            if n % 2:
                index.remove("w2", digests)
            else:
                index.drop_worker("w2")
                while index.sweep(10_000):
                    pass
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(index) == 1
    assert left < 100_000  # bytes: dictionaries without entries


def test_removing_what_is_not_held_changes_nothing():
    index = KvIndex()
    index.store("w", [A])
    index.remove("w", [B])
    index.remove("w", [A], "CPU")
    index.remove("stranger", [A])
    assert index.overlap([A]) == {"w": 1}
    assert len(index) == 1


def test_a_snapshot_replaces_all_media():
    index = KvIndex()
    index.store("w", [A], "GPU")
    index.store("w", [B], "CPU")
    index.replace("w", {"GPU": [C]})
    assert index.resident("w") == {C}
    index.sweep(1_000)
    assert len(index) == 1


@st.composite
def parts_of_prompts(draw):
    """A piece of a prompt whose beginning others share, rarely out of order."""
    start = draw(st.integers(0, 150))
    blocks = draw(st.sampled_from(PROMPTS))[start : start + draw(st.integers(0, 150))]
    return draw(st.sampled_from([blocks, blocks, blocks[::-1], [*blocks, *blocks[:3]]]))


long_verbs = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(WORKERS), parts_of_prompts()),
    st.tuples(st.just("remove"), st.sampled_from(WORKERS), parts_of_prompts()),
    st.tuples(st.sampled_from(["clear", "drop_worker"]), st.sampled_from(WORKERS)),
    st.tuples(st.just("sweep"), st.integers(1, 200)),
)


verbs = st.one_of(
    st.tuples(
        st.sampled_from(["store", "remove"]),
        st.sampled_from(WORKERS),
        st.lists(st.sampled_from(DIGESTS)),
        st.sampled_from(["GPU", "CPU", None]),
    ),
    st.tuples(st.sampled_from(["clear", "drop_worker"]), st.sampled_from(WORKERS)),
    st.tuples(st.just("sweep"), st.integers(1, 3)),
    st.tuples(
        st.just("replace"),
        st.sampled_from(WORKERS),
        st.dictionaries(st.sampled_from(["GPU", "CPU"]), st.lists(st.sampled_from(DIGESTS))),
    ),
)


class PlainIndex:
    """What the index must be equal to: one set per worker and medium."""

    def __init__(self):
        self.held = {}

    def do(self, verb, worker, *args):
        if verb == "sweep":
            return
        if verb in ("store", "remove") and len(args) == 1:
            args = (*args, "GPU")
        if verb == "drop_worker":
            self.held.pop(worker, None)
        elif verb == "replace":
            self.held[worker] = defaultdict(set)
            for medium, digests in args[0].items():
                self.held[worker][medium] = set(digests)
        elif verb == "store":
            self.held.setdefault(worker, defaultdict(set))[args[1] or "GPU"].update(args[0])
        elif worker in self.held:
            if verb == "clear":
                self.held[worker].clear()
            else:
                self.held[worker][args[1] or "GPU"].difference_update(args[0])

    def overlap(self, digests):
        overlaps = {}
        for worker, media in self.held.items():
            count = 0
            while count < len(digests) and digests[count] in media["GPU"]:
                count += 1
            overlaps[worker] = count
        return overlaps

    def resident(self, worker):
        return set().union(*self.held.get(worker, {}).values())

    def __len__(self):
        media = {medium for held in self.held.values() for medium in held}
        return sum(
            len(set().union(*(held[medium] for held in self.held.values())))
            for medium in media
        )


@settings(deadline=None)
@given(st.lists(verbs, max_size=40), st.lists(st.sampled_from(DIGESTS), max_size=6))
def test_the_index_equals_a_plain_model_after_any_events(events, prompt):
    index, plain = KvIndex(), PlainIndex()
    for verb, *args in events:
        getattr(index, verb)(*args)
        plain.do(verb, *args)
        # After each: what a look-up has found is kept until it changes.
        assert index.overlap(prompt) == plain.overlap(prompt)
    assert {w: index.resident(w) for w in WORKERS} == {w: plain.resident(w) for w in WORKERS}
    index.sweep(1_000_000)
    assert not index.unswept
    assert len(index) == len(plain)
    for worker in WORKERS:
        index.drop_worker(worker)
    assert index.overlap(prompt) == {}
    index.sweep(1_000_000)
    assert len(index) == 0
    assert index.overlap(prompt) == {}


@settings(deadline=None)
@given(st.lists(long_verbs, max_size=30))
def test_the_index_equals_a_plain_model_when_prompts_come_in_parts(events):
    index, plain = KvIndex(), PlainIndex()
    for verb, *args in events:
        getattr(index, verb)(*args)
        plain.do(verb, *args)
        for prompt in (*PROMPTS, PROMPTS[0][3:], PROMPTS[1][:70]):
            assert index.overlap(prompt) == plain.overlap(prompt)
    assert {w: index.resident(w) for w in WORKERS} == {w: plain.resident(w) for w in WORKERS}
    index.sweep(1_000_000)
    assert len(index) == len(plain)

"""What the indexes are filled with is what it is said to be, in every process."""

from __future__ import annotations

from collections import Counter

from benchmarks.router.workload import CHAIN, DELTA, Workload


def test_each_block_is_held_by_as_many_workers_as_asked_for() -> None:
    workload = Workload(workers=8, blocks=2 * CHAIN, holders=3)
    holders: Counter[bytes] = Counter()
    for stored in workload.resident():
        assert len(stored.digests) <= DELTA
        holders.update(stored.digests)
    shared = set(workload.shared())
    assert {n for digest, n in holders.items() if digest not in shared} == {3}
    assert len(holders.keys() - shared) == 2 * CHAIN


def test_of_the_shared_prompt_each_worker_holds_what_is_said() -> None:
    workload = Workload(workers=8, blocks=0)
    held: Counter[int] = Counter()
    for stored in workload.resident():
        held[stored.worker] += len(stored.digests)
    assert [held[worker] for worker in range(8)] == workload.depths()
    assert max(workload.depths()) == CHAIN


def test_news_are_new_in_each_round_and_the_same_each_time() -> None:
    workload = Workload(workers=8, blocks=2 * CHAIN)
    first, second = workload.news(0, CHAIN), workload.news(1, CHAIN)
    assert first == Workload(workers=8, blocks=0).news(0, CHAIN)
    known = {d for stored in workload.resident() for d in stored.digests}
    blocks = [d for stored in first + second for d in stored.digests]
    assert len(set(blocks)) == len(blocks) == 2 * CHAIN
    assert not known & set(blocks)

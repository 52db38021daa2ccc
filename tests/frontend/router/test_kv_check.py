"""The checker sees every kind of difference, and compares only what is of one moment."""

from __future__ import annotations

from frontend.router.kv_check import KvDifference, compare
from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from transfer.messages import KvDelta, KvSnapshot

A, B, C = b"a", b"b", b"c"


def snapshot(seq=3, epoch="e1", **blocks):
    return KvSnapshot(epoch, seq, blocks)


def followed(**blocks):
    index = KvIndex()
    plane = KvPlane(index)
    plane.on_ready("w", "e1")
    plane.on_snapshot("w", snapshot(**blocks))
    return index, plane


def test_an_index_that_follows_is_equal():
    index, plane = followed(GPU=[A, B], CPU=[C])
    said = snapshot(CPU=[C], GPU=[B, A])
    assert compare(index, plane, "w", said) == KvDifference(held=3, missing=0, phantom=0)
    assert compare(index, plane, "w", said).equal


def test_a_block_too_few_and_two_too_many_are_told():
    index, plane = followed(GPU=[A, B], CPU=[B])
    difference = compare(index, plane, "w", snapshot(GPU=[A, C]))
    assert difference == KvDifference(held=2, missing=1, phantom=2)
    assert not difference.equal


def test_blocks_of_other_workers_are_not_looked_at():
    index, plane = followed(GPU=[A])
    index.store("v", [B, C])
    assert compare(index, plane, "w", snapshot(GPU=[A])).equal


def test_different_moments_are_not_compared():
    index, plane = followed(GPU=[A])
    assert compare(index, plane, "w", snapshot(seq=4, GPU=[A])) is None
    assert compare(index, plane, "w", snapshot(epoch="e2", GPU=[A])) is None
    plane.on_delta("w", KvDelta("e1", 7, {"GPU": [B]}))  # three are missing
    assert compare(index, plane, "w", snapshot(GPU=[A])) is None
    assert compare(index, plane, "stranger", snapshot()) is None

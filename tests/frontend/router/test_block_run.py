"""A run finds its blocks in a prompt and shares what neighbours have in common."""

from __future__ import annotations

import pytest

from frontend.router.block_run import GONE, BlockRun, Summary

A, B, C, D, X = b"a", b"b", b"c", b"d", b"x"


def make_run():
    run = BlockRun()
    run.digests, run.holders = [A, B, C, D], [1 << 300] * 4
    return run


@pytest.mark.parametrize(
    ("blocks", "position", "found"),
    [
        ([A, B, C, D], 0, (0, 4)),
        ([X, A, B, C, D, X], 1, (0, 4)),
        ([A, B], 0, (0, 2)),
        ([A, B, X, D], 0, (0, 2)),
        ([X, C, D, X], 1, (2, 2)),
        ([D, A], 0, (3, 1)),
        ([B, X], 0, (1, 1)),
    ],
)
def test_a_match_says_where_and_how_many(blocks, position, found):
    assert make_run().match(blocks, position) == found


def test_a_block_that_is_gone_ends_a_match():
    run = make_run()
    run.drop(2)
    assert run.digests == [A, B, GONE, D]
    assert run.match([A, B, C, D], 0) == (0, 2)


def test_equal_neighbours_share_their_holders():
    run = make_run()
    run.add(0, 3, 1 << 301)
    assert run.holders[0] is run.holders[2]
    assert run.holders == [3 << 300] * 3 + [1 << 300]
    run.set_holders(2, 1 << 300)
    assert run.holders[2] is run.holders[3]


def test_only_the_workers_named_keep_a_block():
    run = make_run()
    run.add(0, 1, 1)
    assert run.keep(A, 1)
    assert run.holders[0] == 1
    assert not run.keep(B, 1)
    assert run.digests[1] == GONE


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.add(1, 1, 2),
        lambda run: run.set_holders(1, 2),
        lambda run: run.drop(1),
        lambda run: run.keep(A, 2),
    ],
    ids=["add", "set", "drop", "keep"],
)
def test_a_change_ends_the_summary(change):
    run = make_run()
    run.summary = Summary(0, 1, 1, {})
    change(run)
    assert run.summary is None

"""Resume points counted block by block are those that looking at whole prompts gives."""

from __future__ import annotations

import random

import pytest

from workers.resume_points import ResumePoints

A, B, C, D, E = (bytes([letter]) * 4 for letter in b"abcde")


def points_of(needed: int, held: set[bytes]) -> ResumePoints:
    points = ResumePoints()
    points.add_group(1, needed, held)
    points.link(None, [A, B, C, D])
    return points


def among(points: ResumePoints, *digests: bytes) -> list[bytes]:
    return [digest for digest in digests if digest in points]


@pytest.mark.parametrize(
    ("needed", "held", "expected"),
    [
        (2, {A, B, C, D}, [A, B, C, D]),
        (2, {B, C, D}, [C, D]),
        (2, {C, D}, [D]),
        (2, {A, D}, [A]),
        (1, {C}, [C]),
        (3, set(), []),
    ],
)
def test_enough_blocks_in_a_row_or_all_from_the_first(needed, held, expected):
    assert among(points_of(needed, held), A, B, C, D) == expected


def test_a_block_that_comes_or_goes_counts_for_those_behind_it():
    held = {B, C}
    points = points_of(2, held)
    assert points.take_moved() == {C}
    held.add(D)
    points.changed(D)
    assert points.take_moved() == {D}
    held.remove(C)
    points.changed(C)
    assert points.take_moved() == {C, D}
    assert among(points, A, B, C, D) == []


def test_every_group_must_have_enough():
    points = points_of(1, {A, B, C, D})
    points.add_group(2, 2, {B, C})
    assert among(points, A, B, C, D) == [C]


def test_a_block_of_which_nothing_is_known_is_no_point():
    points = points_of(1, {A, E})
    assert E not in points
    points.link(D, [E])
    assert E in points
    points.unlink(E)
    assert E not in points


def test_without_a_group_that_forgets_there_are_no_points():
    points = ResumePoints()
    points.link(None, [A])
    assert A not in points
    assert points.take_moved() == set()


def test_cleared_points_are_told_of():
    held = {A}
    points = points_of(1, held)
    points.take_moved()
    held.clear()
    points.clear()
    assert points.take_moved() == {A}
    assert among(points, A, B, C, D) == []


@pytest.mark.parametrize("seed", range(20))
def test_counting_agrees_with_looking(seed):
    chance = random.Random(seed)
    points, needs = ResumePoints(), [chance.randrange(1, 5) for _ in range(2)]
    holds: list[set[bytes]] = [set(), set()]
    for number, needed in enumerate(needs):
        points.add_group(number, needed, holds[number])
    parents: dict[bytes, bytes | None] = {}
    for number in range(30):
        parents[bytes([number])] = chance.choice([None, *parents])
    linked: set[bytes] = set()

    def way_to(digest: bytes) -> list[bytes]:
        way, at = [], digest
        while at is not None:
            way.insert(0, at)
            at = parents[at]
        return way

    def is_point(digest: bytes) -> bool:
        way = way_to(digest)
        return all(
            all(each in hold and each in linked for each in way[-needed:])
            for hold, needed in zip(holds, needs, strict=True)
        )

    for _ in range(300):
        digest = chance.choice(list(parents))
        if chance.random() < 0.3:
            if digest in linked:
                linked.remove(digest)
                points.unlink(digest)
            else:
                linked.add(digest)
                points.link(parents[digest], [digest])
        else:
            hold = chance.choice(holds)
            hold.symmetric_difference_update({digest})
            points.changed(digest)
        assert {each for each in parents if each in points} == set(filter(is_point, parents))

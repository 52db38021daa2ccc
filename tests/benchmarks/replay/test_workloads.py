from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.replay.trace import TraceRequest, read_trace, write_trace
from benchmarks.replay.workloads import WORKLOADS, Popularity, arrivals, bursts, chats


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_the_same_seed_and_no_other(name: str) -> None:
    assert WORKLOADS[name](2, 1) == WORKLOADS[name](2, 1)
    assert WORKLOADS[name](2, 1) != WORKLOADS[name](2, 2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_can_be_written_and_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = WORKLOADS[name](2, 1)
    write_trace(path, trace)
    assert read_trace(path) == trace


def images(request: TraceRequest) -> list[str]:
    return [part.image for part in request.prompt if part.image is not None]


def test_popularity_follows_zipf() -> None:
    chance = random.Random(1)
    popularity = Popularity(100, exponent=1.0)
    drawn = Counter(popularity.draw(chance) for _ in range(20_000))
    assert set(drawn) <= set(range(100))
    assert drawn[0] / drawn[1] == pytest.approx(2, rel=0.1)
    assert drawn[0] / drawn[9] == pytest.approx(10, rel=0.2)


def test_arrivals_come_at_the_rate_asked_for() -> None:
    times = list(arrivals(random.Random(1), rate=50.0, count=5000))
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert times[-1] == pytest.approx(100.0, rel=0.1)


def test_few_photos_are_asked_about_by_many() -> None:
    asked = Counter(image for r in WORKLOADS["photos"](8, 1) for image in images(r))
    top = sum(count for _, count in asked.most_common(10))
    assert 0.3 < top / asked.total() < 0.7


def test_unique_pictures_are_unique() -> None:
    asked = Counter(image for r in WORKLOADS["unique"](4, 1) for image in images(r))
    assert set(asked.values()) == {1}


def test_a_conversation_shows_its_last_three_pictures_and_all_its_words() -> None:
    turns = [r for r in chats(8, 1) if r.id.startswith("chat-3-")]
    for earlier, later in pairwise(turns):
        assert later.after == earlier.id
        assert any(part.answer == earlier.id for part in later.prompt)
    assert all(len(images(turn)) <= 3 for turn in turns)
    words = [part for part in turns[-1].prompt if part.image is None]
    assert len(words) == 2 * len(turns)


def test_a_burst_asks_about_one_new_picture_in_half_a_second() -> None:
    burst = [r for r in bursts(8, 1) if r.id.startswith("burst-0-")]
    assert len(burst) == 16
    assert len({image for r in burst for image in images(r)}) == 1
    times = [r.at or 0.0 for r in burst]
    assert max(times) - min(times) <= 0.5
    assert times == sorted(times)

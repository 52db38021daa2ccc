"""What is asked is what the comparison says."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from benchmarks.serve.workloads import WORKLOADS, Chat, warm_up


def pictures_of(chat: Chat) -> list[list[str]]:
    """The pictures of each turn."""
    return [
        [
            part["image_url"]["url"]
            for message in turn
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        for turn in chat.turns
    ]


def test_unique_pictures_are_shown_once() -> None:
    shown = [p for chat in WORKLOADS["unique"](1, 1.0) for p in pictures_of(chat)[0]]
    assert len(shown) == len(set(shown)) == 40


def test_repeated_pictures_are_shown_four_times_in_random_order() -> None:
    shown = [p for chat in WORKLOADS["repeated"](1, 1.0) for p in pictures_of(chat)[0]]
    assert len(shown) == 80
    assert {shown.count(picture) for picture in shown} == {4}
    assert any(before != after for before, after in zip(shown, shown[4:], strict=False))


def test_a_chat_shows_one_picture_more_in_each_turn() -> None:
    chats = WORKLOADS["multi"](1, 0.2)
    assert len(chats) == 2
    for chat in chats:
        pictures = pictures_of(chat)
        assert [len(shown) for shown in pictures] == [1, 2, 3, 4]
        for before, after in pairwise(pictures):
            assert after[: len(before)] == before
    assert not set(pictures_of(chats[0])[-1]) & set(pictures_of(chats[1])[-1])


def test_text_has_no_pictures() -> None:
    assert all(pictures_of(chat) == [[]] for chat in WORKLOADS["text"](1, 1.0))


@pytest.mark.parametrize("name", WORKLOADS)
def test_all_systems_are_asked_the_same_and_rounds_are_not(name: str) -> None:
    first, again, other = (WORKLOADS[name](seed, 0.1) for seed in (1, 1, 20_000))
    assert first == again != other


def test_warming_up_uses_nothing_that_is_measured() -> None:
    warm = {json.dumps(chat.turns) for chat in warm_up(900_000)}
    measured = {
        json.dumps(chat.turns) for make in WORKLOADS.values() for chat in make(10_000, 0.2)
    }
    assert not warm & measured

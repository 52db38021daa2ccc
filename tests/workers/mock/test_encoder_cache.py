from __future__ import annotations

import pytest

from workers.mock.encoder_cache import EncoderCache


def test_an_output_stays_after_its_request_has_gone() -> None:
    cache = EncoderCache(100)
    cache.use("cat", 60, "r1")
    cache.release("cat", "r1")
    assert "cat" in cache


def test_the_output_goes_first_that_was_needed_longest_ago() -> None:
    cache = EncoderCache(100)
    for name in ("cat", "dog"):
        cache.use(name, 40, "r1")
    cache.release("dog", "r1")
    cache.release("cat", "r1")
    cache.use("owl", 50, "r2")
    assert "dog" not in cache
    assert "cat" in cache


def test_what_a_request_needs_leaves_no_room() -> None:
    cache = EncoderCache(100)
    cache.use("cat", 60, "r1")
    cache.use("cat", 60, "r2")
    cache.release("cat", "r1")
    assert not cache.has_room(50)
    with pytest.raises(ValueError):
        cache.use("dog", 50, "r3")
    cache.release("cat", "r2")
    assert cache.has_room(100)
    cache.use("dog", 50, "r3")
    assert "cat" not in cache


def test_a_release_of_what_is_not_needed_changes_nothing() -> None:
    cache = EncoderCache(100)
    cache.release("cat", "r1")
    cache.use("cat", 60, "r1")
    cache.release("cat", "r2")
    cache.release("cat", "r1")
    cache.release("cat", "r1")
    assert cache.has_room(100)
    assert not cache.has_room(101)


def test_an_output_that_is_needed_again_is_not_given_up() -> None:
    cache = EncoderCache(100)
    cache.use("cat", 60, "r1")
    cache.release("cat", "r1")
    cache.use("cat", 60, "r2")
    assert not cache.has_room(50)


def test_a_reset_keeps_what_is_needed() -> None:
    cache = EncoderCache(100)
    cache.use("cat", 60, "r1")
    cache.use("dog", 20, "r2")
    cache.release("dog", "r2")
    cache.reset()
    assert "cat" in cache
    assert "dog" not in cache
    assert cache.has_room(40)
    assert not cache.has_room(41)

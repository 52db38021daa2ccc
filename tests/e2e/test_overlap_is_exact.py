"""The overlap that a frontend routes by is what the engine then takes from its cache."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.cases import (
    CHAT,
    COMPLETIONS,
    Part,
    chat_body,
    completion_body,
    says,
    shown,
    user,
)
from tests.e2e.fleet import BLOCK_SIZE, Frontend
from tests.e2e.pictures import pattern
from tests.e2e.reuse import Reuse, ask_and_settle

SMALL = {"mm_processor_kwargs": {"min_pixels": 3136, "max_pixels": 12544}}


def ask(frontend: Frontend, *parts: Part, **options: Any) -> Reuse:
    """Ask one question, and make sure that the frontend foresaw the engine's reuse."""
    return ask_body(frontend, chat_body(user(*parts), **options))


def ask_body(frontend: Frontend, body: dict[str, Any], path: str = CHAT) -> Reuse:
    reuse = ask_and_settle(frontend, body, path)
    assert reuse.overlap_tokens == reuse.cached_tokens
    return reuse


def fresh(number: int) -> dict[str, Any]:
    """A picture that no other test shows; about 80 tokens."""
    return shown(pattern(280, 224, 1000 + number))


@pytest.fixture(scope="module", autouse=True)
def _quiet_fleet(frontend: Frontend) -> None:
    frontend.settle()


def test_a_repeated_picture_is_reused_whole_where_it_was_computed(frontend: Frontend) -> None:
    first = ask(frontend, fresh(1), "What is it?")
    for _ in range(3):
        again = ask(frontend, fresh(1), "What is it?")
        assert again.worker == first.worker
        assert again.cached_tokens == again.reusable_tokens > 0


def test_another_question_about_a_picture_reuses_the_picture(frontend: Frontend) -> None:
    first = ask(frontend, fresh(2), "What is it? " * 5)
    other = ask(frontend, fresh(2), "Who has made it? " * 5)
    assert other.worker == first.worker
    assert 64 <= other.cached_tokens < other.reusable_tokens


def test_the_same_text_with_another_picture_shares_only_what_comes_before(
    frontend: Frontend,
) -> None:
    text = "Look at this very carefully, it is rather small. "
    ask(frontend, text, fresh(3), "What is it?")
    other = ask(frontend, text, fresh(4), "What is it?")
    assert 0 < other.cached_tokens <= 128


def test_of_several_pictures_the_leading_ones_are_reused(frontend: Frontend) -> None:
    first = ask(frontend, fresh(5), "and", fresh(6), "and", fresh(7), "?")
    other = ask(frontend, fresh(5), "and", fresh(6), "and", fresh(8), "?")
    swapped = ask(frontend, fresh(6), "and", fresh(5), "and", fresh(7), "?")
    assert other.worker == first.worker
    assert 128 <= other.cached_tokens < other.reusable_tokens
    assert swapped.cached_tokens < 64


@pytest.mark.parametrize("form", ["WEBP", "BMP"])
def test_a_picture_saved_otherwise_without_loss_is_the_same_picture(
    frontend: Frontend, form: str
) -> None:
    picture = pattern(252, 252, 2000 + len(form))
    options = {"lossless": True} if form == "WEBP" else {}
    first = ask(frontend, shown(picture), "What is it?")
    again = ask(frontend, shown(picture, form, **options), "What is it?")
    assert again.worker == first.worker
    assert again.cached_tokens == again.reusable_tokens > 0


def test_a_picture_saved_with_loss_is_another_picture(frontend: Frontend) -> None:
    picture = pattern(252, 252, 2100)
    ask(frontend, shown(picture), "What is it?")
    assert ask(frontend, shown(picture, "JPEG"), "What is it?").cached_tokens < 64


def test_a_cache_salt_keeps_its_requests_to_themselves(frontend: Frontend) -> None:
    ask(frontend, fresh(9), "What is it?")
    salted = ask(frontend, fresh(9), "What is it?", cache_salt="mine")
    assert salted.cached_tokens == 0
    again = ask(frontend, fresh(9), "What is it?", cache_salt="mine")
    assert again.cached_tokens == again.reusable_tokens > 0
    assert ask(frontend, fresh(9), "What is it?", cache_salt="yours").cached_tokens == 0


def test_a_picture_processed_with_other_options_is_another_picture(
    frontend: Frontend,
) -> None:
    ask(frontend, fresh(10), "What is it?")
    assert ask(frontend, fresh(10), "What is it?", **SMALL).cached_tokens < 64
    again = ask(frontend, fresh(10), "What is it?", **SMALL)
    assert again.cached_tokens == again.reusable_tokens


def test_options_that_change_nothing_leave_a_picture_what_it_is(frontend: Frontend) -> None:
    first = ask(frontend, fresh(11), "What is it?")
    again = ask(
        frontend, fresh(11), "What is it?",
        mm_processor_kwargs={"min_pixels": 3136, "max_pixels": 1003520},
    )
    assert again.worker == first.worker
    assert again.cached_tokens == again.reusable_tokens


def test_every_turn_of_a_conversation_reuses_the_turns_before(frontend: Frontend) -> None:
    messages = [says("system", "You are a patient teacher of the old languages. " * 3)]
    known, worker = 0, None
    for turn in range(4):
        messages.append(says("user", f"Question {turn}: what is the word for number {turn}?"))
        reuse = ask_body(frontend, chat_body(*messages))
        if worker is not None:
            assert reuse.worker == worker
            assert reuse.cached_tokens == known
        known, worker = reuse.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, reuse.worker
        messages.append(says("assistant", f"It is {turn}, which you could have known. " * 2))


def test_completions_are_routed_by_overlap_too(frontend: Frontend) -> None:
    body = completion_body("It was a dark and stormy night; the rain fell in torrents. " * 3)
    first = ask_body(frontend, body, COMPLETIONS)
    again = ask_body(frontend, body, COMPLETIONS)
    assert again.worker == first.worker
    assert again.cached_tokens == again.reusable_tokens > 0


def test_a_random_mix_is_foreseen_exactly(frontend: Frontend) -> None:
    chance = random.Random(20)
    pictures = [shown(pattern(*size, 3000)) for size in ((84, 84), (300, 200), (640, 480))]
    pictures += [shown(pattern(420, 420, 3000 + n), "JPEG") for n in range(4)]
    openings = ["", "Be honest. ", "Consider the following with great care. " * 6]
    questions = ["What?", "How many are there of them, and why? ", "Tell me more. " * 12]
    reused = 0
    for _ in range(40):
        shown_ones = chance.choices(pictures, k=chance.randint(0, 3))
        reuse = ask(
            frontend, chance.choice(openings), *shown_ones, chance.choice(questions)
        )
        reused += reuse.cached_tokens > 0
    assert reused > 10

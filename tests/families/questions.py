"""What each family is asked, about every kind of media it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.e2e.cases import chat_body, shown, user
from tests.e2e.pictures import pattern
from tests.families.media import filmed, heard
from tests.families.table import Family

TEXT, MIXED = "text", "mixed"
"""Columns of the matrix beside a family's modalities."""

SENTENCE = "Look closely, listen well and tell all that there is to be told of it. "


SEEDS = {"shm": 0, "nixl": 100, "inline": 200}
"""What media are made from, by way of transfer: each has media that were never sent."""


@dataclass(frozen=True)
class Question:
    key: str
    body: dict[str, Any]


def media(modality: str, seed: int) -> dict[str, Any]:
    """The part of a message that has new media; the same for the same seed."""
    if modality == "image":
        return shown(pattern(200, 120, seed))
    if modality == "video":
        return filmed(12, seed)
    return heard(1.5, seed)


def columns(family: Family) -> tuple[str, ...]:
    """What a family is asked about."""
    mixed = (MIXED,) if len(family.modalities) > 1 else ()
    return (TEXT, *family.modalities, *mixed)


def questions(family: Family, column: str, transfer: str) -> list[Question]:
    """Questions of one column; none begins like another."""
    seed = SEEDS[transfer]

    def ask(name: str, *parts: Any) -> Question:
        key = f"{transfer}: {column}, {name}"
        return Question(key, _body(user(f"{key}. ", *parts, SENTENCE)))

    if column == TEXT:
        return [ask("long", SENTENCE * 3)]
    if column == MIXED:
        every = [media(modality, seed + 5) for modality in family.modalities]
        return [
            ask("one of each", *every),
            ask("one of each the other way round", *reversed(every), "and", every[0]),
        ]
    one, other = media(column, seed), media(column, seed + 1)
    return [
        ask("one", SENTENCE, one),
        ask("two", one, "and", other),
        ask("the same twice", other, "or", other),
    ]


def twins(column: str) -> tuple[Question, Question]:
    """The same question about different media: their answers must not be the same."""
    one, other = (
        Question(
            f"twin: {column} {seed}", _body(user("Twins. ", media(column, seed), SENTENCE))
        )
        for seed in (900, 901)
    )
    return one, other


def all_questions(family: Family) -> list[Question]:
    asked = [q for c in columns(family) for t in SEEDS for q in questions(family, c, t)]
    return asked + [q for modality in family.modalities for q in twins(modality)]


def _body(message: dict[str, Any]) -> dict[str, Any]:
    return chat_body(message, max_tokens=6, ignore_eos=True)

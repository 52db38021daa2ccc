"""What is asked: chats of one or more turns, made before anything is timed.

Assistants' turns are given, not taken from the answers: every system is asked the same.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.prompts import jpeg

WIDTH, HEIGHT = 1024, 768
CLIENTS = 4
"""Chats that go on at the same time."""
ANSWER_TOKENS = 16
TURNS = 4

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Turns that follow each other; each is the whole list of messages then."""

    turns: tuple[tuple[Message, ...], ...]


def unique(seed: int, size: float) -> list[Chat]:
    """40 pictures, each once."""
    return [_one_turn(_picture(seed + n), n) for n in range(_some(40, size))]


def repeated(seed: int, size: float) -> list[Chat]:
    """20 pictures four times each, in random order."""
    pictures = [_picture(seed + n) for n in range(_some(20, size))]
    order = [picture for picture in pictures for _ in range(4)]
    random.Random(seed).shuffle(order)
    return [_one_turn(picture, n) for n, picture in enumerate(order)]


def multi(seed: int, size: float) -> list[Chat]:
    """10 chats of four turns, each with one picture more and all earlier ones again."""
    chats = []
    for number in range(_some(10, size)):
        messages: list[Message] = []
        turns = []
        for turn in range(TURNS):
            picture = _picture(seed + TURNS * number + turn)
            messages = [*messages, _user(picture, f"And what is on picture {turn}?")]
            turns.append(tuple(messages))
            messages = [*messages, {"role": "assistant", "content": "Colours, all in all."}]
        chats.append(Chat(tuple(turns)))
    return chats


def text_only(seed: int, size: float) -> list[Chat]:
    """60 questions of some hundred tokens without pictures."""
    chance = random.Random(seed)
    return [
        Chat((({"role": "user", "content": _text(chance)},),)) for _ in range(_some(60, size))
    ]


WORKLOADS: dict[str, Callable[[int, float], list[Chat]]] = {
    "unique": unique, "repeated": repeated, "multi": multi, "text": text_only,
}
"""By name; each takes a seed and a share of its size."""


def warm_up(seed: int) -> list[Chat]:
    """Some of each kind, which nothing measured has in common with."""
    return [_one_turn(_picture(seed + n), n) for n in range(4)] + text_only(seed, 0.07)


def _some(count: int, size: float) -> int:
    return max(1, round(count * size))


def _one_turn(picture: str, number: int) -> Chat:
    return Chat(((_user(picture, f"Question {number}: what is shown here?"),),))


def _user(picture: str, text: str) -> Message:
    shown = {"type": "image_url", "image_url": {"url": picture}}
    return {"role": "user", "content": [shown, {"type": "text", "text": text}]}


def _picture(seed: int) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(WIDTH, HEIGHT, seed)).decode()


def _text(chance: random.Random) -> str:
    return " ".join(_words(chance, 60))


def _words(chance: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        yield "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9)))

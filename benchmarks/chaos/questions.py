"""What clients ask: a fixed set of requests whose right answers are found out beforehand."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

from benchmarks.prompts import jpeg

PICTURE_SIZE = (280, 210)
PICTURES = 6
TEXTS = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True)
class Question:
    """One request. Asked twice, undisturbed, it has the same answer twice."""

    name: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


def questions(model: str, tokens: int, seed: int) -> list[Question]:
    """All questions, with answers of up to ``tokens`` tokens: greedy, seeded, with
    pictures, several choices, penalties."""
    rng = random.Random(seed)
    found = []
    for number in range(TEXTS):
        length = rng.choice((40, 200, 900))
        text = "".join(rng.choices(LETTERS, k=length))
        options: dict[str, Any] = {
            0: {},
            1: {"temperature": 0.8, "seed": number},
            2: {"n": 2, "temperature": 0.8, "seed": number},
            3: {"frequency_penalty": 0.5},
        }[number % 4]
        kind = next(iter(options), "greedy")
        found.append(Question(f"text, {kind}", _body(model, text, tokens, rng, options)))
    for number in range(PICTURES):
        picture = base64.b64encode(jpeg(*PICTURE_SIZE, seed=seed + number)).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}},
            {"type": "text", "text": f"Question {number}?"},
        ]
        found.append(Question("picture", _body(model, content, tokens, rng, {})))
    return found


def _body(
    model: str, content: Any, tokens: int, rng: random.Random, options: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": rng.randint(tokens // 3, tokens),
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }

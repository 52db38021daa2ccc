"""Makes traces. The same workload, number of workers and seed give the same trace.

Rates and numbers are per worker, so that a fleet of any size is equally busy.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence

from benchmarks.replay.trace import Part, TraceRequest

PHOTO_TOKENS = 1024
CHAT_IMAGE_TOKENS = 512
PAGE_TOKENS = 768


class Popularity:
    """Draws numbers from 0, each less often than the one before, as by Zipf's law."""

    def __init__(self, count: int, exponent: float) -> None:
        weights = (1 / (rank + 1) ** exponent for rank in range(count))
        self._cumulated = list(itertools.accumulate(weights))

    def draw(self, chance: random.Random) -> int:
        return bisect(self._cumulated, chance.random() * self._cumulated[-1])


def arrivals(chance: random.Random, rate: float, count: int) -> Iterator[float]:
    """Yield ``count`` times in seconds, independent of each other, ``rate`` a second."""
    now = 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        yield round(now, 6)


def text(name: str, tokens: int) -> Part:
    return Part(text=name, tokens=tokens)


def photos(workers: int, seed: int) -> list[TraceRequest]:
    """Questions about product photos: few products are asked about by many."""
    chance = random.Random(f"photos {seed}")
    catalogue = Popularity(24 * workers, exponent=1.0)
    times = arrivals(chance, rate=2.5 * workers, count=60 * workers)
    return [
        _photo_question(f"photos-{n}", at, f"photo-{catalogue.draw(chance)}", chance)
        for n, at in enumerate(times)
    ]


def unique(workers: int, seed: int) -> list[TraceRequest]:
    """Every picture is new, so nothing but the instructions can be reused."""
    chance = random.Random(f"unique {seed}")
    times = arrivals(chance, rate=2.0 * workers, count=25 * workers)
    return [
        _photo_question(f"unique-{n}", at, f"unique-{seed}-{n}", chance)
        for n, at in enumerate(times)
    ]


def bursts(workers: int, seed: int) -> list[TraceRequest]:
    """Photos, and every few seconds a new one that very many ask about at once."""
    chance = random.Random(f"bursts {seed}")
    catalogue = Popularity(24 * workers, exponent=1.0)
    requests = [
        _photo_question(f"base-{n}", at, f"photo-{catalogue.draw(chance)}", chance)
        for n, at in enumerate(arrivals(chance, rate=1.5 * workers, count=25 * workers))
    ]
    last = requests[-1].at or 0.0
    for number, start in enumerate(range(2, int(last), 3)):
        for n in range(2 * workers):
            at = round(start + chance.uniform(0, 0.5), 6)
            requests.append(
                _photo_question(f"burst-{number}-{n}", at, f"news-{seed}-{number}", chance)
            )
    return sorted(requests, key=lambda request: request.at or 0.0)


def chats(workers: int, seed: int) -> list[TraceRequest]:
    """Conversations that show pictures; only the last three stay in the prompt."""
    chance = random.Random(f"chats {seed}")
    requests = []
    for n, start in enumerate(arrivals(chance, rate=0.45 * workers, count=6 * workers)):
        history: list[Part] = []
        before = None
        for turn in range(chance.randint(3, 8)):
            name = f"chat-{n}-{turn}"
            if turn == 0 or chance.random() < 0.5:
                history.append(Part(image=f"{name}-image", tokens=CHAT_IMAGE_TOKENS))
            history.append(text(f"{name}-question", chance.randint(20, 120)))
            requests.append(
                TraceRequest(
                    id=name,
                    at=start if before is None else None,
                    after=before,
                    delay=0.0 if before is None else round(chance.expovariate(1 / 4.0), 6),
                    answer_tokens=chance.randint(30, 150),
                    prompt=[text("assistant rules", 300), *_window(history, 3)],
                )
            )
            history.append(Part(answer=name, tokens=requests[-1].answer_tokens))
            before = name
    return requests


def documents(workers: int, seed: int) -> list[TraceRequest]:
    """Questions about scanned documents: the pages of one chapter, then a question."""
    chance = random.Random(f"documents {seed}")
    shelf = Popularity(8 * workers, exponent=0.8)
    requests = []
    for n, at in enumerate(arrivals(chance, rate=1.2 * workers, count=25 * workers)):
        document = shelf.draw(chance)
        first = 4 * chance.randrange(1 + document % 3)
        pages = [
            Part(image=f"document-{document}-page-{page}", tokens=PAGE_TOKENS)
            for page in range(first, first + chance.randint(2, 4))
        ]
        requests.append(
            TraceRequest(
                id=f"documents-{n}",
                at=at,
                answer_tokens=chance.randint(20, 120),
                prompt=[
                    text("reader rules", 150),
                    *pages,
                    text(f"documents-question-{seed}-{n}", chance.randint(15, 60)),
                ],
            )
        )
    return requests


WORKLOADS: dict[str, Callable[[int, int], list[TraceRequest]]] = {
    "photos": photos,
    "chats": chats,
    "documents": documents,
    "unique": unique,
    "bursts": bursts,
}
"""Name -> the maker of a trace, given the number of workers and a seed."""


def _photo_question(
    name: str, at: float, photo: str, chance: random.Random
) -> TraceRequest:
    return TraceRequest(
        id=name,
        at=at,
        answer_tokens=chance.randint(20, 100),
        prompt=[
            text("shop rules", 200),
            Part(image=photo, tokens=PHOTO_TOKENS),
            text(f"question {name}", chance.randint(15, 60)),
        ],
    )


def _window(history: Sequence[Part], images: int) -> list[Part]:
    """All of a conversation but its pictures before the last ``images``."""
    kept = 0
    window = []
    for part in reversed(history):
        if part.image is not None:
            kept += 1
            if kept > images:
                continue
        window.append(part)
    return window[::-1]

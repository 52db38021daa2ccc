"""Clients that ask all the time, and what becomes of each request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.chaos.asking import Answer, Broken, Refused, ask, now, session
from benchmarks.chaos.fleet import ChaosFleet, Member
from benchmarks.chaos.questions import Question

DOCUMENTED = ("could not go on elsewhere", "No worker became ready")
"""Errors that docs/reliability.md describes."""


@dataclass
class Tally:
    """What became of all requests."""

    asked: int = 0
    exact: int = 0
    tokens_wrong: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Those that ended with an error that is documented, by error."""
    lost: list[str] = field(default_factory=list)
    """Those that ended in any other way, and how."""


@dataclass
class Client:
    """Asks one question after the other, of one frontend as long as that is there."""

    number: int
    frontend: Member
    question: Question | None = None
    answer: Answer = field(default_factory=Answer)
    """Of the request under way."""
    successes: list[float] = field(default_factory=list)
    """When requests ended well."""

    def is_on(self, member: Member) -> bool:
        """Whether its request is on that frontend or worker at this moment."""
        if self.question is None:
            return False
        return member is self.frontend or f"-{member.child.pid}-" in self.answer.worker


class Clients:
    """All clients of one fleet."""

    def __init__(
        self, fleet: ChaosFleet, questions: Sequence[Question], count: int, seed: int
    ) -> None:
        self.tally = Tally()
        self._fleet = fleet
        self._questions = questions
        self._right: dict[int, list[str]] = {}
        self._rng = random.Random(seed)
        self._stopping = False
        frontends = fleet.frontends
        self.clients = [Client(n, frontends[n % len(frontends)]) for n in range(count)]

    async def learn_answers(self) -> None:
        """Ask everything once while nothing is disturbed.

        Raises:
            RuntimeError: a question has no answer, or two.
        """
        async with session() as http:
            for number, question in enumerate(self._questions):
                texts = []
                for stream in (False, True):
                    answer = Answer()
                    port = self._fleet.frontends[0].port
                    await ask(http, port, question.body, stream=stream, answer=answer)
                    texts.append(answer.texts)
                    if answer.error or not all(answer.reasons):
                        raise RuntimeError(f"{question.name}: {answer}")
                if texts[0] != texts[1]:
                    raise RuntimeError(f"{question.name} is answered in two ways: {texts}")
                self._right[number] = texts[0]

    async def run(self) -> None:
        """Ask until told to stop, and finish what has been asked then."""
        await asyncio.gather(*(self._keep_asking(client) for client in self.clients))

    def stop(self) -> None:
        self._stopping = True

    async def _keep_asking(self, client: Client) -> None:
        async with session() as http:
            while not self._stopping:
                number = self._rng.randrange(len(self._questions))
                client.question = self._questions[number]
                stream = self._rng.random() < 0.75
                self.tally.asked += 1
                while not await self._ask_once(http, client, number, stream):
                    client.frontend = self._other(client.frontend)
                    await asyncio.sleep(0.05)  # where nobody is there it is asked again
                client.question = None

    async def _ask_once(
        self, http: aiohttp.ClientSession, client: Client, number: int, stream: bool
    ) -> bool:
        """Whether that was the end of it; False where nobody was there to be asked."""
        question, frontend = self._questions[number], client.frontend
        answer = client.answer = Answer()
        began = now()
        try:
            await ask(http, frontend.port, question.body, stream=stream, answer=answer)
        except Refused as error:
            if frontend.befallen(began, now(), "kill", "term"):
                return False
            self._lose(client, f"refused by {frontend.name}: {error}")
        except Broken as error:
            if frontend.befallen(began, now(), "kill"):
                self.tally.ended["its frontend was killed"] += 1
            else:
                self._lose(client, f"broken off by {frontend.name}: {error}")
        except TimeoutError as error:
            self._lose(client, f"{frontend.name}: {error}")
        else:
            self._judge(client, number, answer)
        return True

    def _judge(self, client: Client, number: int, answer: Answer) -> None:
        question = self._questions[number]
        if answer.error:
            known = next((text for text in DOCUMENTED if text in answer.error), None)
            if known is None:
                self._lose(client, answer.error)
            else:
                self.tally.ended[answer.error[:160]] += 1
            return
        wrong = sum(
            sum(a != b for a, b in zip(text, right, strict=False))
            + abs(len(text) - len(right))
            for text, right in zip(answer.texts, self._right[number], strict=True)
        )
        expected = question.body["max_tokens"] * question.choices
        wrong = max(wrong, abs(answer.completion_tokens - expected))
        if not all(answer.reasons):
            self._lose(client, f"{question.name}: an answer without an end")
            return
        self.tally.tokens_wrong += wrong
        self.tally.exact += wrong == 0
        if wrong:
            print(f"  WRONG {question.name}: {answer} instead of {self._right[number]}")
        client.successes.append(now())

    def _lose(self, client: Client, how: str) -> None:
        name = client.question.name if client.question else ""
        print(f"  LOST {name} at {client.answer.worker or 'no worker'}: {how}", flush=True)
        self.tally.lost.append(how)

    def _other(self, frontend: Member) -> Member:
        others = [f for f in self._fleet.frontends if f.available and f is not frontend]
        return self._rng.choice(others) if others else frontend

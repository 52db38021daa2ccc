"""What is done to the fleet while it is being asked."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.asking import now
from benchmarks.chaos.clients import Client, Clients
from benchmarks.chaos.fleet import ChaosFleet, Member, Spell

PAUSES = (1.0, 4.0, 13.0)
"""Seconds. Shorter than a worker is missed, longer, and longer than a frontend is."""
CUTS = (1.0, 6.0)
END_SECONDS = 60.0
"""How long a process may take to end when it is told to."""
NEVER_SECONDS = 90.0
"""How long a client may take to recover before that is called never."""


@dataclass(frozen=True)
class Recovery:
    """How long a client that was on a killed process waited for its next success."""

    what: str
    seconds: float


class Disturber:
    """Disturbs a fleet at random, and writes down how its clients recover."""

    def __init__(
        self, fleet: ChaosFleet, clients: Clients, seed: int, pause: tuple[float, float]
    ) -> None:
        """``pause``: least and most seconds between two disturbances."""
        self.done: Counter[str] = Counter()
        self.recoveries: list[Recovery] = []
        self._fleet = fleet
        self._clients = clients
        self._rng = random.Random(seed)
        self._pause = pause
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Disturb for so long, then wait until everything is there again."""
        until = now() + seconds
        while now() < until:
            await asyncio.sleep(self._rng.uniform(*self._pause))
            if (next_one := self._choose()) is not None:
                task = asyncio.create_task(next_one)
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
        await asyncio.gather(*self._under_way)

    def _choose(self) -> Coroutine[Any, Any, None] | None:
        """Never the last of its kind that is available."""
        group = self._rng.choice((self._fleet.workers, self._fleet.frontends))
        free = [member for member in group if member.available]
        if len(free) < 2:
            return None
        member = self._rng.choice(free)
        choices = ["pause"] if member.steady else ["kill", "kill", "term", "term", "pause"]
        if member.line is not None:
            choices.append("cut")
        match self._rng.choice(choices):
            case "kill":
                return self._kill(member)
            case "term":
                return self._terminate(member)
            case "cut":
                return self._cut(member)
        return self._hold(member, self._rng.choice(PAUSES))

    async def _kill(self, member: Member) -> None:
        spell = self._begin(member, "kill")
        victims = [client for client in self._clients.clients if client.is_on(member)]
        watches = [asyncio.create_task(self._watch(c, member, spell.began)) for c in victims]
        os.kill(member.child.pid, signal.SIGKILL)
        await self._come_back(member, spell)
        await asyncio.gather(*watches)

    async def _terminate(self, member: Member) -> None:
        spell = self._begin(member, "term")
        os.kill(member.child.pid, signal.SIGTERM)
        deadline = now() + END_SECONDS
        while member.child.running:
            if now() > deadline:
                self._clients.tally.lost.append(f"{member.name} does not end")
                break
            await asyncio.sleep(0.1)
        await self._come_back(member, spell)

    async def _come_back(self, member: Member, spell: Spell) -> None:
        await self._fleet.restart(member)
        spell.ended = now()
        member.available = True

    async def _hold(self, member: Member, seconds: float) -> None:
        spell = self._begin(member, "pause")
        os.kill(member.child.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(member.child.pid, signal.SIGCONT)
        spell.ended = now()
        member.available = True

    async def _cut(self, member: Member) -> None:
        spell = self._begin(member, "cut")
        if member.line is not None:
            member.line.cut()
            await asyncio.sleep(self._rng.choice(CUTS))
            member.line.mend()
        spell.ended = now()
        member.available = True

    def _begin(self, member: Member, what: str) -> Spell:
        spell = Spell(what, now())
        member.spells.append(spell)
        member.available = False
        self.done[f"{what} {member.name.partition('-')[0]}"] += 1
        return spell

    async def _watch(self, client: Client, member: Member, killed: float) -> None:
        """Write down when ``client``'s next request ends well."""
        known = len(client.successes)
        while len(client.successes) == known and now() - killed < NEVER_SECONDS:
            await asyncio.sleep(0.02)
        kind = member.name.partition("-")[0]
        self.recoveries.append(Recovery(kind, now() - killed))

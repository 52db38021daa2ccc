"""What is done to the fleet while it is being asked."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.asking import now
from benchmarks.chaos.clients import Client, Clients
from benchmarks.chaos.fleet import ChaosFleet, Member, Spell

PAUSES = (1.0, 4.0, 13.0)
"""Seconds. Shorter than a worker is missed, longer, and longer than a frontend is."""
CUTS = (1.0, 6.0)
LONGER_SECONDS = 120.0
"""How much longer a phase may become for want of a kind of disturbance."""
END_SECONDS = 60.0
"""How long a process may take to end when it is told to."""
NEVER_SECONDS = 90.0
"""How long a client may take to recover before that is called never."""


@dataclass(frozen=True)
class Recovery:
    """How long a client that was on a killed process waited for its next success."""

    what: str
    seconds: float
    paused: float = 0.0
    """For how many of these seconds the frontend that it was asking was paused, and could not
    have answered anybody."""

    @property
    def counted(self) -> float:
        """Seconds for which the fleet is to blame."""
        return self.seconds - self.paused


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
        self._due = kinds_of(fleet.workers, fleet.frontends)
        self._rng.shuffle(self._due)

    async def run(self, seconds: float) -> None:
        """Disturb for so long, then wait until everything is there again.

        A little longer where not everything has been done by then.
        """
        until = now() + seconds
        while now() < until or (self._due and now() < until + LONGER_SECONDS):
            await asyncio.sleep(self._rng.uniform(*self._pause))
            if (next_one := self._choose()) is not None:
                task = asyncio.create_task(next_one)
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
        await asyncio.gather(*self._under_way)

    def _choose(self) -> Coroutine[Any, Any, None] | None:
        """Never the last of its kind that is available.

        What has not been done yet comes first, so that even a short phase has all of it.
        """
        groups = {"worker": self._fleet.workers, "frontend": self._fleet.frontends}
        choices = [
            (what, member)
            for group in groups.values()
            if sum(member.available for member in group) > 1
            for member in group
            if member.available
            for what in kinds_for(member)
        ]
        for due in self._due:
            fitting = [c for c in choices if (c[0], kind_of(c[1])) == due]
            if fitting:
                self._due.remove(due)
                return self._do(*self._rng.choice(fitting))
        group = groups[self._rng.choice(sorted(groups))]
        choices = [c for c in choices if c[1] in group]
        return self._do(*self._rng.choice(choices)) if choices else None

    def _do(self, what: str, member: Member) -> Coroutine[Any, Any, None]:
        match what:
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
        self.done[f"{what} {kind_of(member)}"] += 1
        return spell

    async def _watch(self, client: Client, member: Member, killed: float) -> None:
        """Write down when ``client``'s next request ends well."""
        known, asked, since, paused = len(client.successes), client.frontend, killed, 0.0
        while len(client.successes) == known and since - killed < NEVER_SECONDS:
            await asyncio.sleep(0.02)
            until = now()
            paused += asked.seconds_of("pause", since, until)
            asked, since = client.frontend, until
        self.recoveries.append(Recovery(kind_of(member), since - killed, paused))


def kind_of(member: Member) -> str:
    """``worker`` or ``frontend``."""
    return member.name.partition("-")[0]


def kinds_for(member: Member) -> list[str]:
    """What may be done to ``member``, as often as it is likely."""
    kinds = ["pause"] if member.steady else ["kill", "kill", "term", "term", "pause"]
    return [*kinds, "cut"] if member.line is not None else kinds


def kinds_of(*groups: Sequence[Member]) -> list[tuple[str, str]]:
    """All that can be done to the members of ``groups``, each kind once."""
    return sorted(
        {(what, kind_of(m)) for group in groups for m in group for what in kinds_for(m)}
    )

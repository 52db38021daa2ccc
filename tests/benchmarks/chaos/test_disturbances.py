"""What is done to a fleet, and that nothing is left out."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.chaos import disturbances
from benchmarks.chaos.clients import Client, Clients
from benchmarks.chaos.cut import CuttableLine
from benchmarks.chaos.disturbances import Disturber, kind_of
from benchmarks.chaos.fleet import ChaosFleet, Member, Spell

ALL = {
    "kill worker", "term worker", "pause worker", "cut worker",
    "kill frontend", "term frontend", "pause frontend",
}


def member(name: str, **more: Any) -> Member:
    return Member(name, cast("Any", None), cast("Any", None), **more)


class Noting(Disturber):
    """Notes what it would do."""

    def __init__(self, workers: list[Member], frontends: list[Member], seed: int) -> None:
        fleet = SimpleNamespace(workers=workers, frontends=frontends)
        super().__init__(cast("ChaosFleet", fleet), cast("Clients", None), seed, (0.0, 0.0))
        self.would: list[tuple[str, Member]] = []

    def _do(self, what: str, member: Member) -> Any:
        self.would.append((what, member))
        return member

    def counts(self) -> Counter[str]:
        return Counter(f"{what} {kind_of(member)}" for what, member in self.would)


def make(seed: int) -> Noting:
    workers = [member(f"worker-{n}", steady=n == 1) for n in (1, 2, 3)]
    workers[-1].line = CuttableLine(1)
    frontends = [member(f"frontend-{n}", steady=n == 1) for n in (1, 2)]
    return Noting(workers, frontends, seed)


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_is_done_before_any_is_done_again(seed: int) -> None:
    disturber = make(seed)
    for _ in range(len(ALL)):
        disturber._choose()
    assert disturber.counts() == Counter(ALL)


def test_a_seed_stands_for_one_order() -> None:
    first, again, other = make(1), make(1), make(2)
    for _ in range(30):
        for disturber in (first, again, other):
            disturber._choose()
    names = [[(what, m.name) for what, m in d.would] for d in (first, again, other)]
    assert names[0] == names[1] != names[2]


def test_the_last_of_a_kind_is_left_alone_and_who_ends_not_ended() -> None:
    disturber = make(3)
    workers = disturber._fleet.workers
    for each in workers[1:]:
        each.available = False
    for _ in range(200):
        disturber._choose()
    assert all(kind_of(m) == "frontend" for _, m in disturber.would)
    assert all(what == "pause" for what, m in disturber.would if m.steady)
    for each in workers[1:]:
        each.available = True
    disturber._choose()
    assert kind_of(disturber.would[-1][1]) == "worker"  # what is still due


@pytest.mark.parametrize(
    ("spell", "paused"),
    [
        (None, False),
        (Spell("pause", 90.0, 99.0), False),
        (Spell("pause", 90.0, 100.5), True),
        (Spell("pause", 101.0), True),
        (Spell("term", 90.0), False),
    ],
)
def test_whether_a_clients_frontend_was_paused_is_known(
    spell: Spell | None, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100, 1000))
    monkeypatch.setattr(disturbances, "now", lambda: float(next(clock)))
    disturber = make(1)
    first, second = disturber._fleet.frontends
    client = Client(0, first)
    if spell is not None:
        second.spells.append(spell)

    async def ask_another_meanwhile() -> None:
        watching = asyncio.create_task(disturber._watch(client, member("worker-1"), 100.0))
        await asyncio.sleep(0.05)
        client.frontend = second
        await asyncio.sleep(0.05)
        client.successes.append(102.0)
        await watching

    asyncio.run(ask_another_meanwhile())
    (recovery,) = disturber.recoveries
    assert (recovery.what, recovery.paused) == ("worker", paused)

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
    ("spells", "paused"),
    [
        ([], 0.0),
        ([Spell("pause", 90.0, 99.0), Spell("term", 90.0)], 0.0),
        ([Spell("pause", 90.0, 112.0)], 2.0),  # it is asked from 110 to 120
        ([Spell("pause", 111.0, 112.5), Spell("pause", 113.0, 114.0)], 2.5),
        ([Spell("pause", 119.0)], 1.0),
        ([Spell("pause", 121.0)], 0.0),
    ],
)
def test_it_is_known_for_how_long_a_clients_frontend_was_paused(
    spells: list[Spell], paused: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturber = make(1)
    first, second = disturber._fleet.frontends
    client = Client(0, first)
    second.spells.extend(spells)
    time = 100.0

    async def a_second_passes(_: float) -> None:
        nonlocal time
        time += 1.0
        if time == 110.0:
            client.frontend = second
        if time == 120.0:
            client.successes.append(time)

    monkeypatch.setattr(disturbances, "now", lambda: time)
    monkeypatch.setattr(disturbances, "asyncio", SimpleNamespace(sleep=a_second_passes))
    asyncio.run(disturber._watch(client, member("worker-1"), 100.0))
    (recovery,) = disturber.recoveries
    assert (recovery.what, recovery.seconds) == ("worker", 20.0)
    assert recovery.paused == pytest.approx(paused)
    assert recovery.counted == pytest.approx(20.0 - paused)

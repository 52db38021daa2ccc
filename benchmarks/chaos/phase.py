"""One phase of chaos: a fleet, its clients and what is done to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos.asking import now
from benchmarks.chaos.clients import Clients
from benchmarks.chaos.disturbances import Disturber
from benchmarks.chaos.fleet import ChaosFleet
from benchmarks.chaos.questions import questions
from benchmarks.chaos.report import PhaseResult
from benchmarks.processes import CHECKPOINT, Servers


@dataclass(frozen=True)
class Plan:
    """How a phase is run."""

    name: str
    engine: str
    seconds: float
    frontends: int
    workers: int
    clients: int
    tokens: int
    """In the longest answers."""
    pause: tuple[float, float]
    """Least and most seconds between two disturbances."""
    seed: int


async def run_phase(plan: Plan) -> PhaseResult:
    """Start a fleet, disturb it, count what is left, and end it."""
    with Servers() as servers:
        fleet = ChaosFleet(
            servers, engine=plan.engine, frontends=plan.frontends, workers=plan.workers
        )
        try:
            print(f"\n{plan.name}: starting", flush=True)
            await fleet.start()
            asked = questions(str(CHECKPOINT), plan.tokens, plan.seed)
            clients = Clients(fleet, asked, plan.clients, plan.seed)
            await clients.learn_answers()
            before = await fleet.until_at_rest()
            disturber = Disturber(fleet, clients, plan.seed, plan.pause)
            print(f"{plan.name}: disturbing for {plan.seconds:.0f} s", flush=True)
            began = now()
            asking = asyncio.create_task(clients.run())
            await disturber.run(plan.seconds)
            clients.stop()
            await asking
            seconds = now() - began
            await fleet.until_all_ready()
            after = await fleet.until_at_rest()
            moved = await _moved(fleet)
        finally:
            await fleet.close()
        grown = 0
        for name, files in before.fds.items():
            more = after.fds[name].total() - files.total()
            grown += max(0, more)
            print(f"{name}: {files.total()} open files before, {more} more after", flush=True)
            if more > 0:
                print(f"  {dict(after.fds[name] - files)} instead of "
                      f"{dict(files - after.fds[name])}")
        return PhaseResult(
            plan.name, seconds, clients.tally, disturber.done, disturber.recoveries,
            after.leases, after.charges, fleet.segments(), grown, fleet.rejoined, moved,
        )


async def _moved(fleet: ChaosFleet) -> int:
    """How many requests the frontends have sent on."""
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for frontend in fleet.frontends:
            async with http.get(f"http://127.0.0.1:{frontend.port}/metrics") as response:
                text = await response.text()
            for family in text_string_to_metric_families(text):
                if family.name == "foveal_requests_moved":
                    total += sum(s.value for s in family.samples if s.name.endswith("_total"))
    return int(total)

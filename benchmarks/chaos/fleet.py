"""The fleet that is disturbed: frontends and workers, each started again when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos.asking import now
from benchmarks.chaos.cut import CuttableLine
from benchmarks.processes import Servers, free_ports
from configs.deployment.children import Child

SHM = Path("/dev/shm")
START_SECONDS = 240.0
REST_SECONDS = 60.0


@dataclass
class Spell:
    """A time in which a process was not itself."""

    what: str
    began: float
    ended: float = float("inf")


@dataclass
class Member:
    """A frontend or a worker: the process that has its place, and what befell it."""

    name: str
    start: Callable[[], Child]
    child: Child
    port: int = 0
    """Where a frontend serves HTTP."""
    line: CuttableLine | None = None
    """How frontends reach a worker whose line can be cut."""
    spells: list[Spell] = field(default_factory=list)
    available: bool = True
    steady: bool = False
    """Whether it is never ended, so that what leaks would show in it."""
    pids: set[int] = field(default_factory=set)
    """All processes that have had its place."""

    def befallen(self, began: float, ended: float, *kinds: str) -> bool:
        """Whether one of these befell it at any moment between two times."""
        return any(
            spell.what in kinds and spell.began <= ended and began <= spell.ended
            for spell in self.spells
        )

    def seconds_of(self, kind: str, began: float, ended: float) -> float:
        """How much of the time between two others it spent in spells of a kind."""
        return sum(
            max(0.0, min(ended, spell.ended) - max(began, spell.began))
            for spell in self.spells
            if spell.what == kind
        )


@dataclass(frozen=True)
class Remains:
    """What is still held when nothing is being asked."""

    leases: int
    charges: int
    fds: dict[str, Counter[str]]
    """Open files of each process that is steady, by what they are."""


class ChaosFleet:
    """Started and stopped by whoever disturbs it."""

    def __init__(self, servers: Servers, *, engine: str, frontends: int, workers: int) -> None:
        """``engine``: ``mock`` or ``vllm``."""
        self._servers = servers
        self._engine = engine
        self._count = 0
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),  # else it would be counted
            timeout=aiohttp.ClientTimeout(total=10),
        )
        ports = free_ports(frontends + 2)
        self._line = CuttableLine(ports[-1])
        self._ports, self._worker_port = ports[:frontends], ports[-1]
        self._num_workers = workers
        self.frontends: list[Member] = []
        self.workers: list[Member] = []
        self.rejoined: list[float] = []
        """Seconds from when a new worker says that it is ready until all frontends use it."""

    async def start(self) -> None:
        """Start everything and wait until all workers are used by all frontends."""
        await self._line.start()
        for number in range(1, self._num_workers + 1):
            cuttable = number == self._num_workers
            start = self._worker_starter(f"{self._engine}-worker-{number}", cuttable)
            member = Member(f"worker-{number}", start, start())
            member.line = self._line if cuttable else None
            self.workers.append(member)
        for number, port in enumerate(self._ports, start=1):
            start = self._frontend_starter(f"{self._engine}-frontend-{number}", port)
            self.frontends.append(Member(f"frontend-{number}", start, start(), port))
        for member in (self.workers[0], self.frontends[0]):
            member.steady = True
        for member in self.members:
            member.pids.add(member.child.pid)
        await self.until_all_ready()

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.frontends]

    def _worker_starter(self, name: str, cuttable: bool) -> Callable[[], Child]:
        flags: list[str] = []
        if self._engine == "mock":
            flags += ["--engine", "mock", "--mock-speed", "0.25"]
            flags += ["--num-gpu-blocks-override", "2000"]
        flags += ["--mm-identity-seed-file", str(self._servers.directory / "seed")]
        if cuttable:  # found by its address only, which is the line's
            flags += ["--port", str(self._worker_port), "--namespace", "cuttable"]
        return lambda: self._servers.start_worker(self._numbered(name), *flags)

    def _frontend_starter(self, name: str, port: int) -> Callable[[], Child]:
        flags = [
            "--worker", f"tcp://127.0.0.1:{self._line.port}",
            "--mm-identity-seed-file", str(self._servers.directory / "seed"),
            "--mm-preprocess-workers", "0", "--mm-arena-gb", "0.1",
        ]
        return lambda: self._servers.start_frontend(self._numbered(name), port, *flags)

    def _numbered(self, name: str) -> str:
        self._count += 1
        return f"{name}.{self._count}"

    async def restart(self, member: Member) -> None:
        """Put a new process where one has ended, and wait until it is used."""
        self._servers.stop(member.child)
        member.child = member.start()
        member.pids.add(member.child.pid)
        if member in self.workers:
            await self._until(
                lambda: self._says_it_is_ready(member), START_SECONDS, f"{member.name} ready"
            )
        began = now()
        await self._until(lambda: self._is_back(member), START_SECONDS, f"{member.name} back")
        if member in self.workers:
            self.rejoined.append(now() - began)

    async def until_all_ready(self) -> None:
        """Wait until every frontend uses every worker."""
        for frontend in self.frontends:
            await self._until(
                lambda f=frontend: self._uses_all(f), START_SECONDS, f"{frontend.name} ready"
            )

    async def until_at_rest(self) -> Remains:
        """Wait until nothing is held for any request, and no longer than a minute."""
        deadline = now() + REST_SECONDS
        while True:
            remains = await self._remains()
            if remains.leases == remains.charges == 0 or now() > deadline:
                return remains
            await asyncio.sleep(0.5)

    async def _remains(self) -> Remains:
        leases = charges = 0
        for frontend in self.frontends:
            fleet = await self._fleet(frontend)
            leases += (fleet["arena"] or {}).get("leased_entries", 0)
            for worker in fleet["workers"]:
                load = worker["load"]
                charges += sum(load[name] for name in ("requests", "prefill_tokens", "blocks"))
            charges += fleet["requests"]
        fds = {
            member.name: open_files(member.child.pid)
            for member in self.members
            if member.steady
        }
        return Remains(leases, charges, fds)

    async def _says_it_is_ready(self, worker: Member) -> bool:
        return any(" is ready on " in line for line in worker.child.last_lines(50))

    async def _is_back(self, member: Member) -> bool:
        if member in self.frontends:
            return await self._uses_some(member)
        alive = [f for f in self.frontends if f.available]
        for frontend in alive:
            workers = (await self._fleet(frontend))["workers"]
            if not any(
                w["ready"] and f"-{member.child.pid}-" in w["id"] for w in workers
            ):
                return False
        return True

    async def _uses_some(self, frontend: Member) -> bool:
        fleet = await self._fleet(frontend)
        return any(worker["ready"] for worker in fleet["workers"])

    async def _uses_all(self, frontend: Member) -> bool:
        fleet = await self._fleet(frontend)
        return sum(worker["ready"] for worker in fleet["workers"]) == len(self.workers)

    async def _fleet(self, frontend: Member) -> dict[str, Any]:
        url = f"http://127.0.0.1:{frontend.port}/v1/fleet"
        async with self._http.get(url) as response:
            fleet: dict[str, Any] = await response.json()
            return fleet

    async def _until(
        self, ready: Callable[[], Any], seconds: float, what: str
    ) -> None:
        deadline = now() + seconds
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                if await ready():
                    return
            if now() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End everything as it is ended in good order."""
        await self._http.close()
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.child.pid, signal.SIGCONT)
        await asyncio.to_thread(self._servers.stop, *(m.child for m in self.members))
        await self._line.close()

    def segments(self) -> list[str]:
        """What is in shared memory of any process that was ever part of this fleet."""
        pids = {pid for member in self.members for pid in member.pids}
        return segments_of(sorted(pids))


def open_files(pid: int) -> Counter[str]:
    """What files a process has open: sockets, pipes, and others by their path."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[str(link.readlink()).partition(":[")[0]] += 1
    return found


def segments_of(pids: Sequence[int]) -> list[str]:
    return sorted(
        path.name for pid in pids for path in SHM.glob(f"foveal-{pid}-*")
    )

"""Work that many ask for at once is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class _Flight(Generic[V]):
    task: asyncio.Task[V]
    waiting: int = 0


class SingleFlight(Generic[K, V]):
    """Per key, at most one piece of work at a time. For one event loop.

    Nothing is kept: who asks after the work has ended has it done again.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def do(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """Return what the running work for ``key`` returns; where there is none, start it.

        Its exception goes to all who wait. One of them being cancelled does not disturb
        the others; when none is left, the work is cancelled.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_run(work)))
            flight.task.add_done_callback(lambda task: self._land(key, task))
            self._flights[key] = flight
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                # It may take its time to end; who comes now must not wait for that.
                self._forget(key, flight.task)

    def _land(self, key: K, task: asyncio.Task[V]) -> None:
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits any more

    def _forget(self, key: K, task: asyncio.Task[V]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]


async def _run(work: Callable[[], Awaitable[V]]) -> V:
    return await work()

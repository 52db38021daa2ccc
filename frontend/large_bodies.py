"""Lets small requests pass large ones: few large bodies are worked on at a time.

A body that holds a picture costs the event loop and the threads beside it some
milliseconds until its request is on its way. If many arrived at once, a request of text
would stand behind all of them, at each of its steps. So large bodies, once they have
arrived, take turns. A turn ends when the request is sent to a worker, or waits for something
that costs nothing here, or after a second.
"""

from __future__ import annotations

import asyncio

LARGE_BYTES = 64 * 1024
"""From this size on a body waits for its turn."""

AT_A_TIME = 3
"""Enough that while some have their threads at work another has the event loop. Measured in
docs/reliability.md: with fewer, pictures seen before are answered at a lower rate; with more,
text beside them waits longer."""

MOST_SECONDS = 1.0
"""How long a turn may take, so that nothing slow keeps others waiting."""


class LargeBodies:
    """Gives out turns, first come, first served. For one event loop."""

    def __init__(self, at_a_time: int = AT_A_TIME, most_seconds: float = MOST_SECONDS) -> None:
        self._free = asyncio.Semaphore(at_a_time)
        self._most_seconds = most_seconds
        self.waiting = 0
        """How many wait for their turn."""

    async def turn(self) -> Turn:
        """Wait for a turn, which whoever gets it must end."""
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        return Turn(self._free, self._most_seconds)


class Turn:
    """Ends by itself after ``most_seconds``."""

    def __init__(self, free: asyncio.Semaphore, most_seconds: float) -> None:
        self._free = free
        self._last = asyncio.get_running_loop().call_later(most_seconds, self.end)
        self._ended = False

    def end(self) -> None:
        """Let the next one begin. Doing it again does nothing."""
        if not self._ended:
            self._ended = True
            self._last.cancel()
            self._free.release()

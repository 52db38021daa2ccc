"""How much is done at once in one turn of the event loop.

Short pieces of work are done on the event loop where to hand them to a thread would cost
about as much again. Many of them in a row would keep everybody else waiting: a request with
a thousand prompts or pictures has them all done in the same turn.
"""

from __future__ import annotations

import asyncio
import time

MOST_SECONDS = 0.01
"""From the first such work in a turn; what is under way then is still finished."""


class LoopTurn:
    """Knows how long ago such work began in this turn, all else that was done included.

    For one thread, that of the event loop.
    """

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._began = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        """Which will say when the turn is over; None while nothing has been done in it."""

    def has_time(self) -> bool:
        """Whether more may be done at once."""
        return self._loop is not asyncio.get_running_loop() or (
            time.perf_counter() - self._began < self._most_seconds
        )

    def spend(self) -> None:
        """Say that something is about to be done at once."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the last one may have been stopped in a turn
            self._loop, self._began = loop, time.perf_counter()
            loop.call_soon(self._end)

    def _end(self) -> None:
        self._loop = None


turn = LoopTurn()
"""Of this process's event loop."""

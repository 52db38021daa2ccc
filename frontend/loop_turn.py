"""How much is done at once in one turn of the event loop.

Short pieces of work are done on the event loop where to hand them to a thread would cost
about as much again. Many of them in a row would keep everybody else waiting: a request with
a thousand prompts or pictures has them all done in the same turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SECONDS = 0.005
"""Of such work in one turn; what is under way then is still finished."""


class LoopTurn:
    """Adds up what such work has taken since the event loop last went on.

    For one thread, that of the event loop.
    """

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._seconds = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        """Which will say when the turn is over; None while nothing has been done in it."""

    def has_time(self) -> bool:
        """Whether more may be done at once."""
        return self._loop is not asyncio.get_running_loop() or (
            self._seconds < self._most_seconds
        )

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Within, something is done at once."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the last one may have been stopped in a turn
            self._loop, self._seconds = loop, 0.0
            loop.call_soon(self._end)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def _end(self) -> None:
        self._loop = None


turn = LoopTurn()
"""Of this process's event loop."""

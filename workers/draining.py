"""How a worker leaves: it says so, finishes what it has, and goes.

Frontends that have heard it send nothing new. What they sent just before is finished too;
what they sent too late finds nobody, and goes elsewhere like the requests of any lost
worker.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import Any

from workers.frontends import Frontends
from workers.inbox import Inbox

logger = logging.getLogger(__name__)


class StopSignals:
    """SIGTERM and Ctrl-C: the first asks to leave, the second to do so at once."""

    def __init__(self) -> None:
        """Call on the event loop."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.first.is_set():
            self.second.set()
        self.first.set()


async def drain(
    workers: Sequence[tuple[Inbox, Frontends]],
    seconds: float,
    hurry: asyncio.Event,
    work: Sequence[asyncio.Task[Any]],
) -> set[asyncio.Task[Any]]:
    """Let workers finish what they have, for so many ``seconds`` at most.

    Ends early when ``hurry`` is set, or one of the tasks in ``work`` ends: those are what
    the workers live on. Returns the tasks that have ended.
    """
    for inbox, _ in workers:
        inbox.begin_draining(seconds)
    left = sum(frontends.num_requests for _, frontends in workers)
    logger.info("leaving, once %d requests are done or %.0f s have passed", left, seconds)
    ends: list[asyncio.Future[Any]] = [
        asyncio.gather(*(frontends.until_idle() for _, frontends in workers)),
        asyncio.ensure_future(hurry.wait()),
    ]
    done, _ = await asyncio.wait(
        [*ends, *work], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
    )
    for end in ends:
        end.cancel()
    left = sum(frontends.num_requests for _, frontends in workers)
    if left:
        logger.warning("%d requests are left to others", left)
    return {task for task in work if task in done}

"""One frontend's arena, as this worker reads it by NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transfer.messages import Pulling
from transfer.tensor_ref import RemoteArena

ANNOUNCED_SECONDS = 10.0
"""For how long a frontend is asked to keep its agent going. Renewed twice as often."""


@dataclass
class Outcome:
    """What came of one READ."""

    pulls: int = 0
    nbytes: int = 0
    failures: int = 0
    seconds: float = 0.0


class NixlSource:
    """Tells the frontend while it is read from. Used on one event loop."""

    def __init__(self, arena: RemoteArena, say: Callable[[Pulling], None]) -> None:
        self.arena = arena
        self.works = False
        """Whether the last that was tried succeeded."""
        self._failed = asyncio.Event()
        self._reason = ""
        self._say = say
        self._under_way = 0
        self._news = Pulling(0.0)
        self._renewal: asyncio.TimerHandle | None = None

    @contextmanager
    def reading(self) -> Iterator[Outcome]:
        """Within, something is being read; fill in what came of it."""
        outcome = Outcome()
        self._under_way += 1
        if self._renewal is None:
            self._announce()
        try:
            yield outcome
        finally:
            self._under_way -= 1
            self._news.pulls += outcome.pulls
            self._news.nbytes += outcome.nbytes
            self._news.failures += outcome.failures
            self._news.read_seconds += outcome.seconds
            if self._under_way == 0:
                self._stop_renewing()
                self._tell(0.0)

    def fail(self, reason: str) -> None:
        """Read no more until it has been connected anew."""
        if self.works:
            self.works = False
            self._reason = reason
            self._failed.set()

    async def failure(self) -> str:
        """Wait until reading fails; returns the reason."""
        await self._failed.wait()
        self._failed.clear()
        return self._reason

    def close(self) -> None:
        """Say no more: the frontend has gone."""
        self.works = False
        self._say = lambda _: None
        self._stop_renewing()

    def _announce(self) -> None:
        self._tell(ANNOUNCED_SECONDS)
        self._renewal = asyncio.get_running_loop().call_later(
            ANNOUNCED_SECONDS / 2, self._announce
        )

    def _stop_renewing(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _tell(self, seconds: float) -> None:
        news, self._news = self._news, Pulling(0.0)
        news.seconds = seconds
        self._say(news)

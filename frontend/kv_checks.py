"""Checks on demand that the index is what the workers hold, and mends it where it is not."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from frontend.router.kv_check import KvDifference, compare
from frontend.router.router import Router
from frontend.worker import Worker
from transfer.messages import AskSnapshot, KvSnapshot

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""How long a worker may take to answer."""

ATTEMPTS = 5
"""Snapshots asked for while blocks come and go all the time; each must meet its moment."""


class KvChecks:
    """Snapshots asked for to be compared."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: dict[str, asyncio.Future[KvDifference | None]] = {}

    def on_snapshot(self, worker: str, snapshot: KvSnapshot) -> bool:
        """Compare a snapshot if a check waits for it; False when it must still be applied."""
        waiting = self._waiting.pop(worker, None)
        if waiting is None or waiting.done():
            return False
        difference = compare(self._router.index, self._router.plane, worker, snapshot)
        waiting.set_result(difference)
        if difference is None:
            return self._router.plane.caught_up(worker)
        if not difference.equal:
            logger.error("the index is wrong about worker %s: %s", worker, difference)
        return difference.equal

    async def check(self, worker: Worker) -> dict[str, Any]:
        """Ask a worker what it holds; returns what ``GET /v1/fleet?check=true`` shows."""
        for _ in range(ATTEMPTS):
            if worker.name in self._waiting:
                return _undecided("it is being checked already")
            answer: asyncio.Future[KvDifference | None]
            answer = asyncio.get_running_loop().create_future()
            self._waiting[worker.name] = answer
            worker.link.send(AskSnapshot())
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    difference = await answer
            except TimeoutError:
                return _undecided("it does not answer")
            finally:
                if self._waiting.get(worker.name) is answer:
                    del self._waiting[worker.name]
            if difference is not None:
                return {
                    "equal": difference.equal,
                    "held": difference.held,
                    "missing": difference.missing,
                    "phantom": difference.phantom,
                }
        return _undecided("its blocks change too fast to compare")


def _undecided(why: str) -> dict[str, Any]:
    return {"equal": None, "why": why}

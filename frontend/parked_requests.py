"""Requests that lost workers had, kept for the tensors that these may still be reading.

vLLM names relied on: EngineCoreRequest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vllm.v1.engine import EngineCoreRequest

PARK_SECONDS = 330.0
"""A worker that cannot reach its frontend drops its requests within 10 s, and its engine
is past them, or taken for dead, within another 300 s (workers.frontends, workers.outbox)."""


class ParkedRequests:
    """By worker. For one event loop."""

    def __init__(self) -> None:
        self._parked: dict[str, tuple[list[EngineCoreRequest], asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        """Count the workers."""
        return len(self._parked)

    def park(self, worker: str, requests: Sequence[EngineCoreRequest]) -> None:
        """Keep what a lost worker had, until it is released; not for ever."""
        if not requests:
            return
        timer = asyncio.get_running_loop().call_later(PARK_SECONDS, self.release, worker)
        earlier: list[EngineCoreRequest] = []
        if worker in self._parked:
            earlier, old_timer = self._parked[worker]
            old_timer.cancel()
        self._parked[worker] = [*earlier, *requests], timer

    def release(self, worker: str) -> None:
        """Let go of what a lost worker may have been reading: it has stopped."""
        if worker in self._parked:
            _, timer = self._parked.pop(worker)
            timer.cancel()

    def close(self) -> None:
        """Let go of everything."""
        for worker in list(self._parked):
            self.release(worker)

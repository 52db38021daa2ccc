"""Sweeps lost workers' blocks out of the index, a little at a time."""

from __future__ import annotations

import asyncio

from frontend.router.kv_index import KvIndex

SLICE_BLOCKS = 2_000
"""Blocks looked at without a pause: well under a millisecond."""

PAUSE_SECONDS = 0.005
"""Between slices, for whatever else the event loop has to do."""


class IndexSweeper:
    """Runs on the event loop while there is something to sweep, and not otherwise."""

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Begin to sweep if anything needs it; call after a worker's blocks were dropped."""
        if self._timer is None and self._index.unswept:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(PAUSE_SECONDS, self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        self._index.sweep(SLICE_BLOCKS)
        self.wake()

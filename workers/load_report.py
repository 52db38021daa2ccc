"""Tells the frontends how busy this worker is.

What each frontend has in flight is told by frontend, so that one can add what the others
have to what it knows of its own requests without counting those twice.

vLLM names relied on: EngineCoreOutputs.scheduler_stats, EngineCoreOutput.new_token_ids;
SchedulerStats.num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs,
kv_cache_usage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from vllm.v1.engine import EngineCoreOutputs

from transfer.link import KvPublisher
from transfer.messages import LoadReport
from workers.frontends import Frontends
from workers.kv_state import KvState

REPORT_SECONDS = 0.1
"""How soon a change is told."""

STEADY_SECONDS = 1.0
"""How often the report is repeated although nothing changes: a frontend that has lost
the last KV delta learns it from this."""


class LoadReporter:
    """Builds reports and publishes those that say something new."""

    def __init__(
        self,
        publisher: KvPublisher,
        kv_state: KvState,
        frontends: Frontends,
        num_kv_blocks: int,
        encoder_resets: Callable[[], int] = lambda: 0,
    ) -> None:
        """``num_kv_blocks`` are all that the engine has; ``encoder_resets`` is asked how
        often the engine was told to forget images."""
        self._publisher = publisher
        self._kv_state = kv_state
        self._frontends = frontends
        self._num_kv_blocks = num_kv_blocks
        self._encoder_resets = encoder_resets
        self._running = 0
        self._waiting = 0
        self._kv_blocks = 0

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Take over what the outputs of an engine step say."""
        for output in outputs.outputs:
            if output.new_token_ids:
                self._frontends.computed(output.request_id)
        if (stats := outputs.scheduler_stats) is not None:
            self._running = stats.num_running_reqs
            self._waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            self._kv_blocks = round(stats.kv_cache_usage * self._num_kv_blocks)

    def report(self) -> LoadReport:
        """Describe this moment."""
        epoch, seq = self._kv_state.position
        shares = self._frontends.shares()
        if not shares:
            # The engine says nothing of requests that end by being aborted when no step
            # follows.
            self._running = self._waiting = self._kv_blocks = 0
        return LoadReport(
            epoch=epoch,
            seq=seq,
            running=self._running,
            waiting=self._waiting,
            kv_blocks=self._kv_blocks,
            shares=shares,
            encoder_resets=self._encoder_resets(),
        )

    async def run(self) -> None:
        """Publish until cancelled."""
        told: LoadReport | None = None
        told_at = 0.0
        while True:
            report, now = self.report(), time.monotonic()
            if report != told or now - told_at >= STEADY_SECONDS:
                self._publisher.publish(report)
                told, told_at = report, now
            await asyncio.sleep(REPORT_SECONDS)

"""Tells the frontends how busy this worker is.

What each frontend has in flight is told by frontend, so that one can add what the others
have to what it knows of its own requests without counting those twice.

vLLM names relied on: EngineCoreOutputs.scheduler_stats, EngineCoreOutput.new_token_ids;
SchedulerStats.num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs,
kv_cache_usage, ec_connector_stats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from vllm.v1.engine import EngineCoreOutputs

from transfer.link import KvPublisher
from transfer.messages import LoadReport
from workers.embedding_cache import HostEmbeddings
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
        embeddings: HostEmbeddings | None = None,
    ) -> None:
        """``num_kv_blocks`` are all that the engine has; ``encoder_resets`` is asked how
        often the engine was told to forget images; ``embeddings`` is what its host shares.
        """
        self._publisher = publisher
        self._kv_state = kv_state
        self._frontends = frontends
        self._num_kv_blocks = num_kv_blocks
        self._encoder_resets = encoder_resets
        self._running = 0
        self._waiting = 0
        self._kv_blocks = 0
        self._embeddings = embeddings
        self._encoder_runs = 0
        self._embedding_loads = 0

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Take over what the outputs of an engine step say."""
        for output in outputs.outputs:
            if output.new_token_ids:
                self._frontends.computed(output.request_id)
        if (stats := outputs.scheduler_stats) is not None:
            self._running = stats.num_running_reqs
            self._waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            self._kv_blocks = round(stats.kv_cache_usage * self._num_kv_blocks)

    def note_embeddings(self, outputs: EngineCoreOutputs) -> None:
        """Take what our connector counted out of the outputs of an engine step.

        vLLM's metrics in the frontend would look for a connector there.
        """
        stats = outputs.scheduler_stats
        if stats is not None and (counts := stats.ec_connector_stats) is not None:
            self._encoder_runs += counts.get("encoded", 0)
            self._embedding_loads += counts.get("loaded", 0)
            stats.ec_connector_stats = None

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
            encoder_runs=self._encoder_runs,
            embedding_loads=self._embedding_loads,
            embedding_cache=self._embeddings.name if self._embeddings is not None else "",
            embeddings=self._embeddings.news() if self._embeddings is not None else None,
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

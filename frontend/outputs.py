"""The outputs of all workers as one stream, as vLLM expects from one engine.

vLLM's statistics know one engine, index 0: an output with another index would end its
output handler and with it every request. So all outputs get that index, and scheduler
statistics are summed over the workers.

vLLM names relied on: EngineCoreOutputs, EngineCoreOutput, FinishReason, SchedulerStats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

ENGINE_INDEX = 0


@dataclass(frozen=True)
class _Failure:
    """A request that ends with an error, behind the outputs that it did give."""

    request_id: str
    error: Exception


class OutputStream:
    """Queue between the workers' lines and vLLM's output handler."""

    def __init__(self) -> None:
        self.end_request: Callable[[str, Exception], None] | None = None
        """Ends a request with an error whose text reaches the client. Without it the
        request ends with vLLM's own, which says nothing."""
        self._queue: asyncio.Queue[EngineCoreOutputs | _Failure | Exception] = asyncio.Queue()
        self._latest: dict[str, SchedulerStats] = {}

    def put(self, worker: str, outputs: EngineCoreOutputs) -> None:
        """Add what a worker has sent."""
        outputs.engine_index = ENGINE_INDEX
        if outputs.scheduler_stats is not None:
            self._latest[worker] = outputs.scheduler_stats
            outputs.scheduler_stats = self._fleet_stats(outputs.scheduler_stats)
        self._queue.put_nowait(outputs)

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with ``error``."""
        self._queue.put_nowait(_Failure(request_id, error))

    def close(self, error: Exception) -> None:
        """End the stream: whoever waits for an output gets ``error``."""
        self._queue.put_nowait(error)

    def drop_worker(self, worker: str) -> None:
        self._latest.pop(worker, None)

    async def get(self) -> EngineCoreOutputs:
        """Wait for the next outputs.

        Raises:
            Exception: what ``close`` was given.
        """
        while True:
            outputs = await self._queue.get()
            if isinstance(outputs, Exception):
                raise outputs
            if not isinstance(outputs, _Failure):
                return outputs
            request_id = outputs.request_id
            if self.end_request is None:
                end = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
                return EngineCoreOutputs(outputs=[end])
            self.end_request(request_id, outputs.error)

    def _fleet_stats(self, news: SchedulerStats) -> SchedulerStats:
        """``news`` with its gauges summed, or averaged, over the fleet."""
        all_stats = self._latest.values()
        return replace(
            news,
            num_running_reqs=sum(s.num_running_reqs for s in all_stats),
            num_waiting_reqs=sum(s.num_waiting_reqs for s in all_stats),
            num_skipped_waiting_reqs=sum(s.num_skipped_waiting_reqs for s in all_stats),
            kv_cache_usage=sum(s.kv_cache_usage for s in all_stats) / len(all_stats),
        )

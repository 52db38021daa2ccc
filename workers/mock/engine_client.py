"""A mock engine in real time, where a worker process has vLLM's engine client.

It is asked what ``EngineInputs`` and ``AsyncMPClient`` are asked by the inbox and the
outbox, and takes as long to answer as the cost model says.

vLLM names relied on: EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs,
FinishReason; PrefillStats, SchedulerStats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats

from transfer.messages import Frame
from transfer.payload import decode_request
from workers.mock.block_pool import BlockEvent
from workers.mock.engine import MockEngine, StepOutputs, TokenOutput
from workers.mock.requests import Answered, RequestReader

logger = logging.getLogger(__name__)

_CACHES = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")
_CONSTANT_ANSWERS: dict[str, Any] = {
    # Adapters change nothing about a made-up answer but its block hashes.
    "add_lora": True,
    "remove_lora": True,
    "pin_lora": True,
    "list_loras": [],
    "is_sleeping": False,
    "is_scheduler_paused": False,
}


class MockEngineClient:
    """Runs a ``MockEngine``; one simulated second takes ``1 / speed`` real ones."""

    def __init__(self, engine: MockEngine, reader: RequestReader, speed: float = 1.0) -> None:
        self._engine = engine
        self._reader = reader
        self._speed = speed
        self._answers: dict[str, Answered] = {}
        self._refused: list[EngineCoreOutput] = []
        self._work = asyncio.Event()
        self._between_steps = asyncio.Event()
        self._between_steps.set()

    # What an inbox and an outbox call.

    def add(self, frames: Sequence[Frame]) -> None:
        """Queue the request that ``frames`` encode, as ``EngineInputs`` does."""
        self.add_request(decode_request(frames))

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; one that cannot be computed ends with an error."""
        try:
            answered = self._reader.read(request)
            self._engine.add(answered.request)
        except ValueError as error:
            logger.error("mock engine refused %s: %s", request.request_id, error)
            self._refused.append(
                EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            )
        else:
            self._answers[request.request_id] = answered
        self._work.set()

    def abort(self, request_ids: list[str]) -> None:
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._answers.pop(request_id, None)

    async def collective_rpc_async(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Answer, as a model runner does, once the step under way is over.

        Raises:
            ValueError: a model runner's method that a mock does not have.
        """
        await self._between_steps.wait()
        match method:
            case "attach_arena":
                return [""]  # there is no model runner that would read it
            case "synchronize_device" | "detach_arena":
                return [None]
        raise ValueError(f"a mock engine has no model runner to {method}")

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        """Answer what frontends may call.

        Raises:
            ValueError: a mock cannot do that.
        """
        if method in _CONSTANT_ANSWERS:
            return _CONSTANT_ANSWERS[method]
        if method not in _CACHES:
            raise ValueError(f"a mock engine cannot {method}")
        await self._between_steps.wait()
        if method == "reset_prefix_cache":
            return self._engine.pool.reset()
        self._engine.encoder_cache.reset()
        return None

    # What a worker process starts.

    async def run(
        self,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_events: Callable[[list[BlockEvent]], None],
    ) -> None:
        """Compute until cancelled: call these with what every step gives."""
        loop = asyncio.get_running_loop()
        engine = self._engine
        while True:
            ends = engine.begin(loop.time() * self._speed)
            if ends is None:
                if self._refused:
                    on_outputs(self._outputs(StepOutputs([], [])))
                self._work.clear()
                await self._work.wait()
                continue
            self._between_steps.clear()
            try:
                await asyncio.sleep(max(0.0, ends / self._speed - loop.time()))
            finally:
                step = engine.finish(ends)
                self._between_steps.set()
            if step.events:
                on_events(step.events)
            outputs = self._outputs(step)
            if outputs.outputs:
                on_outputs(outputs)

    def _outputs(self, step: StepOutputs) -> EngineCoreOutputs:
        refused, self._refused = self._refused, []
        engine = self._engine
        return EngineCoreOutputs(
            outputs=[*refused, *(self._output(token) for token in step.tokens)],
            scheduler_stats=SchedulerStats(
                num_running_reqs=len(engine.running),
                num_waiting_reqs=len(engine.waiting),
                kv_cache_usage=1 - engine.pool.num_unused / engine.pool.num_blocks,
            ),
            timestamp=asyncio.get_running_loop().time(),
        )

    def _output(self, token: TokenOutput) -> EngineCoreOutput:
        request = token.request
        answered = self._answers[request.request_id]
        new = slice(request.generated - token.new_tokens, request.generated)
        output = EngineCoreOutput(
            request.request_id, answered.answer[new], trace_headers=answered.trace_headers
        )
        if token.first:
            output.prefill_stats = _prefill_stats(request.prompt_tokens, request.cached_tokens)
        if token.finished:
            output.finish_reason = FinishReason.LENGTH
            del self._answers[request.request_id]
        return output


def _prefill_stats(prompt_tokens: int, cached_tokens: int | None) -> PrefillStats:
    stats = PrefillStats()
    stats.set(
        num_prompt_tokens=prompt_tokens,
        num_local_cached_tokens=cached_tokens or 0,
        num_external_cached_tokens=0,
    )
    return stats

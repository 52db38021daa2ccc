"""Administrative calls: what vLLM asks of its engine besides requests, asked of all workers.

vLLM names relied on: the methods of EngineCoreClient that AsyncLLM calls for LoRA,
caches, sleep, pausing, profiling, weights and collective_rpc, and those of EngineCore
that answer them, by the same names without ``_async``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core_client import EngineCoreClient

from frontend.adapters import fleet_adapter
from frontend.worker import Worker
from transfer.errors import BadMessage
from transfer.messages import Call, CallResult, Frame
from transfer.payload import decode_payload_as, encode_payload

logger = logging.getLogger(__name__)

CALL_SECONDS = 300.0
"""How long a call (loading a LoRA adapter, sleeping, ...) may take on a worker."""


class AdminCalls(EngineCoreClient):
    """The administrative half of an engine client for many workers."""

    def __init__(self) -> None:
        self._loras: dict[int, LoRARequest] = {}
        """Adapters as workers know them, by the number that vLLM has given them here."""
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        """Worker and answer of each call under way, by call id."""
        self._call_ids = itertools.count(1)

    def callable_workers(self) -> list[Worker]:
        """The workers that calls go to."""
        raise NotImplementedError

    def workers_that_encode(self) -> list[Worker]:
        """The workers that only encode images: they are told to forget outputs."""
        return []

    async def bring_up_to_date(self, worker: Worker) -> None:
        """Give a worker that has come later what the others were given."""
        given: set[int] = set()
        while missing := self._loras.keys() - given:  # more may be added meanwhile
            number = min(missing)
            lora = self._loras[number]
            given.add(number)
            try:
                await self._call_worker(worker, "add_lora", (lora,))
            except (RuntimeError, TimeoutError) as error:
                # Requests name their adapter: those for this one will be told.
                logger.error("worker %s: add_lora: %s", worker.name, error or "no answer")

    def fail_calls(self, worker: str) -> None:
        """Answer the calls of a lost worker."""
        for name, future in self._calls.values():
            if name == worker and not future.done():
                future.set_exception(ConnectionError(f"worker {worker} was lost"))

    def on_result(self, message: CallResult, payload: Sequence[Frame]) -> None:
        """Answer a call with what its worker has sent."""
        if message.call_id not in self._calls:
            return
        _, future = self._calls[message.call_id]
        if future.done():
            return
        if message.error is not None:
            future.set_exception(RuntimeError(message.error))
            return
        try:
            future.set_result(decode_payload_as(object, payload))
        except BadMessage as error:
            future.set_exception(error)

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return list(
            await asyncio.gather(
                *(self._call_worker(w, method, arguments) for w in self.callable_workers())
            )
        )

    async def _forget_outputs(self) -> None:
        """Empty the caches of encode workers and their hosts: weights may change."""
        calls = [
            self._call_worker(worker, "reset_encoder_cache", ())
            for worker in self.workers_that_encode()
        ]
        await asyncio.gather(*calls)

    async def _call_worker(
        self, worker: Worker, method: str, arguments: Sequence[Any]
    ) -> Any:
        call_id = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (worker.name, future)
        worker.link.send(Call(call_id, method), encode_payload(list(arguments)))
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await future
        finally:
            del self._calls[call_id]

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        adapter = fleet_adapter(lora_request)
        added = await self._call_all("add_lora", adapter)
        self._loras[lora_request.lora_int_id] = adapter  # workers to come get it too
        return all(added)

    async def remove_lora_async(self, lora_id: int) -> bool:
        adapter = self._loras.pop(lora_id, None)
        if adapter is None:
            return False
        return all(await self._call_all("remove_lora", adapter.lora_int_id))

    async def list_loras_async(self) -> set[int]:
        return set(self._loras)

    async def pin_lora_async(self, lora_id: int) -> bool:
        adapter = self._loras.get(lora_id)
        if adapter is None:
            return False
        return all(await self._call_all("pin_lora", adapter.lora_int_id))

    async def reset_mm_cache_async(self) -> None:
        await self._call_all("reset_mm_cache")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return all(
            await self._call_all("reset_prefix_cache", reset_running_requests, reset_connector)
        )

    async def reset_encoder_cache_async(self) -> None:
        await asyncio.gather(self._call_all("reset_encoder_cache"), self._forget_outputs())

    async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
        await self._call_all("sleep", level, mode)
        if level:
            await self._forget_outputs()

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        return all(await self._call_all("wake_up", tags))

    async def is_sleeping_async(self) -> bool:
        return any(await self._call_all("is_sleeping"))

    async def release_kv_cache_memory_async(self) -> None:
        await self._call_all("release_kv_cache_memory")

    async def pause_scheduler_async(
        self, mode: str = "abort", clear_cache: bool = True
    ) -> None:
        await self._call_all("pause_scheduler", mode, clear_cache)
        if clear_cache:
            await self._forget_outputs()

    async def resume_scheduler_async(self) -> None:
        await self._call_all("resume_scheduler")

    async def is_scheduler_paused_async(self) -> bool:
        return any(await self._call_all("is_scheduler_paused"))

    async def profile_async(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        await self._call_all(
            "profile", is_start, profile_prefix, delay_iterations, max_iterations
        )

    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._call_all("set_weight_version", weight_version)

    async def get_weight_version_async(self) -> str:
        versions = await self._call_all("get_weight_version")
        if len(set(versions)) != 1:
            raise RuntimeError(f"workers have different weight versions: {versions}")
        return str(versions[0])

    async def collective_rpc_async(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if not isinstance(method, str):
            raise TypeError("collective_rpc takes the name of a method when routed")
        per_worker = await self._call_all("collective_rpc", method, timeout, args, kwargs)
        return [result for results in per_worker for result in results]

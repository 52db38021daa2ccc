"""Requests whose tensors are on their way to this worker.

They reach the engine once all of theirs are here, each as soon as it can: only the parts
of one request keep their order. One that is aborted meanwhile never does. Where a pull
fails, the frontend is asked for the tensors themselves.

vLLM names relied on: EngineCoreRequest.mm_features; EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError

from transfer.errors import ReadFailed, TransferError
from transfer.leases import Lease
from transfer.pack import is_packed, move_reference, read_reference
from transfer.payload import encode_payload
from transfer.tensor_ref import EntryRef
from workers.engine_inputs import EngineInputs
from workers.frontends import Frontend, Frontends
from workers.tensor_cache import Pull, TensorCache

logger = logging.getLogger(__name__)


class WaitingRequests:
    """Used on one event loop."""

    def __init__(
        self,
        frontends: Frontends,
        inputs: EngineInputs,
        send_missing: Callable[[Frontend, str, int, str], None],
    ) -> None:
        """``send_missing`` is given the frontend, the request, its part and the reason."""
        self._frontends = frontends
        self._inputs = inputs
        self._send_missing = send_missing
        self._tasks: dict[str, list[asyncio.Task[bool]]] = {}
        """Parts that wait, by request and in their order."""

    def take(
        self, frontend: Frontend, request: EngineCoreRequest, part: int, cache: TensorCache
    ) -> bool:
        """Take a request over if it must wait for tensors, or for an earlier part of it.

        If it need not, its references are to this worker's own arena afterwards.
        """
        source = frontend.source
        entries = _entries_of(request) if source is not None else []
        held, pulls = [], []
        for entry in entries:
            lease = cache.find(entry)
            if lease is not None:
                held.append(lease)
            elif source is not None:
                pulls.append(cache.pull(source, entry))
        waiting = self._tasks.get(request.request_id)
        if not pulls and not waiting:
            try:
                self._settle(frontend, request, held)
            except TransferError as error:
                self._miss(frontend, request, part, error)
                return True
            return False
        earlier = waiting[-1] if waiting else None
        work = self._bring(frontend, request, part, cache, earlier, held, pulls)
        task = asyncio.create_task(work, name=f"tensors of {request.request_id}")
        self._tasks.setdefault(request.request_id, []).append(task)
        task.add_done_callback(lambda task: self._forget(request.request_id, task))
        return True

    def cancel(self, frontend: Frontend, request_ids: Iterable[str]) -> None:
        """Let requests of this frontend wait no longer. They are not added any more."""
        for request_id in request_ids:
            if self._frontends.owner(request_id) is frontend:
                for task in self._tasks.pop(request_id, ()):
                    task.cancel()

    async def _bring(
        self,
        frontend: Frontend,
        request: EngineCoreRequest,
        part: int,
        cache: TensorCache,
        earlier: asyncio.Task[bool] | None,
        held: list[Lease],
        pulls: list[Pull],
    ) -> bool:
        """Wait, then add the request; tells whether the engine has it."""
        try:
            if earlier is not None and not await earlier:
                raise ReadFailed("an earlier part of it is missing")
            held += await cache.wait(pulls)
            self._settle(frontend, request, held)
            payload = encode_payload(request)
        except TransferError as error:
            self._miss(frontend, request, part, error)
            return False
        except Exception as error:  # whatever it is, nobody else would ever say so
            logger.exception("the tensors of request %r did not come", request.request_id)
            self._miss(frontend, request, part, ReadFailed(repr(error)))
            return False
        try:
            self._inputs.add(payload)
        except EngineDeadError:
            logger.error("request %r: the engine has died", request.request_id)
            return False
        return True

    def _miss(
        self, frontend: Frontend, request: EngineCoreRequest, part: int, error: TransferError
    ) -> None:
        self._frontends.take_back(frontend, request.request_id, part)
        self._send_missing(frontend, request.request_id, part, str(error))

    def _settle(
        self, frontend: Frontend, request: EngineCoreRequest, leases: list[Lease]
    ) -> None:
        """Let the request refer to this worker's arena, and lease what it refers to."""
        if not leases:
            return
        here = {lease.entry.identity: lease.entry for lease in leases}
        features = []
        for feature in request.mm_features or ():
            item = feature.data
            if item is not None and is_packed(item):
                identity = read_reference(item).entry.identity
                feature = replace(feature, data=move_reference(item, here[identity]))
            features.append(feature)
        request.mm_features = features
        frontend.leases.setdefault(request.request_id, []).extend(leases)

    def _forget(self, request_id: str, task: asyncio.Task[bool]) -> None:
        waiting = self._tasks.get(request_id, [])
        if task in waiting:
            waiting.remove(task)
            if not waiting:
                del self._tasks[request_id]


def _entries_of(request: EngineCoreRequest) -> list[EntryRef]:
    """What a request refers to, each once."""
    entries = {}
    for feature in request.mm_features or ():
        if feature.data is not None and is_packed(feature.data):
            entry = read_reference(feature.data).entry
            entries[entry.identity] = entry
    return list(entries.values())

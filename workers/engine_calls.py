"""What frontends call of the engine, and what follows from it for this worker.

vLLM names relied on: AsyncMPClient.call_utility_async and the methods of EngineCore that
it names; that pause_scheduler(mode, clear_cache) and sleep(level, mode) with a level above
0 empty all of the engine's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from transfer.errors import BadMessage
from transfer.link import WorkerLink
from transfer.messages import Call, CallResult, Frame
from transfer.payload import decode_payload_as, encode_payload
from workers.embedding_cache import HostEmbeddings
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox

ENGINE_CALLS = frozenset({
    "add_lora", "remove_lora", "list_loras", "pin_lora",
    "reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache",
    "sleep", "wake_up", "is_sleeping", "release_kv_cache_memory",
    "pause_scheduler", "resume_scheduler", "is_scheduler_paused",
    "profile", "get_weight_version", "set_weight_version", "collective_rpc",
})
"""Methods of the engine that a frontend may call."""

MODEL_RUNNER_CALLS = frozenset({
    "checkpoint_prepare", "checkpoint_restore",
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
    "start_weight_update", "start_draft_weight_update", "update_weights",
    "finish_weight_update", "reset_weights", "reload_weights",
})
"""Methods of the model runners' processes that ``collective_rpc`` may name: those that
vLLM's own server and its guides for new weights call. Ours that map arenas are not among
them."""

_EMPTIES_KV_CACHE = frozenset({
    "reset_prefix_cache", "sleep", "release_kv_cache_memory", "pause_scheduler",
})

_ABORTS_REQUESTS = frozenset({"sleep", "pause_scheduler"})
_TAKES_REQUESTS_AGAIN = frozenset({"wake_up", "resume_scheduler"})

_FORGETS_IMAGES = frozenset({
    "reset_encoder_cache", "reset_mm_cache", "sleep", "release_kv_cache_memory",
    "pause_scheduler",
})

_WEIGHTS_MAY_CHANGE = frozenset({"reset_encoder_cache", "sleep", "pause_scheduler"})
"""What vLLM has done before weights are replaced: it empties its encoder cache then."""


class EngineCalls:
    """Used on one event loop."""

    encoder_resets = 0
    """How often the engine was told to forget images or their encoder outputs."""

    def __init__(
        self,
        engine: AsyncMPClient,
        link: WorkerLink,
        outbox: Outbox,
        nixl: NixlTransfer,
        embeddings: HostEmbeddings | None,
        forget_blocks: Callable[[], None],
    ) -> None:
        """``forget_blocks`` tells frontends that no block is resident."""
        self._engine = engine
        self._link = link
        self._outbox = outbox
        self._nixl = nixl
        self._embeddings = embeddings
        self._forget_blocks = forget_blocks

    async def answer(self, frontend: str, call: Call, payload: Sequence[Frame]) -> None:
        """Make a call, and send ``frontend`` what came of it.

        Raises:
            EngineDeadError: the engine has died.
        """
        method = call.method
        try:
            arguments = decode_payload_as(object, payload)
            if method not in ENGINE_CALLS or not isinstance(arguments, list):
                raise BadMessage(f"{method} is not for frontends to call")
            if method == "collective_rpc" and not _may_name(arguments):
                raise BadMessage(f"collective_rpc{arguments[:1]} is not for frontends to call")
            if method in _ABORTS_REQUESTS:
                self._outbox.aborts_are_meant = True
            result = await self._engine.call_utility_async(method, *arguments)
            if method in _TAKES_REQUESTS_AGAIN:
                self._outbox.aborts_are_meant = False
            frames = encode_payload(result)
        except EngineDeadError:
            raise
        except Exception as error:  # whatever the engine's method raised is the answer
            self._link.send(frontend, CallResult(call.call_id, f"{method}: {error}"))
            return
        if _empties_caches(method, arguments):
            self._follow(method, result)
        self._link.send(frontend, CallResult(call.call_id), frames)

    def _follow(self, method: str, result: Any) -> None:
        if method == "reset_mm_cache" and self._nixl.cache is not None:
            self._nixl.cache.drop_unleased()
        if method in _EMPTIES_KV_CACHE and result is not False:
            # An idle engine announces this only with its next step.
            self._forget_blocks()
        self.encoder_resets += method in _FORGETS_IMAGES
        if method in _WEIGHTS_MAY_CHANGE and self._embeddings is not None:
            self._embeddings.clear()


def _empties_caches(method: str, arguments: Sequence[Any]) -> bool:
    """Whether a call that may empty caches does so."""
    match method, *arguments:
        case "pause_scheduler", _, clear_cache, *_:
            return bool(clear_cache)
        case "sleep", level, *_:
            return level != 0
    return True


def _may_name(arguments: list[Any]) -> bool:
    method = arguments[0] if arguments else None
    return isinstance(method, str) and method in MODEL_RUNNER_CALLS

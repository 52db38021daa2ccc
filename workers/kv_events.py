"""The engine's KV events, as it publishes them.

vLLM names relied on: distributed.kv_events.KVEventBatch, EventBatch, BlockStored,
BlockRemoved, AllBlocksCleared.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
)

from transfer.errors import BadMessage

Event = BlockStored | BlockRemoved | AllBlocksCleared

_EVENT_TYPES: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}

_batch_decoder = msgspec.msgpack.Decoder(KVEventBatch)
_any_batch_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode_batch(payload: bytes, warn: Callable[[str], None]) -> tuple[list[Event], float]:
    """Return a batch's events, and when they were made (0: it does not say).

    Events of types unknown to us are left out, and ``warn`` is told.

    Raises:
        BadMessage: the payload is not a batch of events, or names blocks by integers.
    """
    try:
        batch = _batch_decoder.decode(payload)
        events: list[Event] = list(batch.events)
        at = float(batch.ts)
    except msgspec.MsgspecError:
        events, at = _decode_one_by_one(payload, warn), 0.0
    for event in events:
        if not isinstance(event, AllBlocksCleared) and not all(
            isinstance(digest, bytes) for digest in event.block_hashes
        ):
            raise BadMessage(
                "the engine publishes block hashes as integers: "
                "start it with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
            )
    return events, at


def _decode_one_by_one(payload: bytes, warn: Callable[[str], None]) -> list[Event]:
    try:
        events = []
        for raw in _any_batch_decoder.decode(payload).events:
            name = raw.get("type") if isinstance(raw, dict) else None
            if isinstance(name, str) and name in _EVENT_TYPES:
                events.append(msgspec.convert(raw, _EVENT_TYPES[name]))
            else:
                warn(f"ignoring KV events of unknown type {name!r}")
        return events
    except msgspec.MsgspecError as error:
        raise BadMessage(f"not a batch of KV events: {error}") from error

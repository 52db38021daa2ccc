"""Which blocks the engine of this worker holds, from the events it publishes.

The engine announces physical blocks: one digest may be stored twice, and then its first
removal leaves a copy. So copies are counted, per medium and cache group, and only what
changes for a digest as a whole goes out to the frontends.

A digest counts as held in a medium when every group there holds it: the engine reuses as
much of a prompt as all its groups allow. Groups that look back over a part of the prompt
only (sliding window, chunks, Mamba) need not have all of it, so counting them like the
others may understate what will be reused, and never overstates it. A group that cannot be
counted at all leaves nothing to promise.

vLLM names relied on: distributed.kv_events.KVEventBatch, EventBatch, BlockStored,
BlockRemoved, AllBlocksCleared, MEDIUM_GPU; v1.kv_cache_interface.KVCacheSpecKind.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
)
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from transfer.errors import BadMessage
from transfer.messages import KvDelta, KvSnapshot

logger = logging.getLogger(__name__)

Event = BlockStored | BlockRemoved | AllBlocksCleared

# None: an engine that names no kinds has one group.
_WHOLE_KINDS = frozenset(
    {
        None,
        KVCacheSpecKind.FULL_ATTENTION.value,
        KVCacheSpecKind.MLA_ATTENTION.value,
        KVCacheSpecKind.SINK_FULL_ATTENTION.value,
    }
)
_PARTIAL_KINDS = {
    KVCacheSpecKind.SLIDING_WINDOW.value: "once parts of the window have been evicted",
    KVCacheSpecKind.SLIDING_WINDOW_MLA.value: "once parts of the window have been evicted",
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION.value: "once parts of a chunk have been evicted",
    KVCacheSpecKind.MAMBA.value: "as it keeps the state after some blocks only",
}
"""Kinds that need a part of the prompt, and when less is promised than will be reused."""
_EVENT_TYPES: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}

_batch_decoder = msgspec.msgpack.Decoder(KVEventBatch)
_any_batch_decoder = msgspec.msgpack.Decoder(EventBatch)

# Copies of each digest, by cache group.
_Groups = dict[int | None, dict[bytes, int]]


class KvState:
    """The resident blocks of one engine, and the deltas that lead to them."""

    def __init__(self, block_size: int, epoch: str) -> None:
        """``block_size`` is the tokens per hashed block; ``epoch`` names this start."""
        self._block_size = block_size
        self._epoch = epoch
        self._seq = 0
        self._groups: dict[str, _Groups] = {}
        self._published: dict[str, set[bytes]] = {}
        self._uncounted = ""
        """Why nothing can be promised; empty where it can."""
        self._warned: set[str] = set()

    @property
    def position(self) -> tuple[str, int]:
        """The epoch, and the number of the last delta of it."""
        return self._epoch, self._seq

    def apply(self, payload: bytes) -> KvDelta | None:
        """Apply one batch of the engine's events; None when nothing changed by it.

        Raises:
            BadMessage: the payload is not a batch of events, or it names blocks by
                integers. Nothing of it has been applied.
        """
        events, at = self._decode(payload)
        touched: dict[str, set[bytes]] = defaultdict(set)
        cleared = False
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, touched)
            elif isinstance(event, BlockRemoved):
                self._remove(event, touched)
            else:
                # The event names no medium. Forgetting blocks of others too only
                # understates what is held.
                self._forget_copies()
                cleared = True
        return self._publish(touched, cleared, at)

    def clear(self) -> KvDelta | None:
        """Forget all blocks: the engine was reset and may tell only with its next step."""
        self._forget_copies()
        return self._publish({}, cleared=True)

    def snapshot(self) -> KvSnapshot:
        """Return all resident blocks, as of the last delta."""
        return KvSnapshot(
            epoch=self._epoch,
            seq=self._seq,
            blocks={medium: list(held) for medium, held in self._published.items() if held},
        )

    def _decode(self, payload: bytes) -> tuple[list[Event], float]:
        """The events, and when they were made."""
        try:
            batch = _batch_decoder.decode(payload)
            events: list[Event] = list(batch.events)
            at = float(batch.ts)
        except msgspec.MsgspecError:
            events, at = self._decode_one_by_one(payload), 0.0
        for event in events:
            if not isinstance(event, AllBlocksCleared) and not all(
                isinstance(digest, bytes) for digest in event.block_hashes
            ):
                raise BadMessage(
                    "the engine publishes block hashes as integers: "
                    "start it with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
                )
        return events, at

    def _decode_one_by_one(self, payload: bytes) -> list[Event]:
        """Decode a batch that may hold events of types unknown to us, leaving those out."""
        try:
            raw_events = _any_batch_decoder.decode(payload).events
            events = []
            for raw in raw_events:
                name = raw.get("type") if isinstance(raw, dict) else None
                if isinstance(name, str) and name in _EVENT_TYPES:
                    events.append(msgspec.convert(raw, _EVENT_TYPES[name]))
                else:
                    self._warn_once(f"ignoring KV events of unknown type {name!r}")
            return events
        except msgspec.MsgspecError as error:
            raise BadMessage(f"not a batch of KV events: {error}") from error

    def _store(self, event: BlockStored, touched: dict[str, set[bytes]]) -> None:
        if (reason := self._why_not_counted(event)) is not None:
            if not self._uncounted:
                self._uncounted = reason
                for held_in, held in self._published.items():
                    touched[held_in].update(held)
                logger.warning("no reuse of cached blocks will be promised: %s", reason)
            return
        if (when := _PARTIAL_KINDS.get(event.kv_cache_spec_kind or "")) is not None:
            self._warn_once(
                f"cache group {event.group_idx} is {event.kv_cache_spec_kind}: less may be "
                f"promised than is reused, {when}"
            )
        medium = event.medium or MEDIUM_GPU
        groups = self._groups.setdefault(medium, {})
        if event.group_idx not in groups:
            groups[event.group_idx] = {}
            # What was held without this group is held no more.
            touched[medium].update(self._published.get(medium, ()))
        copies = groups[event.group_idx]
        for digest in _as_bytes(event.block_hashes):
            copies[digest] = copies.get(digest, 0) + 1
            touched[medium].add(digest)

    def _why_not_counted(self, event: BlockStored) -> str | None:
        kind = event.kv_cache_spec_kind
        if kind not in _WHOLE_KINDS and kind not in _PARTIAL_KINDS:
            return f"cache group {event.group_idx} is {kind}"
        if event.block_size != self._block_size:
            return (
                f"cache group {event.group_idx} has blocks of {event.block_size} tokens, "
                f"and prompts are hashed by {self._block_size}"
            )
        return None

    def _remove(self, event: BlockRemoved, touched: dict[str, set[bytes]]) -> None:
        # A removal tells only its group: one that cannot be counted has no copies.
        medium = event.medium or MEDIUM_GPU
        copies = self._groups.get(medium, {}).get(event.group_idx)
        if copies is None:
            return
        for digest in _as_bytes(event.block_hashes):
            count = copies.get(digest, 0)
            if count > 1:
                copies[digest] = count - 1
            elif count == 1:
                del copies[digest]
                touched[medium].add(digest)

    def _forget_copies(self) -> None:
        for groups in self._groups.values():
            for copies in groups.values():
                copies.clear()

    def _publish(
        self, touched: dict[str, set[bytes]], cleared: bool, at: float = 0.0
    ) -> KvDelta | None:
        """Bring what is published up to date; return the difference, None if there is none."""
        cleared = cleared and any(self._published.values())
        if cleared:
            self._published.clear()
        stored: dict[str, list[bytes]] = {}
        removed: dict[str, list[bytes]] = {}
        for medium, digests in touched.items():
            groups = self._groups[medium]
            published = self._published.setdefault(medium, set())
            held = {d for d in digests if all(d in copies for copies in groups.values())}
            if self._uncounted:
                held = set()
            if gained := held - published:
                stored[medium] = list(gained)
            if lost := (digests - held) & published:
                removed[medium] = list(lost)
            published |= gained
            published -= lost
        if not (stored or removed or cleared):
            return None
        self._seq += 1
        return KvDelta(
            epoch=self._epoch, seq=self._seq, stored=stored, removed=removed, cleared=cleared,
            at=at,
        )

    def _warn_once(self, message: str) -> None:
        # Bounded by the kinds, groups and block sizes of one engine.
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _as_bytes(digests: Iterable[bytes | int]) -> Iterable[bytes]:
    return (digest for digest in digests if isinstance(digest, bytes))

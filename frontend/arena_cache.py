"""vLLM's processor cache, with shared memory behind it.

On a miss the item that the processor made is written into the arena, once, and what goes
on to the request is the item with references in place of its large tensors. On a hit the
same references go out again. Nothing is mirrored anywhere: a worker that lacks bytes
says so.

Two keys are at work. vLLM's ``mm_hash`` covers the original bytes and the processor's
options: it says whether something has been processed. The canonical identity covers
what came out of the processor: it names the bytes, here, in workers and in block hashes,
so that one picture in two encodings is one image.

vLLM names relied on: multimodal.cache.BaseMultiModalProcessorCache and how
multimodal.processing.processor calls it (is_cached, then processing, then
touch_sender_cache_item and get_and_update_item for every item).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem
from vllm.utils.cache import CacheInfo

from transfer.arena import Arena
from transfer.encoded_item import EncodedItem, Encoding
from transfer.errors import ArenaFull
from transfer.identity import IdentityHasher
from transfer.leases import Lease
from transfer.pack import is_packed, moving_fields, plan, refer

if TYPE_CHECKING:
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate

logger = logging.getLogger(__name__)

HOLD_SECONDS = 120.0
"""How long an item reported as cached waits for the rest of its request to be processed."""


class IdentifiedItem(EncodedItem):
    """A processed item that knows its canonical identity.

    If its tensors are in the arena, they stay there as long as this object lives: it
    travels with the request, so a request dropped anywhere needs no bookkeeping.
    """

    def __init__(
        self,
        fields: dict[str, MultiModalFieldElem],
        identity: str,
        lease: Lease | None,
        encoding: Encoding | None = None,
    ) -> None:
        super().__init__(fields, encoding)
        self.identity = identity
        self.lease = lease


@dataclass
class _Processed:
    """What is kept about an ``mm_hash``."""

    identity: bytes
    item: EncodedItem
    """With references, or whole where nothing in it is large. An image that is seen again
    is not encoded again."""
    in_arena: bool
    prompt_updates: Sequence[ResolvedPromptUpdate]
    generation: int
    is_new: bool = False
    """Whether it was put here and no request has had it yet."""


@dataclass(frozen=True)
class Held:
    """An item of the cache that stays there as long as this object lives."""

    lease: Lease | None
    """None where nothing in it is large."""


@dataclass
class _Hold:
    """Keeps an item in place between ``is_cached`` and ``get_and_update``."""

    lease: Lease
    until: float
    waiting: int = field(default=1)


class ArenaProcessorCache(BaseMultiModalProcessorCache):
    """One cache for all of the renderer's paths. Safe to call from several threads."""

    def __init__(
        self,
        arena: Arena | None,
        hasher: IdentityHasher,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds and never goes back."""
        super().__init__()
        self._clock = clock
        self._arena = arena
        self._hasher = hasher
        self._model = model
        self._processed: dict[str, _Processed] = {}
        self._holds: dict[str, _Hold] = {}
        self._lock = threading.RLock()
        self._stats = CacheInfo(hits=0, total=0)
        self._reported = CacheInfo(hits=0, total=0)
        self.inlined = 0
        """Items that found no room in the arena."""
        self.copy_seconds = 0.0
        """Seconds spent copying tensors into the arena, added up. What this process copies
        itself it also digests meanwhile."""

    def is_cached_item(self, mm_hash: str) -> bool:
        with self._lock:
            self._end_old_holds()
            known = self._processed.get(mm_hash)
            if known is None:
                return False
            if not known.in_arena:
                return True
            if (hold := self._holds.get(mm_hash)) is not None:
                hold.waiting += 1
                hold.until = self._clock() + HOLD_SECONDS
                return True
            lease = self._lease(known)
            if lease is None:
                del self._processed[mm_hash]  # evicted from the arena since
                return False
            self._holds[mm_hash] = _Hold(lease, self._clock() + HOLD_SECONDS)
            return True

    def get_and_update_item(
        self,
        mm_item: tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]] | None,
        mm_hash: str,
    ) -> tuple[MultiModalKwargsItem | None, Sequence[ResolvedPromptUpdate]]:
        with self._lock:
            known = self._processed.get(mm_hash)
            is_hit = mm_item is None and not (known is not None and known.is_new)
            if known is not None:
                known.is_new = False
            self._stats = CacheInfo(
                hits=self._stats.hits + is_hit, total=self._stats.total + 1
            )
            if mm_item is None:
                return self._cached(mm_hash)
        item, prompt_updates = mm_item
        stored = self.store(item)
        with self._lock:
            # Items that arrive processed (token-in endpoints) come without prompt updates,
            # under a hash that the client chose: they are not for others to find.
            if prompt_updates and (stored.lease is not None or not is_large(item)):
                self._processed[mm_hash] = _Processed(
                    identity=bytes.fromhex(stored.identity),
                    item=EncodedItem(dict(stored.data), stored.encoding),
                    in_arena=stored.lease is not None,
                    prompt_updates=prompt_updates,
                    generation=stored.lease.entry.generation if stored.lease else 0,
                )
                self._forget_evicted()
        return stored, prompt_updates

    def hold(self, mm_hash: str) -> Held | None:
        """Keep an item in place for as long as the result lives; None if it is not here."""
        with self._lock:
            known = self._processed.get(mm_hash)
            if known is None:
                return None
            lease = self._lease(known) if known.in_arena else None
            return Held(lease) if lease is not None or not known.in_arena else None

    def add(
        self,
        mm_hash: str,
        identity: bytes,
        item: MultiModalKwargsItem,
        lease: Lease | None,
        prompt_updates: Sequence[ResolvedPromptUpdate],
    ) -> Held:
        """Take over an item that was processed and written into the arena elsewhere.

        ``item`` refers to the entry of ``lease``; without a lease it is whole and small.
        """
        with self._lock:
            self._processed[mm_hash] = _Processed(
                identity=identity,
                item=EncodedItem(dict(item.data)),
                in_arena=lease is not None,
                prompt_updates=prompt_updates,
                generation=lease.entry.generation if lease is not None else 0,
                is_new=True,
            )
            self._forget_evicted()
        return Held(lease)

    def store(self, item: MultiModalKwargsItem) -> IdentifiedItem:
        """Put a processed item's large tensors into the arena: the one copy there is.

        Where the arena has no room the item is returned whole, to travel inline.

        Raises:
            VLLMValidationError: the item has a field without data, or already holds a
                reference. Those are made here only; one that comes from outside would
                read other people's images.
        """
        if is_packed(item):
            raise VLLMValidationError("multimodal items must hold data, not references")
        tensors = plan(item)
        if tensors is None or self._arena is None:
            return self._whole(item)
        try:
            reservation = self._arena.reserve(tensors.nbytes)
        except ArenaFull:
            whole = self._whole(item)
            lease = self._arena.lease(bytes.fromhex(whole.identity))
            if lease is None:
                self.inlined += 1
                return whole
        else:
            began = time.perf_counter()
            try:
                identity = self._digest(moving_fields(tensors, item, reservation.memory))
                self.copy_seconds += time.perf_counter() - began
                lease = reservation.seal(identity)
            except BaseException:
                reservation.cancel()
                raise
        return IdentifiedItem(
            refer(tensors, item, lease.entry).data, lease.entry.identity.hex(), lease
        )

    def _whole(self, item: MultiModalKwargsItem) -> IdentifiedItem:
        identity = self._digest((name, elem.data) for name, elem in item.items())
        return IdentifiedItem(dict(item.data), identity.hex(), None)

    def _digest(self, fields: Iterable[tuple[str, Any]]) -> bytes:
        try:
            return self._hasher.digest(fields, self._model)
        except TypeError as error:
            raise VLLMValidationError(f"a multimodal item without data: {error}") from error

    def _cached(
        self, mm_hash: str
    ) -> tuple[IdentifiedItem, Sequence[ResolvedPromptUpdate]]:
        known = self._processed.get(mm_hash)
        lease = None
        if known is not None and known.in_arena:
            lease = self._lease(known)
            hold = self._holds.get(mm_hash)
            if hold is not None:
                hold.waiting -= 1
                if hold.waiting <= 0:
                    self._holds.pop(mm_hash).lease.release()
        if known is None or (known.in_arena and lease is None):
            self._processed.pop(mm_hash, None)
            raise VLLMValidationError(
                "an image of this request was dropped from the cache while the request was "
                "being processed; send it again"
            )
        self._processed[mm_hash] = self._processed.pop(mm_hash)  # most recent
        item = IdentifiedItem(
            dict(known.item.data), known.identity.hex(), lease, known.item.encoding
        )
        return item, known.prompt_updates

    def _lease(self, known: _Processed) -> Lease | None:
        """Lease the very entry that the kept item refers to."""
        lease = self._arena.lease(known.identity) if self._arena is not None else None
        if lease is not None and lease.entry.generation != known.generation:
            lease.release()  # evicted and written anew: another generation
            return None
        return lease

    def _end_old_holds(self) -> None:
        now = self._clock()
        for mm_hash in [h for h, hold in self._holds.items() if hold.until < now]:
            self._holds.pop(mm_hash).lease.release()

    def _forget_evicted(self) -> None:
        """Keep the map from growing past what the arena still holds."""
        entries = self._arena.stats().entries if self._arena is not None else 0
        limit = 2 * entries + 1024
        while len(self._processed) > limit:
            # Oldest first; an entry still in the arena is merely processed again.
            del self._processed[next(iter(self._processed))]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        # Holds and leases keep entries in place, and a hit makes an entry recent.
        pass

    def validate_input_item(self, mm_item: MultiModalKwargsItem, mm_hash: str) -> None:
        if is_packed(mm_item) and not isinstance(mm_item, IdentifiedItem):
            raise VLLMValidationError("multimodal items must hold data, not references")

    def clear_cache(self) -> None:
        with self._lock:
            self._processed.clear()
            for hold in self._holds.values():
                hold.lease.release()
            self._holds.clear()
            self._stats = self._reported = CacheInfo(hits=0, total=0)
        if self._arena is not None:
            self._arena.drop_unleased()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        with self._lock:
            if not delta:
                return self._stats
            news = self._stats - self._reported
            self._reported = self._stats
            return news

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()


def is_large(item: MultiModalKwargsItem) -> bool:
    """Whether an item holds tensors that belong in an arena."""
    return plan(item) is not None

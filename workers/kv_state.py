"""Which blocks the engine of this worker holds, from the events it publishes.

The engine announces physical blocks: one digest may be stored twice, and then its first
removal leaves a copy. So copies are counted, per medium and cache group, and only what
changes for a digest as a whole goes out to the frontends.

A digest counts as held in a medium when every group there holds it: the engine reuses as
much of a prompt as all its groups allow. Groups that need a part of the prompt only
(sliding window, Mamba) are left out of that where the engine has groups of full attention,
too: what they allow is published as resume points (``resume_points``), the longest start
that ends in one is what the engine takes (HybridKVCacheCoordinator). Groups with chunks are
counted like full attention, which may understate what will be reused and never overstates
it. A group that cannot be counted at all leaves nothing to promise.

vLLM names relied on: distributed.kv_events.BlockStored, BlockRemoved, MEDIUM_GPU;
v1.kv_cache_interface.KVCacheSpecKind. And the rules of
v1.core.single_type_kv_cache_manager: a window of N tokens needs N - 1 before a prompt's
next, a Mamba group one state; and that a step's events name every group
(``tests/edges/test_hybrid_caches.py``).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable

from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved, BlockStored
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from transfer.messages import RESUME_POINTS, KvDelta, KvSnapshot
from workers.kv_events import Event, decode_batch
from workers.resume_points import ResumePoints

logger = logging.getLogger(__name__)

# None: an engine that names no kinds has one group.
_WHOLE_KINDS = frozenset(
    {
        None,
        KVCacheSpecKind.FULL_ATTENTION.value,
        KVCacheSpecKind.MLA_ATTENTION.value,
        KVCacheSpecKind.SINK_FULL_ATTENTION.value,
    }
)
_WINDOW_KINDS = frozenset(
    {KVCacheSpecKind.SLIDING_WINDOW.value, KVCacheSpecKind.SLIDING_WINDOW_MLA.value}
)
_STATE_KINDS = frozenset({KVCacheSpecKind.MAMBA.value})
_PARTIAL_KINDS = {
    **dict.fromkeys(_WINDOW_KINDS, "once parts of the window have been evicted"),
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION.value: "once parts of a chunk have been evicted",
    **dict.fromkeys(_STATE_KINDS, "as it keeps the state after some blocks only"),
}
"""Kinds that need a part of the prompt, and when less is promised than will be reused
where they are counted like full attention."""

# In the order in which the engine told of them, which is mostly that of the prompts: a
# frontend looks up fastest what it was told in that order.
_Ordered = dict[bytes, None]

# Copies of each digest, by cache group.
_Groups = dict[int | None, dict[bytes, int]]


class KvState:
    """The resident blocks of one engine, and the deltas that lead to them."""

    def __init__(self, block_size: int, epoch: str, *, drops_last_match: bool = False) -> None:
        """``block_size`` is the tokens per hashed block; ``epoch`` names this start.

        ``drops_last_match``: the engine computes the last block it finds once more. What
        its windows then need is not followed here; they count like full attention.
        """
        self._block_size = block_size
        self._epoch = epoch
        self._seq = 0
        self._groups: dict[str, _Groups] = {}
        self._published: dict[str, _Ordered] = {}
        self._kinds: dict[int | None, str | None] = {}
        self._follows_windows = not drops_last_match
        self._resume_points: ResumePoints | None = None
        """Where the engine has groups that forget beside those of full attention."""
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
        events, at = decode_batch(payload, self._warn_once)
        touched: dict[str, _Ordered] = defaultdict(dict)
        cleared = False
        self._learn_kinds(events, touched)
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
            to_resume_points=self._resume_points is not None,
        )

    def _learn_kinds(self, events: Iterable[Event], touched: dict[str, _Ordered]) -> None:
        """Before anything is counted: a prompt's blocks are stored group by group."""
        for event in events:
            if isinstance(event, BlockStored) and self._why_not_counted(event) is None:
                self._kinds[event.group_idx] = event.kv_cache_spec_kind
        if self._resume_points is None and self._follows_windows and (
            not _WHOLE_KINDS.isdisjoint(self._kinds.values())
            and any(self._forgets(group) for group in self._kinds)
        ):
            self._resume_points = ResumePoints()
            for copies in self._groups.get(MEDIUM_GPU, {}).values():
                touched[MEDIUM_GPU].update(dict.fromkeys(copies))

    def _forgets(self, group: int | None) -> bool:
        return self._kinds.get(group) in _WINDOW_KINDS | _STATE_KINDS

    def _store(self, event: BlockStored, touched: dict[str, _Ordered]) -> None:
        if (reason := self._why_not_counted(event)) is not None:
            if not self._uncounted:
                self._uncounted = reason
                for held_in, held in self._published.items():
                    touched[held_in].update(held)
                logger.warning("no reuse of cached blocks will be promised: %s", reason)
            return
        medium = event.medium or MEDIUM_GPU
        points = self._resume_points if medium == MEDIUM_GPU else None
        forgets = points is not None and self._forgets(event.group_idx)
        when = _PARTIAL_KINDS.get(event.kv_cache_spec_kind or "")
        if when is not None and not forgets:
            self._warn_once(
                f"cache group {event.group_idx} is {event.kv_cache_spec_kind}: less may be "
                f"promised than is reused, {when}"
            )
        groups = self._groups.setdefault(medium, {})
        if event.group_idx not in groups:
            groups[event.group_idx] = {}
            # What was held without this group is held no more.
            touched[medium].update(self._published.get(medium, {}))
        copies = groups[event.group_idx]
        if points is not None and forgets:
            points.add_group(event.group_idx, self._needed_by(event), copies)
        digests = list(_as_bytes(event.block_hashes))
        for digest in digests:
            copies[digest] = copies.get(digest, 0) + 1
            touched[medium][digest] = None
            if points is not None and forgets:
                points.changed(digest)
        if points is not None and event.kv_cache_spec_kind in _WHOLE_KINDS:
            parent = event.parent_block_hash
            points.link(parent if isinstance(parent, bytes) else None, digests)

    def _needed_by(self, event: BlockStored) -> int:
        """How many blocks in a row a group that forgets needs before a prompt's next token."""
        if event.kv_cache_spec_kind in _STATE_KINDS:
            return 1
        # Without its size, a window would be as good as full attention.
        window = event.kv_cache_spec_sliding_window or 1 << 40
        return -(-(window - 1) // self._block_size)

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

    def _remove(self, event: BlockRemoved, touched: dict[str, _Ordered]) -> None:
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
                touched[medium][digest] = None
                if self._resume_points is not None and medium == MEDIUM_GPU:
                    self._resume_points.changed(digest)

    def _forget_copies(self) -> None:
        for groups in self._groups.values():
            for copies in groups.values():
                copies.clear()
        if self._resume_points is not None:
            self._resume_points.clear()

    def _publish(
        self, touched: dict[str, _Ordered], cleared: bool, at: float = 0.0
    ) -> KvDelta | None:
        """Bring what is published up to date; return the difference, None if there is none."""
        cleared = cleared and any(self._published.values())
        if cleared:
            self._published.clear()
        stored: dict[str, list[bytes]] = {}
        removed: dict[str, list[bytes]] = {}
        points = self._resume_points
        for medium, digests in list(touched.items()):
            held = self._held(medium, digests)
            self._note(medium, digests, held, stored, removed)
            if points is not None and medium == MEDIUM_GPU:
                for digest in digests.keys() - held:
                    points.unlink(digest)
        if points is not None:
            moved = points.take_moved()
            held = set() if self._uncounted else {d for d in moved if d in points}
            self._note(RESUME_POINTS, moved, held, stored, removed)
        if not (stored or removed or cleared):
            return None
        self._seq += 1
        return KvDelta(
            epoch=self._epoch, seq=self._seq, stored=stored, removed=removed, cleared=cleared,
            at=at, to_resume_points=points is not None,
        )

    def _held(self, medium: str, digests: Iterable[bytes]) -> set[bytes]:
        """Those of ``digests`` that every group holds, apart from those that forget."""
        if self._uncounted:
            return set()
        forget = medium == MEDIUM_GPU and self._resume_points is not None
        groups = [
            copies
            for group, copies in self._groups[medium].items()
            if not (forget and self._forgets(group))
        ]
        return {d for d in digests if all(d in copies for copies in groups)}

    def _note(
        self,
        medium: str,
        digests: Iterable[bytes],
        held: set[bytes],
        stored: dict[str, list[bytes]],
        removed: dict[str, list[bytes]],
    ) -> None:
        """Publish that of ``digests`` those in ``held`` are held."""
        published = self._published.setdefault(medium, {})
        for digest in digests:
            if (digest in held) == (digest in published):
                continue
            if digest in held:
                published[digest] = None
                stored.setdefault(medium, []).append(digest)
            else:
                del published[digest]
                removed.setdefault(medium, []).append(digest)

    def _warn_once(self, message: str) -> None:
        # Bounded by the kinds, groups and block sizes of one engine.
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _as_bytes(digests: Iterable[bytes | int]) -> Iterable[bytes]:
    return (digest for digest in digests if isinstance(digest, bytes))

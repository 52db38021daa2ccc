"""Keeps the index equal to what the workers publish, although messages get lost.

Each worker publishes numbered deltas. When one is missing, or the worker is new or has
restarted, what is known is not enough: a snapshot is asked for, and deltas that arrive
meanwhile wait for it and are applied behind it, so that a block removed in between does
not come back to life.

No sockets here: each method says by True that the caller must ask that worker for a
snapshot. A loss is noticed with the next delta of the worker, with its next load report,
which states how far its deltas have come and travels behind them, or by two heartbeats,
which travel on another line.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from frontend.router.kv_index import KvIndex
from transfer.messages import KvDelta, KvSnapshot

# Enough for the round trip of a snapshot at some hundred engine steps per second.
MAX_WAITING_DELTAS = 1024

# Messages of earlier starts of a worker may still be under way when it is ready again.
_RETIRED_EPOCHS = 8


@dataclass(slots=True)
class _Feed:
    """What has been heard of one worker."""

    epoch: str
    seq: int = 0
    caught_up: bool = False
    waiting: dict[tuple[str, int], KvDelta] = field(default_factory=dict)
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_RETIRED_EPOCHS))
    reported_epoch: str = ""
    """The last that a report named while it was not the current one."""
    last_heartbeat: tuple[str, int] | None = None


class KvPlane:
    """Applies deltas and snapshots to an index, each exactly once and in order."""

    def __init__(self, index: KvIndex, max_waiting: int = MAX_WAITING_DELTAS) -> None:
        self._index = index
        self._max_waiting = max_waiting
        self._feeds: dict[str, _Feed] = {}
        self.gaps = 0
        """How often deltas were found missing."""
        self.snapshots = 0
        """Snapshots applied."""
        self.deltas = 0
        """Deltas applied."""

    def on_ready(self, worker: str, epoch: str) -> bool:
        """Note that ``worker`` is reachable; deltas may have been missed before."""
        feed = self._feeds.setdefault(worker, _Feed(epoch))
        self._adopt_epoch(worker, feed, epoch)
        feed.caught_up = False
        return True

    def on_delta(self, worker: str, delta: KvDelta) -> bool:
        """Apply a delta, or keep it until a snapshot has come."""
        feed = self._feeds.get(worker)
        if feed is None:
            feed = self._feeds[worker] = _Feed(delta.epoch)
            self._keep(feed, delta)
            return True
        if delta.epoch in feed.retired:
            return False
        if delta.epoch != feed.epoch:
            return self._on_foreign_delta(worker, feed, delta)
        if delta.seq <= feed.seq:
            return False
        if not feed.caught_up:
            return self._keep(feed, delta)
        if delta.seq == feed.seq + 1:
            self._apply(worker, feed, delta)
            return False
        self.gaps += 1
        feed.caught_up = False
        self._keep(feed, delta)
        return True

    def on_snapshot(self, worker: str, snapshot: KvSnapshot) -> bool:
        """Replace all that is known of ``worker``, then apply the deltas behind it."""
        feed = self._feeds.get(worker)
        if feed is None or snapshot.epoch in feed.retired:
            return False
        if snapshot.epoch == feed.epoch and snapshot.seq < feed.seq:
            return not feed.caught_up
        self._adopt_epoch(worker, feed, snapshot.epoch)
        self._index.replace(worker, snapshot.blocks)
        self._index.go_on_at_points(worker, snapshot.to_resume_points)
        self.snapshots += 1
        feed.seq = snapshot.seq
        feed.caught_up = True
        for epoch, seq in sorted(feed.waiting):
            if epoch != feed.epoch or seq <= feed.seq:
                continue
            if seq != feed.seq + 1:
                self.gaps += 1
                feed.caught_up = False
                break
            self._apply(worker, feed, feed.waiting[epoch, seq])
        # Deltas of another epoch stay: their snapshot may be next.
        feed.waiting = {
            key: delta
            for key, delta in feed.waiting.items()
            if key[0] != feed.epoch or key[1] > feed.seq
        }
        return not feed.caught_up

    def on_position(self, worker: str, epoch: str, seq: int) -> bool:
        """Note that deltas up to ``seq`` were published before this, on the same line."""
        feed = self._feeds.get(worker)
        if feed is None or epoch in feed.retired:
            return False
        if epoch != feed.epoch:
            news = epoch != feed.reported_epoch
            feed.reported_epoch = epoch
            return news and self._start_over(worker, feed)
        if not feed.caught_up or seq <= feed.seq:
            return False
        self.gaps += 1
        feed.caught_up = False
        return True

    def on_heartbeat(self, worker: str, epoch: str, seq: int) -> bool:
        """Note that deltas up to ``seq`` were published before this, on another line.

        They may still be under way, but those that the heartbeat before spoke of should
        have come by now, and so should a snapshot that was asked for before it.
        """
        feed = self._feeds.get(worker)
        if feed is None or not epoch:
            return False
        before, feed.last_heartbeat = feed.last_heartbeat, (epoch, seq)
        if before is None or before[0] != epoch or epoch in feed.retired:
            return False
        if epoch != feed.epoch:
            return self._start_over(worker, feed)
        if feed.caught_up and feed.seq >= before[1]:
            return False
        self.gaps += feed.caught_up
        feed.caught_up = False
        return True

    def _start_over(self, worker: str, feed: _Feed) -> bool:
        self._index.clear(worker)
        feed.caught_up = False
        return True

    def on_lost(self, worker: str) -> None:
        """Forget ``worker`` and its blocks."""
        self._feeds.pop(worker, None)
        self._index.drop_worker(worker)

    def caught_up(self, worker: str) -> bool:
        """Say whether the index holds all that ``worker`` is known to have published."""
        feed = self._feeds.get(worker)
        return feed is not None and feed.caught_up

    def epoch(self, worker: str) -> str:
        """Return the start of ``worker`` that the index follows; empty when unknown."""
        feed = self._feeds.get(worker)
        return feed.epoch if feed is not None else ""

    def seq(self, worker: str) -> int:
        """Return the number of the last delta applied, 0 for none."""
        feed = self._feeds.get(worker)
        return feed.seq if feed is not None else 0

    def behind(self, worker: str) -> int:
        """Return how many deltas ``worker`` is known to have published beyond the index."""
        feed = self._feeds.get(worker)
        if feed is None:
            return 0
        known = max((seq for epoch, seq in feed.waiting if epoch == feed.epoch), default=0)
        if feed.last_heartbeat is not None and feed.last_heartbeat[0] == feed.epoch:
            known = max(known, feed.last_heartbeat[1])
        return max(0, known - feed.seq)

    def _on_foreign_delta(self, worker: str, feed: _Feed, delta: KvDelta) -> bool:
        """Keep a delta of an epoch other than the current one.

        The worker has restarted, or the message is a late one of an earlier start. A
        snapshot decides; until then better no block of the worker than wrong ones.
        """
        if not any(epoch == delta.epoch for epoch, _ in feed.waiting):
            self._keep(feed, delta)
            return self._start_over(worker, feed)
        return self._keep(feed, delta)

    def _adopt_epoch(self, worker: str, feed: _Feed, epoch: str) -> None:
        if epoch != feed.epoch:
            self._index.clear(worker)
            feed.retired.append(feed.epoch)
            feed.epoch = epoch
            feed.seq = 0
            feed.waiting = {
                key: delta
                for key, delta in feed.waiting.items()
                if key[0] not in feed.retired
            }

    def _keep(self, feed: _Feed, delta: KvDelta) -> bool:
        """Keep a delta for later; True when there were too many and all are given up."""
        if len(feed.waiting) >= self._max_waiting:
            feed.waiting.clear()
            return True
        feed.waiting[delta.epoch, delta.seq] = delta
        return False

    def _apply(self, worker: str, feed: _Feed, delta: KvDelta) -> None:
        if delta.cleared:
            self._index.clear(worker)
        for medium, digests in delta.removed.items():
            self._index.remove(worker, digests, medium)
        for medium, digests in delta.stored.items():
            self._index.store(worker, digests, medium)
        self._index.go_on_at_points(worker, delta.to_resume_points)
        feed.seq = delta.seq
        self.deltas += 1

"""Lost, late and repeated messages never leave the index wrong once a snapshot has come."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.router.kv_index import KvIndex
from frontend.router.kv_plane import KvPlane
from transfer.messages import RESUME_POINTS, KvDelta, KvSnapshot

A, B, C = b"a", b"b", b"c"


def stored(seq, *digests, epoch="e1"):
    return KvDelta(epoch=epoch, seq=seq, stored={"GPU": list(digests)})


def removed(seq, *digests, epoch="e1"):
    return KvDelta(epoch=epoch, seq=seq, removed={"GPU": list(digests)})


def snapshot(seq, *digests, epoch="e1"):
    return KvSnapshot(epoch=epoch, seq=seq, blocks={"GPU": list(digests)})


def caught_up_plane(seq=0, *digests, max_waiting=8):
    index = KvIndex()
    plane = KvPlane(index, max_waiting)
    plane.on_ready("w", "e1")
    plane.on_snapshot("w", snapshot(seq, *digests))
    return plane, index


def test_a_ready_worker_is_asked_for_a_snapshot():
    plane = KvPlane(KvIndex())
    assert plane.on_ready("w", "e1")
    assert not plane.caught_up("w")
    assert not plane.on_snapshot("w", snapshot(4, A))
    assert plane.caught_up("w")
    assert plane.seq("w") == 4


def test_deltas_in_order_are_applied_at_once():
    plane, index = caught_up_plane()
    assert not plane.on_delta("w", stored(1, A, B))
    assert not plane.on_delta("w", removed(2, B))
    assert index.resident("w") == {A}
    assert (plane.deltas, plane.gaps, plane.snapshots) == (2, 0, 1)


def test_where_an_engine_goes_on_comes_with_snapshots_and_deltas():
    plane, index = caught_up_plane(0, A, B)
    assert index.overlap([A, B]) == {"w": 2}
    points = {RESUME_POINTS: [A]}
    plane.on_delta(
        "w", KvDelta(epoch="e1", seq=1, stored=points, to_resume_points=True)
    )
    assert index.overlap([A, B]) == {"w": 1}
    plane.on_delta(
        "w", KvDelta(epoch="e1", seq=2, cleared=True, to_resume_points=True)
    )
    assert index.overlap([A, B]) == {"w": 0}
    blocks = {"GPU": [A, B], RESUME_POINTS: [B]}
    plane.on_ready("w", "e1")
    plane.on_snapshot(
        "w", KvSnapshot(epoch="e1", seq=3, blocks=blocks, to_resume_points=True)
    )
    assert index.overlap([A, B]) == {"w": 2}
    assert index.overlap([A]) == {"w": 0}


def test_repeated_and_old_deltas_are_ignored():
    plane, index = caught_up_plane(5, A)
    assert not plane.on_delta("w", removed(5, A))
    assert not plane.on_delta("w", removed(3, A))
    assert index.resident("w") == {A}
    assert plane.deltas == 0


def test_a_gap_asks_for_a_snapshot_once():
    plane, _ = caught_up_plane()
    assert plane.on_delta("w", stored(2, A))
    assert not plane.on_delta("w", stored(3, B))
    assert plane.gaps == 1
    assert not plane.caught_up("w")


def test_a_block_removed_while_the_snapshot_travels_does_not_come_back():
    plane, index = caught_up_plane()
    assert plane.on_delta("w", stored(2, B))
    assert not plane.on_delta("w", removed(3, A))
    assert not plane.on_snapshot("w", snapshot(2, A, B))
    assert index.resident("w") == {B}
    assert plane.seq("w") == 3


def test_deltas_older_than_the_snapshot_are_not_applied_again():
    plane, index = caught_up_plane()
    plane.on_delta("w", removed(2, A))
    assert not plane.on_snapshot("w", snapshot(5, A))
    assert index.resident("w") == {A}


def test_a_gap_behind_the_snapshot_asks_again_and_keeps_what_came():
    plane, index = caught_up_plane()
    plane.on_delta("w", stored(5, A))
    assert plane.on_snapshot("w", snapshot(3))
    assert not plane.caught_up("w")
    assert not plane.on_snapshot("w", snapshot(4, B))
    assert index.resident("w") == {A, B}
    assert plane.caught_up("w")


def test_too_many_waiting_deltas_are_given_up_for_another_snapshot():
    plane, index = caught_up_plane(max_waiting=3)
    assert plane.on_delta("w", stored(2, A))
    assert [plane.on_delta("w", stored(seq, B)) for seq in (3, 4, 5)] == [False, False, True]
    assert not plane.on_delta("w", stored(6, B))
    assert not plane.on_snapshot("w", snapshot(5, C))
    assert index.resident("w") == {B, C}


def test_a_cleared_delta_empties_before_it_stores():
    plane, index = caught_up_plane(0, A)
    plane.on_delta("w", KvDelta(epoch="e1", seq=1, stored={"GPU": [B]}, cleared=True))
    assert index.resident("w") == {B}


def test_a_restarted_worker_holds_nothing_until_its_snapshot():
    plane, index = caught_up_plane(7, A)
    assert plane.on_ready("w", "e2")
    assert index.resident("w") == set()
    assert not plane.on_snapshot("w", snapshot(1, B, epoch="e2"))
    assert index.resident("w") == {B}
    assert plane.seq("w") == 1


def test_messages_of_an_earlier_start_are_ignored():
    plane, index = caught_up_plane(7, A)
    plane.on_ready("w", "e2")
    assert not plane.on_snapshot("w", snapshot(7, A))
    assert index.resident("w") == set()
    assert not plane.caught_up("w")
    assert not plane.on_delta("w", stored(8, A))
    plane.on_snapshot("w", snapshot(0, epoch="e2"))
    assert not plane.on_delta("w", stored(8, A))
    assert index.resident("w") == set()


def test_a_delta_of_a_new_epoch_asks_for_a_snapshot_that_decides():
    plane, index = caught_up_plane(7, A)
    assert plane.on_delta("w", stored(2, C, epoch="e2"))
    assert index.resident("w") == set()
    assert not plane.on_snapshot("w", snapshot(1, B, epoch="e2"))
    assert index.resident("w") == {B, C}


def test_a_late_delta_of_a_forgotten_epoch_does_no_lasting_harm():
    plane, index = caught_up_plane(7, A)
    plane.on_lost("w")
    plane.on_ready("w", "e2")
    plane.on_snapshot("w", snapshot(3, B, epoch="e2"))
    assert plane.on_delta("w", stored(8, A, epoch="e1"))
    assert not plane.on_snapshot("w", snapshot(3, B, epoch="e2"))
    assert index.resident("w") == {B}
    assert not plane.on_delta("w", stored(4, C, epoch="e2"))
    assert index.resident("w") == {B, C}


def test_a_new_epoch_is_noticed_while_a_snapshot_of_the_old_is_awaited():
    plane, index = caught_up_plane(7, A)
    assert plane.on_delta("w", stored(9, A))
    assert plane.on_delta("w", stored(1, B, epoch="e2"))
    assert not plane.on_snapshot("w", snapshot(1, B, epoch="e2"))
    assert index.resident("w") == {B}


def test_a_late_snapshot_of_the_old_epoch_costs_no_delta_of_the_new():
    plane, index = caught_up_plane(7, A)
    assert plane.on_delta("w", stored(9, A))
    assert plane.on_delta("w", stored(2, B, epoch="e2"))
    assert not plane.on_snapshot("w", snapshot(9, A))
    assert not plane.on_delta("w", stored(3, C, epoch="e2"))
    assert not plane.on_snapshot("w", snapshot(1, epoch="e2"))
    assert index.resident("w") == {B, C}
    assert plane.seq("w") == 3


def test_a_snapshot_older_than_what_was_applied_does_not_turn_time_back():
    plane, index = caught_up_plane(0)
    plane.on_delta("w", stored(1, A))
    assert not plane.on_snapshot("w", snapshot(0))
    assert index.resident("w") == {A}
    plane.on_ready("w", "e1")
    assert plane.on_snapshot("w", snapshot(0))
    assert index.resident("w") == {A}


def test_an_unknown_worker_is_asked_for_a_snapshot():
    index = KvIndex()
    plane = KvPlane(index)
    assert plane.on_delta("w", stored(5, A))
    assert not plane.on_snapshot("w", snapshot(4, B))
    assert index.resident("w") == {A, B}


def test_a_lost_worker_leaves_nothing():
    plane, index = caught_up_plane(3, A)
    plane.on_lost("w")
    assert index.overlap([A]) == {}
    assert not plane.caught_up("w")
    assert plane.seq("w") == 0
    assert not plane.on_snapshot("w", snapshot(3, A))
    index.sweep(1_000)
    assert len(index) == 0


def test_a_report_tells_of_a_lost_last_delta():
    plane, index = caught_up_plane(3, A)
    assert not plane.on_position("w", "e1", 3)
    assert plane.on_position("w", "e1", 4)
    assert not plane.caught_up("w")
    assert plane.gaps == 1
    assert not plane.on_position("w", "e1", 4)  # it was asked for already
    assert not plane.on_snapshot("w", snapshot(4, B))
    assert index.resident("w") == {B}
    assert not plane.on_position("w", "e1", 4)


def test_a_report_older_than_the_snapshot_says_nothing():
    plane, _ = caught_up_plane(7, A)
    assert not plane.on_position("w", "e1", 5)
    assert plane.caught_up("w")


def test_a_report_of_a_new_start_empties_the_index_and_asks_once():
    plane, index = caught_up_plane(7, A)
    assert plane.on_position("w", "e2", 0)
    assert index.resident("w") == set()
    assert not plane.on_position("w", "e2", 0)
    assert not plane.on_snapshot("w", snapshot(0, B, epoch="e2"))
    assert index.resident("w") == {B}
    assert not plane.on_position("w", "e1", 9)
    assert plane.caught_up("w")


def test_reports_and_heartbeats_of_unknown_workers_are_ignored():
    plane = KvPlane(KvIndex())
    assert not plane.on_position("w", "e1", 3)
    assert not plane.on_heartbeat("w", "e1", 3)
    assert not plane.on_heartbeat("w", "e1", 3)


def test_a_heartbeat_gives_the_deltas_that_it_speaks_of_time_to_arrive():
    plane, index = caught_up_plane(3, A)
    assert not plane.on_heartbeat("w", "e1", 4)
    plane.on_delta("w", stored(4, B))
    assert not plane.on_heartbeat("w", "e1", 5)
    plane.on_delta("w", stored(5, C))
    assert not plane.on_heartbeat("w", "e1", 5)
    assert plane.gaps == 0
    assert index.resident("w") == {A, B, C}


def test_two_heartbeats_tell_of_a_line_on_which_nothing_comes():
    plane, index = caught_up_plane(3, A)
    assert not plane.on_heartbeat("w", "e1", 4)
    assert plane.on_heartbeat("w", "e1", 4)
    assert not plane.on_snapshot("w", snapshot(4, B))
    assert index.resident("w") == {B}


def test_a_snapshot_that_does_not_come_is_asked_for_again():
    plane = KvPlane(KvIndex())
    assert plane.on_ready("w", "e1")
    assert not plane.on_heartbeat("w", "e1", 0)
    assert plane.on_heartbeat("w", "e1", 0)
    plane.on_snapshot("w", snapshot(0, A))
    assert not plane.on_heartbeat("w", "e1", 0)


def test_a_worker_without_positions_in_its_heartbeats_is_left_alone():
    plane, _ = caught_up_plane(3, A)
    assert not plane.on_heartbeat("w", "", 0)
    assert not plane.on_heartbeat("w", "", 0)
    assert plane.caught_up("w")


class Worker:
    """A worker whose engine stores, evicts, is reset and restarts at random."""

    def __init__(self, rng):
        self.rng = rng
        self.starts = 0
        self.start()

    def start(self):
        self.starts += 1
        self.epoch, self.seq, self.held = f"e{self.starts}", 0, set()
        self.history = {0: set()}

    def step(self):
        pool = [bytes([n]) for n in range(12)]
        cleared = self.rng.random() < 0.05
        before = set() if cleared else set(self.held)
        after = {d for d in pool if (d in before) != (self.rng.random() < 0.3)}
        self.held, self.seq = after, self.seq + 1
        self.history[self.seq] = after
        return KvDelta(
            epoch=self.epoch,
            seq=self.seq,
            stored={"GPU": list(after - before)},
            removed={"GPU": list(before - after)},
            cleared=cleared,
        )

    def snapshot(self):
        return KvSnapshot(epoch=self.epoch, seq=self.seq, blocks={"GPU": list(self.held)})


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.05]),
    st.booleans(),
)
def test_any_loss_order_and_repetition_ends_in_the_truth(
    seed, loss, late, twice, restart, tells_by_report
):
    rng = random.Random(seed)
    worker, index = Worker(rng), KvIndex()
    plane = KvPlane(index, max_waiting=6)
    asked = [worker.snapshot()] if plane.on_ready("w", worker.epoch) else []
    late_deltas = []

    def deliver(delta):
        if plane.on_delta("w", delta):
            asked.append(worker.snapshot())

    for _ in range(60):
        if rng.random() < restart:
            worker.start()
            if rng.random() < 0.5 and plane.on_ready("w", worker.epoch):
                asked = [worker.snapshot()]
        delta = worker.step()
        if rng.random() >= loss:
            (late_deltas.append if rng.random() < late else deliver)(delta)
        if rng.random() < twice:
            deliver(delta)
        if late_deltas and rng.random() < 0.5:
            deliver(late_deltas.pop(rng.randrange(len(late_deltas))))
        if asked and rng.random() < 0.3 and plane.on_snapshot("w", asked.pop(0)):
            asked.append(worker.snapshot())
        if plane.caught_up("w") and plane._feeds["w"].epoch == worker.epoch:
            assert index.resident("w") == worker.history[plane.seq("w")]

    # No delta follows: reports and heartbeats tell of whatever was lost, and a few
    # snapshots mend it.
    tell = plane.on_position if tells_by_report else plane.on_heartbeat
    for _ in range(4):
        if tell("w", worker.epoch, worker.seq):
            asked.append(worker.snapshot())
        for _ in range(100):
            if asked and plane.on_snapshot("w", asked.pop(0)):
                asked.append(worker.snapshot())
    assert not asked
    assert plane.caught_up("w")
    assert plane.seq("w") == worker.seq
    assert index.resident("w") == worker.held
    index.sweep(1_000)
    assert len(index) == len(worker.held)


def test_how_far_the_index_is_behind_is_known_from_deltas_and_heartbeats():
    plane, _ = caught_up_plane(3)
    assert plane.behind("w") == plane.behind("nobody") == 0
    plane.on_heartbeat("w", "e1", 5)
    assert plane.behind("w") == 2
    plane.on_delta("w", stored(9, A))  # 4 to 8 are missing
    assert plane.behind("w") == 6
    plane.on_snapshot("w", snapshot(9, A))
    assert plane.behind("w") == 0

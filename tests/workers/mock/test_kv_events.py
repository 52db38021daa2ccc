from __future__ import annotations

from workers.kv_state import KvState
from workers.mock.block_pool import BlockEvent
from workers.mock.kv_events import encode_events

A, B = (bytes([letter]) * 32 for letter in b"ab")


def test_a_worker_reads_them_as_those_of_an_engine() -> None:
    state = KvState(16, "epoch")
    delta = state.apply(encode_events([BlockEvent(True, [A, B])], 16))
    assert delta is not None
    assert sorted(delta.stored["GPU"]) == [A, B]
    delta = state.apply(encode_events([BlockEvent(False, [A]), BlockEvent(True, [B])], 16))
    assert delta is not None
    assert (delta.removed, delta.stored) == ({"GPU": [A]}, {})


def test_they_are_read_in_order() -> None:
    state = KvState(16, "epoch")
    events = [BlockEvent(True, [A]), BlockEvent(False, [A]), BlockEvent(True, [A])]
    delta = state.apply(encode_events(events, 16))
    assert delta is not None
    assert delta.stored == {"GPU": [A]}

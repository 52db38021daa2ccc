from __future__ import annotations

from benchmarks.path.chain_processes import ring_message_bytes


def chunk(*lengths: int, overflow: bool = False) -> memoryview:
    """One chunk as MessageQueue.enqueue writes it."""
    data = bytearray([overflow]) + len(lengths).to_bytes(2, "big")
    for length in lengths:
        data += length.to_bytes(4, "big") + bytes(length)
    return memoryview(data + bytes(100))


def test_all_buffers_of_a_message_are_counted() -> None:
    assert ring_message_bytes(chunk(300, 70000, 5)) == 70305


def test_what_did_not_fit_went_another_way() -> None:
    assert ring_message_bytes(chunk(300, overflow=True)) == 0

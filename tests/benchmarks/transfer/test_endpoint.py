from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from vllm.multimodal.inputs import MultiModalKwargsItem

from benchmarks.transfer import ways
from benchmarks.transfer.endpoint import MEMORY_COPY, Order, ReceiverEnd, Result, SenderEnd
from benchmarks.transfer.items import make_item, pixels_of, sum_of
from benchmarks.transfer.ways import Frame, Receiver, Sender

KIB = 1 << 10
SECONDS = 10


class WaySender(Sender):
    """Sends pixels as they are, until one of 3 KiB."""

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        return [bytes(pixels_of(item).numpy().data)]


class WayReceiver(Receiver):
    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(frames[0]), dtype=torch.uint8)
        if pixels.nbytes == 3 * KIB:
            raise MemoryError("no room")
        if pixels.nbytes == 4 * KIB:
            pixels[9] += 1
        return pixels


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[zmq.Socket[bytes]]:
    """A sender and a receiver, here in threads."""
    monkeypatch.setitem(ways.MODULES, "plain", __name__)
    monkeypatch.setattr("benchmarks.transfer.endpoint.COPY_BYTES", 64 * KIB)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lines = []
    for role in ("receiver", "sender"):
        line = context.socket(zmq.PAIR)
        line.bind(f"ipc://{tmp_path}/{role}")
        lines.append(line)
    threads = [
        threading.Thread(target=lambda end=end: end(context, str(tmp_path)).run())
        for end in (ReceiverEnd, SenderEnd)
    ]
    for thread in threads:
        thread.start()
    for line in lines:
        assert line.poll(SECONDS * 1e3)
        assert line.recv() == b"here"
    yield lines[1]
    lines[1].send(b"")
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for line in lines:
        line.close(linger=0)
    context.term()


def carry_out(orders: zmq.Socket[bytes], order: Order) -> Result:
    orders.send(msgspec.msgpack.encode(order))
    assert orders.poll(SECONDS * 1e3)
    return msgspec.msgpack.decode(orders.recv(), type=Result)


def test_an_item_is_timed_from_the_start_of_the_hand_over(
    orders: zmq.Socket[bytes],
) -> None:
    assert carry_out(orders, Order("plain")) == Result()
    result = carry_out(orders, Order("plain", 8 * KIB, 1))
    assert result.error == ""
    assert 0 < result.received < result.usable < result.read < SECONDS


def test_a_copy_goes_nowhere(orders: zmq.Socket[bytes]) -> None:
    for number in range(20):  # more than there is memory to copy to
        result = carry_out(orders, Order(MEMORY_COPY, 8 * KIB, number))
        assert result.error == ""
        assert 0 < result.usable < result.read


def test_what_goes_wrong_is_told_and_the_next_item_passes(
    orders: zmq.Socket[bytes],
) -> None:
    carry_out(orders, Order("plain"))
    refused = carry_out(orders, Order("plain", 3 * KIB, 1)).error
    assert refused == "RuntimeError: receiver: MemoryError: no room"
    assert "other pixels" in carry_out(orders, Order("plain", 4 * KIB, 1)).error
    assert carry_out(orders, Order("plain", 8 * KIB, 1)).error == ""


def test_a_way_that_cannot_be_loaded_is_told(orders: zmq.Socket[bytes]) -> None:
    assert "KeyError" in carry_out(orders, Order("unheard of")).error


def test_items_differ_by_number_alone() -> None:
    one, other = make_item(8 * KIB, 1), make_item(8 * KIB, 2)
    assert sum_of(pixels_of(one)) != sum_of(pixels_of(other))
    assert one["image_grid_thw"] == other["image_grid_thw"]
    assert pixels_of(one).shape == (8, KIB)

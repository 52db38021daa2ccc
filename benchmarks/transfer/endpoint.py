"""``python -m benchmarks.transfer.endpoint sender|receiver DIRECTORY``: one end of a pair.

The sender does what it is ordered to do by the benchmark, one item at a time; the
receiver answers the sender. Times are of the clock that all processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import zmq

from benchmarks.transfer.items import make_item, pixels_of, sum_of
from benchmarks.transfer.ways import Frame, Receiver, Sender, load_receiver, load_sender

SECONDS_TO_ANSWER = 60.0
PROGRESS_PAUSE = 0.0002
PAUSE_BEFORE = 0.005
"""Before the clock starts. On a busy machine a process that has just used its share is made
to wait, and what it used for the preparation should not be paid by the hand-over."""
MEMORY_COPY = "memcpy"
"""The way that goes nowhere: the same bytes copied within the sender."""
COPY_BYTES = 384 << 20
"""Copies go to places in so much memory in turn, as they do in an arena: one that was
written to just before is still in the cache, and memory that is new must be mapped."""


class Order(msgspec.Struct):
    """Hand one item over. ``again`` is the item that was handed over last.

    ``pause``: have both ends rest before the clock starts.
    """

    way: str
    nbytes: int = 0
    number: int = 0
    again: bool = False
    pause: bool = True


class Result(msgspec.Struct):
    """Seconds from the start of the hand-over, or what went wrong.

    ``prepared`` is how long the untimed preparation took.
    """

    error: str = ""
    prepared: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    usable: float = 0.0
    read: float = 0.0


class Report(msgspec.Struct):
    """What a receiver answers: when, on the machine's clock, and what it has read."""

    error: str = ""
    received: float = 0.0
    usable: float = 0.0
    read: float = 0.0
    total: int = 0
    answer: bytes = b""


class SenderEnd:
    """Carries out orders."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str) -> None:
        self._orders = _connect(context, f"ipc://{directory}/sender")
        self._line = _connect(context, f"ipc://{directory}/line")
        self._ways: dict[str, Sender] = {}
        self._targets = torch.ones(COPY_BYTES, dtype=torch.uint8)
        self._next_target = 0
        self._last = make_item(1024, 0)
        self._expected = 0

    def run(self) -> None:
        self._orders.send(b"here")
        while frame := self._orders.recv():
            order = msgspec.msgpack.decode(frame, type=Order)
            try:
                result = self._carry_out(order)
            except Exception as error:  # of whatever way it is; the benchmark tells
                result = Result(error=f"{type(error).__name__}: {error}")
            self._orders.send(msgspec.msgpack.encode(result))
        for way in self._ways.values():
            way.close()
        self._line.send(b"")
        self._line.close()
        self._orders.close()

    def _carry_out(self, order: Order) -> Result:
        if not order.nbytes:
            if order.way != MEMORY_COPY:
                self._open(order.way)
            return Result()
        if not order.again:
            self._last = make_item(order.nbytes, order.number)
        if order.way == MEMORY_COPY:
            return self._copy()
        return self._hand_over(order.way, again=order.again, pause=order.pause)

    def _open(self, way: str) -> None:
        sender = load_sender(way)
        self._send(b"open", way, [sender.hello()])
        report = self._answer(sender)
        sender.welcome(report.answer)
        self._ways[way] = sender

    def _hand_over(self, way: str, *, again: bool, pause: bool) -> Result:
        sender, item = self._ways[way], self._last
        prepared = 0.0
        if not again:  # else it is known what it is
            began = time.monotonic()
            sender.prepare(item)
            prepared = time.monotonic() - began
            self._expected = sum_of(pixels_of(item))
        if pause:
            time.sleep(PAUSE_BEFORE)
        began = time.monotonic()
        self._send(b"item", way, sender.send(item))
        sent = time.monotonic()
        try:
            report = self._answer(sender)
        finally:
            sender.finish()
        if sender.carries_pixels and report.total != self._expected:
            raise ValueError("other pixels came out than went in")
        return Result(
            prepared=prepared,
            sent=sent - began,
            received=report.received - began,
            usable=report.usable - began,
            read=report.read - began,
        )

    def _copy(self) -> Result:
        source = pixels_of(self._last).view(-1)
        if self._next_target + source.nbytes > COPY_BYTES:
            self._next_target = 0
        target = self._targets[self._next_target : self._next_target + source.nbytes]
        self._next_target += source.nbytes
        time.sleep(PAUSE_BEFORE)
        began = time.monotonic()
        np.copyto(target.numpy(), source.numpy())
        usable = time.monotonic()
        sum_of(target)
        return Result(usable=usable - began, read=time.monotonic() - began)

    def _send(self, kind: bytes, way: str, frames: Sequence[Frame]) -> None:
        self._line.send_multipart([kind, way.encode(), *frames], copy=False)

    def _answer(self, sender: Sender) -> Report:
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while not self._line.poll(0 if sender.progress() else SECONDS_TO_ANSWER * 1e3):
            if time.monotonic() > deadline:
                raise TimeoutError("the receiver does not answer")
            time.sleep(PROGRESS_PAUSE)
        report = msgspec.msgpack.decode(self._line.recv(), type=Report)
        if report.error:
            raise RuntimeError(f"receiver: {report.error}")
        return report


class ReceiverEnd:
    """Takes what the sender hands over."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str) -> None:
        self._line = context.socket(zmq.PAIR)
        self._line.setsockopt(zmq.LINGER, 0)
        self._line.bind(f"ipc://{directory}/line")
        self._ways: dict[str, Receiver] = {}
        self._benchmark = _connect(context, f"ipc://{directory}/receiver")
        self._benchmark.send(b"here")

    def run(self) -> None:
        while True:
            kind, *frames = self._line.recv_multipart(copy=False)
            received = time.monotonic()
            if not kind.buffer:
                break
            way, buffers = frames[0].bytes.decode(), [frame.buffer for frame in frames[1:]]
            try:
                if kind.bytes == b"open":
                    report = self._open(way, buffers)
                else:
                    report = self._take(way, buffers, received)
            except Exception as error:  # told to the sender, which tells the benchmark
                report = Report(error=f"{type(error).__name__}: {error}")
            self._line.send(msgspec.msgpack.encode(report))
            del kind, frames, buffers
        for way in self._ways.values():
            way.close()
        self._line.close()
        self._benchmark.close()

    def _open(self, way: str, frames: Sequence[memoryview]) -> Report:
        receiver = load_receiver(way)
        answer = receiver.connect(bytes(frames[0]))
        self._ways[way] = receiver
        return Report(answer=answer)

    def _take(self, way: str, frames: Sequence[memoryview], received: float) -> Report:
        receiver = self._ways[way]
        pixels = receiver.receive(frames)
        pixels.view(-1)[0].item()
        usable = time.monotonic()
        total = sum_of(pixels)
        read = time.monotonic()
        del pixels
        receiver.finish()
        return Report(received=received, usable=usable, read=read, total=total)


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> zmq.Socket[bytes]:
    line = context.socket(zmq.PAIR)
    line.setsockopt(zmq.LINGER, 1000)
    line.connect(address)
    return line


def main() -> None:
    role, directory = sys.argv[1:]
    torch.set_num_threads(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = SenderEnd if role == "sender" else ReceiverEnd
    end(context, directory).run()


if __name__ == "__main__":
    main()

"""What every way of handing pixels over has: a sender and a receiver.

A way is one module with the two classes; the processes at both ends (``endpoint``) load
it by name, so that a peer's way loads the peer in its own Python only.

Between ``Sender.send`` and the return of ``Receiver.receive`` lies what is timed. The
frames travel over a ZeroMQ socket that is the same for all ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem

Frame = bytes | bytearray | memoryview

MODULES = {
    "shm": "benchmarks.transfer.way_shm",
    "nixl": "benchmarks.transfer.way_nixl",
    "inline": "benchmarks.transfer.way_inline",
    "message": "benchmarks.transfer.way_message",
    "raw_nixl": "benchmarks.transfer.way_raw_nixl",
    "vllm_ipc": "benchmarks.transfer.way_vllm_ipc",
    "torch_shm": "benchmarks.transfer.way_torch_shm",
    "dynamo_shm": "benchmarks.transfer.way_dynamo_shm",
    "dynamo_nixl": "benchmarks.transfer.way_dynamo_nixl",
}
"""Module of each way; in it are ``WaySender`` and ``WayReceiver``."""


class Sender:
    """The end that has the processor's output."""

    carries_pixels = True
    """Whether the receiver gets them, so that it is checked which."""

    def hello(self) -> bytes:
        """Return what the receiver needs to know before the first item."""
        return b""

    def welcome(self, answer: bytes) -> None:
        """Take what the receiver answered to ``hello``."""

    def prepare(self, item: MultiModalKwargsItem) -> None:
        """Do, untimed, what is not part of the hand-over."""

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        """Hand the item over; the frames are sent at once. Timed."""
        raise NotImplementedError

    def progress(self) -> bool:
        """Serve a receiver that reads from here; False if there is no need to."""
        return False

    def finish(self) -> None:
        """Let go of the item, once the receiver has read it. Untimed."""

    def close(self) -> None:
        """Give everything back."""


class Receiver:
    """The end that has the model."""

    def connect(self, hello: bytes) -> bytes:
        """Take the sender's ``hello``, return the answer to it."""
        return b""

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        """Return the pixels, usable: a tensor whose first byte can be read. Timed."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let go of the item. Untimed."""

    def close(self) -> None:
        """Give everything back."""


def load_sender(way: str) -> Sender:
    sender: Sender = import_module(MODULES[way]).WaySender()
    return sender


def load_receiver(way: str) -> Receiver:
    receiver: Receiver = import_module(MODULES[way]).WayReceiver()
    return receiver

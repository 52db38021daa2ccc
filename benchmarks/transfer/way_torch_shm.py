"""torch.multiprocessing: the tensor's storage moves into shared memory of its own.

The message is a pickle, as torch makes it: both ends are this benchmark's.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # teaches ForkingPickler about tensors
from vllm.multimodal.inputs import MultiModalKwargsItem

from benchmarks.transfer.items import pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender


class WaySender(Sender):
    def hello(self) -> bytes:
        # The file descriptor is fetched from this process by one that has its key.
        return bytes(current_process().authkey)

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        return [memoryview(ForkingPickler.dumps(pixels_of(item)))]


class WayReceiver(Receiver):
    def connect(self, hello: bytes) -> bytes:
        current_process().authkey = hello
        return b""

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        pixels: torch.Tensor = pickle.loads(frames[0])
        return pixels

"""vLLM's own way to its engine: msgpack, with tensors as frames of their own.

vLLM names relied on: v1.serial_utils.MsgpackEncoder, MsgpackDecoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.transfer.items import pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender


class WaySender(Sender):
    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        frames: Sequence[Frame] = self._encoder.encode(item)
        return frames


class WayReceiver(Receiver):
    def __init__(self) -> None:
        self._decoder = MsgpackDecoder(MultiModalKwargsItem)

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        return pixels_of(self._decoder.decode(frames))

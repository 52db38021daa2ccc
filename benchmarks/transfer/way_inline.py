"""Ours when nothing else works: tensors as frames behind the request.

One hop of it, frontend to worker. To the engine it is one more, which is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.multimodal.inputs import MultiModalKwargsItem

from benchmarks.transfer.items import pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender
from transfer.payload import decode_payload_as, encode_payload


class WaySender(Sender):
    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        return encode_payload(item)


class WayReceiver(Receiver):
    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        return pixels_of(decode_payload_as(MultiModalKwargsItem, frames))

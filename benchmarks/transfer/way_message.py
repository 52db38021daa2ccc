"""What any hand-over costs whose message is vLLM's: the item without its pixels.

The receiver looks at pixels that it has had all along, as many as there would be. So this
is what remains of a hand-over if finding, writing and reading the pixels took no time.

vLLM names relied on: v1.serial_utils.MsgpackEncoder, MsgpackDecoder;
multimodal.inputs.MultiModalKwargsItem, MultiModalFieldElem.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.transfer.items import MIB, ROW_BYTES, pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender

MOST_BYTES = 128 * MIB


class WaySender(Sender):
    carries_pixels = False

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        size = torch.tensor([pixels_of(item).nbytes])
        without = {**item.data, "pixel_values": _elem_like(item, size)}
        frames: Sequence[Frame] = self._encoder.encode(MultiModalKwargsItem(without))
        return frames


class WayReceiver(Receiver):
    def __init__(self) -> None:
        self._decoder = MsgpackDecoder(MultiModalKwargsItem)
        self._pixels = torch.ones(MOST_BYTES, dtype=torch.uint8)

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        nbytes = int(pixels_of(self._decoder.decode(frames)))
        return self._pixels[:nbytes].view(-1, ROW_BYTES)


def _elem_like(item: MultiModalKwargsItem, data: torch.Tensor) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=item["pixel_values"].field)

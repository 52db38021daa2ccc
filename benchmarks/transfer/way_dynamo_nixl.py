"""Dynamo's NIXL pair, driven as its frontend and its vLLM worker drive it.

Runs in the peer's own Python. Dynamo names relied on:
common.multimodal.mm_kwargs_transfer.MmKwargsNixlSender, MmKwargsNixlReceiver,
MmKwargsTransferMetadata, decode_mm_kwargs_item.
"""

from __future__ import annotations

from typing import Any

from dynamo.common.multimodal.mm_kwargs_transfer import (
    MmKwargsNixlReceiver,
    MmKwargsNixlSender,
    MmKwargsTransferMetadata,
)

from benchmarks.transfer.dynamo_pair import DynamoReceiver, DynamoSender
from benchmarks.transfer.items import MIB

POOL_ITEM_BYTES = 40 * MIB
"""Its receiver registers buffers ahead. The size it chooses by itself, 8 MiB, is just
missed by 8 MiB of pixels and a header; with this one 1, 8 and 32 MiB find a buffer."""
POOL_ITEMS = 2


class WaySender(DynamoSender):
    def make_sender(self) -> Any:
        return MmKwargsNixlSender()


class WayReceiver(DynamoReceiver):
    key = "mm_kwargs_nixl"
    metadata = MmKwargsTransferMetadata

    def __init__(self) -> None:
        super().__init__()
        self._kept = MmKwargsNixlReceiver(POOL_ITEM_BYTES, POOL_ITEMS)

    def make_receiver(self) -> Any:
        return self._kept

"""Dynamo's shared memory pair, driven as its frontend and its vLLM worker drive it.

Runs in the peer's own Python. Dynamo names relied on:
common.multimodal.mm_kwargs_transfer.MmKwargsShmSender, MmKwargsShmReceiver,
MmKwargsShmTransferMetadata, decode_mm_kwargs_item.
"""

from __future__ import annotations

from typing import Any

from dynamo.common.multimodal.mm_kwargs_transfer import (
    MmKwargsShmReceiver,
    MmKwargsShmSender,
    MmKwargsShmTransferMetadata,
)

from benchmarks.transfer.dynamo_pair import DynamoReceiver, DynamoSender


class WaySender(DynamoSender):
    def make_sender(self) -> Any:
        return MmKwargsShmSender()


class WayReceiver(DynamoReceiver):
    key = "mm_kwargs_shm"
    metadata = MmKwargsShmTransferMetadata

    def make_receiver(self) -> Any:
        # Its worker makes a new one for every request, too.
        return MmKwargsShmReceiver()

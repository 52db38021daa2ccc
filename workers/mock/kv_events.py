"""What happened in a mock's block pool, in the words of vLLM's KV events.

vLLM names relied on: distributed.kv_events.BlockStored, BlockRemoved, KVEventBatch,
MEDIUM_GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from vllm.distributed.kv_events import MEDIUM_GPU, BlockRemoved, BlockStored, KVEventBatch

from workers.mock.block_pool import BlockEvent

_encoder = msgspec.msgpack.Encoder()


def encode_events(events: Sequence[BlockEvent], block_size: int) -> bytes:
    """Return one batch as an engine publishes it, for ``KvState.apply``.

    Tokens and parents are left out: nobody behind a worker process reads them.
    """
    batch = KVEventBatch(
        ts=time.time(),
        events=[
            BlockStored(
                block_hashes=[*event.digests],
                parent_block_hash=None,
                token_ids=[],
                block_size=block_size,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None,
            )
            if event.stored
            else BlockRemoved(block_hashes=[*event.digests], medium=MEDIUM_GPU)
            for event in events
        ],
    )
    return _encoder.encode(batch)

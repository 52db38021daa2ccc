"""Ours on one host: the pixels are written into an arena that the receiver has mapped.

The arena is small beside what is sent, so that entries are evicted and their space is
used again, as in a server that has run for a while. The preparation is the digest that
makes the identity: the server digests while it copies, and it is timed apart here.

The sender does with an item what the frontend does with one that a process beside it has
worked on: writes it, adds it to the processor cache, and takes it from there, where it
also finds one that it has had before.

vLLM names relied on: v1.serial_utils.MsgpackDecoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackDecoder

from benchmarks.transfer.items import MIB, pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender
from frontend.arena_cache import ArenaProcessorCache
from transfer.arena import Arena
from transfer.arena_view import ArenaView
from transfer.identity import SEED_BYTES, IdentityHasher
from transfer.pack import plan, read_reference, refer, resolve, write
from transfer.payload import encode_payload
from transfer.tensor_ref import ArenaId

ARENA_BYTES = 384 * MIB


class WaySender(Sender):
    def __init__(self) -> None:
        self._arena = Arena(ARENA_BYTES)
        self._hasher = IdentityHasher(bytes(SEED_BYTES))
        self._cache = ArenaProcessorCache(self._arena, self._hasher, "benchmark")
        self._identity = b""
        self._key = ""
        self._sent: MultiModalKwargsItem | None = None
        """Leases its entry."""

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(self._arena.id)

    def prepare(self, item: MultiModalKwargsItem) -> None:
        self._identity = self._hasher.digest(
            ((name, elem.data) for name, elem in item.items()), "benchmark"
        )
        self._key = self._identity.hex()

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        if not self._cache.is_cached_item(self._key):
            self._add(item)
        self._sent, _ = self._cache.get_and_update_item(None, self._key)
        return encode_payload(self._sent)

    def _add(self, item: MultiModalKwargsItem) -> None:
        tensors = plan(item)
        if tensors is None:
            raise ValueError("an item without large tensors")
        reservation = self._arena.reserve(tensors.nbytes)
        write(tensors, item, reservation.memory)
        lease = reservation.seal(self._identity)
        packed = refer(tensors, item, lease.entry)
        self._cache.add(self._key, self._identity, packed, lease, ())

    def finish(self) -> None:
        self._sent = None

    def close(self) -> None:
        self._arena.close()


class WayReceiver(Receiver):
    def connect(self, hello: bytes) -> bytes:
        self._view = ArenaView(msgspec.msgpack.decode(hello, type=ArenaId))
        # Made once, as the worker's and the engine's decoders are.
        self._decoder = MsgpackDecoder(MultiModalKwargsItem)
        return b""

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        item = self._decoder.decode(frames)
        reference = read_reference(item)
        return pixels_of(resolve(item, self._view.read(reference.entry), reference))

    def close(self) -> None:
        self._view.close()

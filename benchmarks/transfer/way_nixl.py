"""Ours across hosts: the receiver reads from the sender's arena into one of its own.

The receiver does what a worker does with a request that arrives: what its cache holds is
not read again, the reference is changed to where the bytes are now, and the tensor is
built over a mapping of that arena, as the engine's processes have it. The announcement
that something is being read, by which the sender knows to serve it, is not sent: the
sender serves as long as it waits for an answer to a new item. Of one that the receiver
has nothing is read, so then it does not.

vLLM names relied on: v1.serial_utils.MsgpackDecoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import uvloop
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackDecoder

from benchmarks.transfer.items import pixels_of
from benchmarks.transfer.way_shm import ARENA_BYTES
from benchmarks.transfer.way_shm import WaySender as ArenaSender
from benchmarks.transfer.ways import Receiver
from transfer.arena import Arena
from transfer.arena_view import ArenaView
from transfer.leases import Lease
from transfer.nixl.export import ArenaExport
from transfer.nixl.reader import ArenaReader
from transfer.pack import move_reference, read_reference, resolve
from transfer.tensor_ref import EntryRef, RemoteArena
from workers.nixl_source import NixlSource
from workers.tensor_cache import TensorCache

SECONDS_TO_CONNECT = 30.0
SECONDS_TO_READ = 20.0


class WaySender(ArenaSender):
    def __init__(self) -> None:
        super().__init__()
        self._export = ArenaExport(self._arena)

    def hello(self) -> bytes:
        self._export.progress_for("receiver", SECONDS_TO_CONNECT)
        return msgspec.msgpack.encode(self._export.remote)

    def welcome(self, answer: bytes) -> None:
        self._export.progress_for("receiver", 0)

    def _add(self, item: MultiModalKwargsItem) -> None:
        super()._add(item)
        self._export.progress_for("receiver", SECONDS_TO_READ)

    def finish(self) -> None:
        self._export.progress_for("receiver", 0)
        super().finish()

    def close(self) -> None:
        self._export.close()
        super().close()


class WayReceiver(Receiver):
    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._arena = Arena(ARENA_BYTES)
        self._view = ArenaView(self._arena.id)
        self._reader = ArenaReader(self._arena)
        self._reader.start().result(SECONDS_TO_CONNECT)
        self._cache = TensorCache(self._arena, self._reader, SECONDS_TO_READ)
        self._decoder = MsgpackDecoder(MultiModalKwargsItem)
        self._lease: Lease | None = None

    def connect(self, hello: bytes) -> bytes:
        remote = msgspec.msgpack.decode(hello, type=RemoteArena)
        self._source = NixlSource(remote, lambda news: None)
        self._reader.connect(remote).result(SECONDS_TO_CONNECT)
        return b""

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        item = self._decoder.decode(frames)
        entry = read_reference(item).entry
        lease = self._cache.find(entry)
        if lease is None:
            lease = self._loop.run_until_complete(self._pull(entry))
        self._lease = lease
        item = move_reference(item, lease.entry)
        reference = read_reference(item)
        return pixels_of(resolve(item, self._view.read(reference.entry), reference))

    async def _pull(self, entry: EntryRef) -> Lease:
        (lease,) = await self._cache.wait([self._cache.pull(self._source, entry)])
        return lease

    def finish(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def close(self) -> None:
        self._reader.close()
        self._view.close()
        self._arena.close()
        self._loop.close()

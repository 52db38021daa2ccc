"""NIXL alone: a READ from a registered buffer to a registered buffer, nothing around it.

What NIXL costs at least. The receiver times it from the moment it knows what to read.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
import torch
from nixl._api import nixl_agent, nixl_agent_config
from vllm.multimodal.inputs import MultiModalKwargsItem

from benchmarks.transfer.items import MIB, ROW_BYTES, pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender

BUFFER_BYTES = 128 * MIB
SECONDS_TO_READ = 30.0


class _Offer(msgspec.Struct):
    agent: bytes
    address: int


def _make_agent(role: str) -> nixl_agent:
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return nixl_agent(f"raw-{role}-{secrets.token_hex(4)}", config)


class WaySender(Sender):
    def __init__(self) -> None:
        self._agent = _make_agent("sender")
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
        self._registered = self._agent.register_memory(self._buffer)

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(
            _Offer(self._agent.get_agent_metadata(), self._buffer.data_ptr())
        )

    def prepare(self, item: MultiModalKwargsItem) -> None:
        pixels = pixels_of(item).view(-1)
        self._buffer[: pixels.nbytes] = pixels

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        return [msgspec.msgpack.encode(pixels_of(item).nbytes)]

    def progress(self) -> bool:
        # Without a progress thread nothing is served unless somebody calls.
        self._agent.get_new_notifs()
        return True

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class WayReceiver(Receiver):
    def __init__(self) -> None:
        self._agent = _make_agent("receiver")
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
        self._registered = self._agent.register_memory(self._buffer)

    def connect(self, hello: bytes) -> bytes:
        offer = msgspec.msgpack.decode(hello, type=_Offer)
        self._remote_address = offer.address
        self._remote = self._agent.add_remote_agent(offer.agent)
        return b""

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        nbytes = msgspec.msgpack.decode(frames[0], type=int)
        here, there = (
            self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            for address in (self._buffer.data_ptr(), self._remote_address)
        )
        transfer = self._agent.initialize_xfer("READ", here, there, self._remote)
        deadline = time.monotonic() + SECONDS_TO_READ
        state = self._agent.transfer(transfer)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError("the READ did not end")
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"the READ ended as {state}")
        self._agent.release_xfer_handle(transfer)
        return self._buffer[:nbytes].view(-1, ROW_BYTES)

    def close(self) -> None:
        self._agent.remove_remote_agent(self._remote)
        self._agent.deregister_memory(self._registered)

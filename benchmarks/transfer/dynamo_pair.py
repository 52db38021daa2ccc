"""What Dynamo's two ways have in common: how its frontend and worker call them.

The sender's ``prepare`` makes metadata that travels with the request; the receiver's
``receive`` gives bytes, which ``decode_mm_kwargs_item`` turns into the item.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from dynamo.common.multimodal.mm_kwargs_transfer import decode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalKwargsItem

from benchmarks.transfer.items import pixels_of
from benchmarks.transfer.ways import Frame, Receiver, Sender


class DynamoSender(Sender):
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._sender = self.make_sender()
        self._to_clean: list[Any] = []

    def make_sender(self) -> Any:
        raise NotImplementedError

    def send(self, item: MultiModalKwargsItem) -> Sequence[Frame]:
        feature = SimpleNamespace(data=item, mm_hash="0" * 64, modality="image")
        arguments, self._to_clean = self._loop.run_until_complete(
            self._sender.prepare([feature], "image")
        )
        if arguments is None:
            raise RuntimeError("Dynamo's sender is not available")
        return [msgspec.msgpack.encode(arguments)]

    def finish(self) -> None:
        self._loop.run_until_complete(self._sender.cleanup(self._to_clean))
        self._to_clean = []

    def close(self) -> None:
        self._loop.close()


class DynamoReceiver(Receiver):
    key = ""
    metadata: Any = None

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def make_receiver(self) -> Any:
        raise NotImplementedError

    def receive(self, frames: Sequence[memoryview]) -> torch.Tensor:
        arguments = msgspec.msgpack.decode(frames[0])
        metadata = self.metadata.model_validate(arguments[self.key])
        results = self._loop.run_until_complete(self.make_receiver().receive(metadata))
        return pixels_of(decode_mm_kwargs_item(results["__pickled_kwargs_item__"][0]))

    def close(self) -> None:
        self._loop.close()

"""What the engine's input socket gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder

from tests.fakes import make_item, make_request, within
from transfer.payload import encode_payload
from workers.engine_inputs import EngineInputs

pytestmark = pytest.mark.anyio

ENGINE = b"\x00\x00"


class Client:
    """Of vLLM's client what inputs need; its other end is a socket as an engine has."""

    core_engine = ENGINE

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.input_socket = context.socket(zmq.ROUTER)
        self.input_socket.bind(address)

    def ensure_alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError()


class Ends:
    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.client = Client(self.context, address)
        self.engine: zmq.asyncio.Socket = self.context.socket(zmq.DEALER)
        self.engine.setsockopt(zmq.IDENTITY, ENGINE)
        self.engine.connect(address)

    async def heard(self) -> tuple[EngineCoreRequestType, list[memoryview]]:
        parts = await within(self.engine.recv_multipart(copy=False))
        kind, *frames = [part.buffer for part in parts]
        return EngineCoreRequestType(bytes(kind)), frames


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    ends = Ends(f"ipc://{tmp_path}/engine")
    await ends.engine.send(b"ready")
    await within(ends.client.input_socket.recv_multipart())
    yield ends
    ends.context.destroy(linger=0)


def inputs_of(ends: Ends) -> EngineInputs:
    return EngineInputs(cast("AsyncMPClient", ends.client))


async def test_a_request_arrives_as_vllm_would_send_it(ends: Ends) -> None:
    request = make_request("r1", items=[make_item(3.0)])
    inputs_of(ends).add(encode_payload(request))
    kind, frames = await ends.heard()
    assert kind == EngineCoreRequestType.ADD
    decoded: Any = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert decoded.request_id == "r1"
    assert decoded.mm_features[0].data == request.mm_features[0].data  # type: ignore[index]


async def test_all_sends_keep_their_order_with_those_of_vllm(ends: Ends) -> None:
    inputs = inputs_of(ends)
    for number in range(20):
        inputs.add(encode_payload(make_request(f"r{number}")))
        message = (ENGINE, EngineCoreRequestType.UTILITY.value, str(number).encode())
        await ends.client.input_socket.send_multipart(message, copy=False)
        inputs.abort([f"r{number}"])
    kinds = [(await ends.heard())[0] for _ in range(60)]
    one_turn = ["ADD", "UTILITY", "ABORT"]
    assert [kind.name for kind in kinds] == one_turn * 20


async def test_a_dead_engine_gets_nothing(ends: Ends) -> None:
    inputs = inputs_of(ends)
    ends.client.resources.engine_dead = True
    inputs.abort(["r"])
    with pytest.raises(EngineDeadError):
        inputs.add(encode_payload(make_request("r")))


async def test_nothing_to_abort_says_nothing(ends: Ends) -> None:
    inputs = inputs_of(ends)
    inputs.abort([])
    inputs.abort(["r"])
    kind, frames = await ends.heard()
    assert (kind, MsgpackDecoder(list[str]).decode(frames)) == (
        EngineCoreRequestType.ABORT,
        ["r"],
    )

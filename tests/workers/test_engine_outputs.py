"""Outputs that pass from the engine's socket straight on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from tests.fakes import within
from workers.engine_outputs import follow_engine

pytestmark = pytest.mark.anyio


class EngineSide:
    """vLLM's client as far as outputs go, and the engine's end of its socket."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        pull = self.context.socket(zmq.PULL)
        pull.bind(address)
        self.push: zmq.Socket[bytes] = zmq.Socket(zmq.Context.shadow(self.context), zmq.PUSH)
        self.push.setsockopt(zmq.LINGER, 0)
        self.push.connect(address)
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.client = cast(
            AsyncMPClient,
            SimpleNamespace(
                resources=SimpleNamespace(
                    output_socket=pull, output_queue_task=None, engine_dead=False
                ),
                decoder=MsgpackDecoder(EngineCoreOutputs),
                utility_results=self.utility_results,
            ),
        )
        self.seen: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    def follow(self) -> asyncio.Task[None]:
        return asyncio.ensure_future(follow_engine(self.client, self.seen.put_nowait))

    def say(self, outputs: EngineCoreOutputs) -> None:
        self.push.send_multipart(MsgpackEncoder().encode(outputs))

    def close(self) -> None:
        self.push.close()
        self.client.resources.output_socket.close(linger=0)  # type: ignore[union-attr]
        self.context.term()


@pytest.fixture
def side(tmp_path: Path, anyio_backend: str) -> Iterator[EngineSide]:
    side = EngineSide(f"ipc://{tmp_path}/o"[:100])
    yield side
    side.close()


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_outputs_come_in_order_and_also_those_sent_before(side: EngineSide) -> None:
    side.say(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [0])]))
    task = side.follow()
    for token in range(1, 300):
        side.say(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [token])]))
    for token in range(300):
        outputs = await within(side.seen.get())
        assert outputs.outputs[0].new_token_ids == [token]
    await end(task)


async def test_answers_to_calls_go_to_who_asked(side: EngineSide) -> None:
    task = side.follow()
    asked = side.utility_results[7] = asyncio.get_running_loop().create_future()
    for call_id in (8, 7):  # nobody waits for the answer to 8
        side.say(
            EngineCoreOutputs(
                utility_output=UtilityOutput(call_id, result=UtilityResult(["done"]))
            )
        )
    assert await within(asked) == ["done"]
    assert side.seen.empty()
    await end(task)


async def test_the_end_of_the_engine_ends_the_reading(side: EngineSide) -> None:
    task = side.follow()
    side.push.send(EngineCoreProc.ENGINE_CORE_DEAD)
    with pytest.raises(EngineDeadError):
        await within(task)
    assert side.client.resources.engine_dead


async def test_what_cannot_be_read_ends_the_reading(side: EngineSide) -> None:
    task = side.follow()
    side.push.send(b"\xc1")
    with pytest.raises(Exception, match=r"MessagePack|MsgPack|malformed"):
        await within(task)


async def test_vllms_reader_is_kept_from_starting(side: EngineSide) -> None:
    task = side.follow()
    last = EngineCoreOutput("r", [], finish_reason=FinishReason.STOP)
    side.say(EngineCoreOutputs(outputs=[last]))
    await within(side.seen.get())
    assert side.client.resources.output_queue_task is task
    with pytest.raises(RuntimeError, match="already"):
        await within(side.follow())
    await end(task)

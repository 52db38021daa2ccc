"""Reads what the engine sends, in one callback per wake-up.

vLLM's own reader is a task that decodes, queues and wakes another task for every step;
this passes decoded outputs straight on, because each token comes this way.

vLLM names relied on: AsyncMPClient.resources (output_socket, output_queue_task,
engine_dead), decoder, utility_results and _ensure_output_queue_task, which does
nothing when there is a task; core_client._process_utility_output; EngineCoreOutputs;
EngineCoreProc.ENGINE_CORE_DEAD; EngineDeadError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError

from transfer.messages import Frame
from transfer.socket_reader import SocketReader


async def follow_engine(
    engine: AsyncMPClient, on_outputs: Callable[[EngineCoreOutputs], None]
) -> None:
    """Call ``on_outputs`` with all outputs of requests until cancelled.

    Start it before anything else is asked of the engine: answers come this way too.

    Raises:
        EngineDeadError: the engine has died.
    """
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(frames: list[Frame]) -> None:
        try:
            _pass_on(engine, frames, on_outputs)
        except Exception as error:  # whatever it is, nothing can be read from here on
            if not failed.done():
                failed.set_exception(error)

    if engine.resources.output_queue_task is not None:
        raise RuntimeError("vLLM is reading the engine's outputs already")
    # In vLLM's reader's place, so that it does not start one.
    engine.resources.output_queue_task = asyncio.current_task()
    if (output_socket := engine.resources.output_socket) is None:
        raise RuntimeError("the engine has been shut down")
    socket: zmq.Socket[bytes] = zmq.Socket.shadow(output_socket)
    reader = SocketReader(socket, on_message, copy=True)
    try:
        await failed
    finally:
        reader.close()


def _pass_on(
    engine: AsyncMPClient,
    frames: list[Frame],
    on_outputs: Callable[[EngineCoreOutputs], None],
) -> None:
    if len(frames) == 1 and bytes(frames[0]) == EngineCoreProc.ENGINE_CORE_DEAD:
        engine.resources.engine_dead = True
        raise EngineDeadError()
    outputs: EngineCoreOutputs = engine.decoder.decode(frames)
    if outputs.utility_output is not None:
        if outputs.utility_output.call_id in engine.utility_results:
            _process_utility_output(outputs.utility_output, engine.utility_results)
    elif outputs.outputs or outputs.scheduler_stats is not None:
        on_outputs(outputs)

"""Hands requests to the engine as they came.

What a frontend sends is what the engine reads, so a request that has been checked goes on
in the frames it came in. vLLM's client would encode it anew and await its sending, which
takes longer than all else that a worker does for a request.

vLLM names relied on: AsyncMPClient.input_socket, core_engine, encoder and ensure_alive,
and that a message is the engine's name, a request type and an encoded value
(_send_input); EngineCoreRequestType.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import AsyncMPClient

from transfer.messages import Frame
from transfer.payload import encode_payload


class EngineInputs:
    """One engine's input. Used on the event loop's thread; nothing here waits."""

    def __init__(self, engine: AsyncMPClient) -> None:
        self._engine = engine
        # vLLM's own sends on this socket never queue, so the order of all is kept.
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(engine.input_socket)

    def add(self, frames: Sequence[Frame]) -> None:
        """Start the request that ``frames`` encode.

        Raises:
            EngineDeadError: the engine has died.
        """
        self._send(EngineCoreRequestType.ADD, frames)

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests; those that the engine does not know are ignored."""
        if request_ids and not self._engine.resources.engine_dead:
            self._send(EngineCoreRequestType.ABORT, encode_payload(request_ids))

    def _send(self, kind: EngineCoreRequestType, frames: Sequence[Any]) -> None:
        self._engine.ensure_alive()
        self._socket.send_multipart(
            (self._engine.core_engine, kind.value, *frames), zmq.NOBLOCK, copy=False
        )

"""How many bytes a frontend sends to a worker for a request with one picture.

A real frontend, asked over HTTP, sends to this process, which poses as a worker: it
announces itself, answers ``Hello`` and counts the frames of the request as they come out
of the socket. The token ids are taken off, as msgpack encodes them: what is left is what
the picture and the request's settings cost, whatever the length of the prompt.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from benchmarks.client import Client
from benchmarks.metrics import Metric
from benchmarks.path.chain_processes import total_bytes
from benchmarks.path.facts import demo_facts
from benchmarks.processes import (
    CHECKPOINT,
    SECONDS_TO_START,
    Servers,
    free_ports,
    is_up,
)
from benchmarks.prompts import jpeg, picture_request
from transfer.identity import IdentityHasher, load_or_create_seed
from transfer.messages import (
    AddRequest,
    AskSnapshot,
    Frame,
    Hello,
    KvSnapshot,
    Message,
    Outputs,
    Ping,
    Pong,
    Ready,
    decode,
    encode,
)
from transfer.pack import is_packed, read_reference
from transfer.payload import decode_request, encode_payload
from transfer.process import this_process
from transfer.registry import Registry, WorkerRecord

NAME, UNIT, GOAL = "request_bytes_beyond_tokens", "B", "<=2048"
PICTURES = ((224, 224), (4000, 3000))


@dataclass(frozen=True)
class RequestSize:
    """One request as it came out of the socket."""

    total: int
    tokens: int
    token_bytes: int
    pixel_bytes: int
    """Bytes that its references name, which did not travel."""

    @property
    def beyond_tokens(self) -> int:
        return self.total - self.token_bytes


def size_of(frames: Sequence[Frame]) -> RequestSize:
    """Measure an ``AddRequest`` with its payload."""
    _, payload = decode(frames)
    request = decode_request(payload)
    items = [f.data for f in request.mm_features or () if f.data is not None]
    tokens = request.prompt_token_ids or []
    return RequestSize(
        total=total_bytes(frames),
        tokens=len(tokens),
        token_bytes=len(msgspec.msgpack.encode(tokens)),
        pixel_bytes=sum(read_reference(i).entry.nbytes for i in items if is_packed(i)),
    )


def measure() -> list[Metric]:
    with Servers() as servers:
        sizes = asyncio.run(_measure(servers))
    for (width, height), size in zip(PICTURES, sizes, strict=True):
        print(
            f"  {width}x{height}: {size.total} B in all, {size.token_bytes} B of them "
            f"{size.tokens} token ids; {size.beyond_tokens} B beyond them. "
            f"{size.pixel_bytes} B of pixels stayed in shared memory."
        )
    return [Metric(NAME, max(size.beyond_tokens for size in sizes), UNIT, GOAL)]


async def _measure(servers: Servers) -> list[RequestSize]:
    registry = Registry(servers.registry, "default")
    context = zmq.asyncio.Context()
    posed = PosedWorker(registry, context)
    listening = asyncio.create_task(posed.run())
    try:
        (port,) = free_ports(1)
        servers.start_frontend("frontend", port)
        await asyncio.to_thread(
            servers.wait, "the frontend", lambda: is_up(port), SECONDS_TO_START
        )
        sizes = []
        for seed, (width, height) in enumerate(PICTURES):
            body = picture_request(
                str(CHECKPOINT), jpeg(width, height, seed), "What is this?", max_tokens=1
            )
            await asyncio.to_thread(_ask, port, body)
            sizes.append(size_of(posed.requests.pop()))
        return sizes
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        posed.close()
        context.term()


def _ask(port: int, body: bytes) -> None:
    with Client(port) as client:
        client.post("/v1/chat/completions", body)


class PosedWorker:
    """Says what a worker says, and answers every request with one token."""

    def __init__(self, registry: Registry, context: zmq.asyncio.Context) -> None:
        self.requests: list[Sequence[Frame]] = []
        """Frames of each request, in the order of arrival."""
        name = f"worker-posed-{secrets.token_hex(3)}"
        sockets = registry.socket_directory(name)
        hasher = IdentityHasher(load_or_create_seed(registry.seed_path), "xxh3_128")
        self._ready = Ready(
            worker=name,
            facts=demo_facts(sockets, hasher.fingerprint),
            epoch=secrets.token_hex(8),
            kv_address=f"ipc://{sockets}/kv",
            transfer="shm",
            transfer_reason="poses as a worker that sees the segment",
        )
        address = f"ipc://{sockets}/requests"
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        registry.announce(
            WorkerRecord(
                worker=name, address=address, facts=self._ready.facts,
                **msgspec.structs.asdict(this_process()),
            )
        )

    async def run(self) -> None:
        while True:
            peer, *received = await self._socket.recv_multipart()
            frames = [bytearray(frame) for frame in received]  # torch wants them writable
            for answer in self._answers(frames):
                await self._socket.send_multipart([peer, *answer])

    def _answers(self, frames: Sequence[Frame]) -> list[list[Frame]]:
        message, _ = decode(frames)
        answer: Message
        match message:
            case Hello():
                answer = self._ready
            case Ping():
                answer = Pong()
            case AskSnapshot():
                answer = KvSnapshot(epoch=self._ready.epoch, seq=0, blocks={})
            case AddRequest():
                self.requests.append(frames)
                return [encode(Outputs(), encode_payload(_one_token(message.request_id)))]
            case _:
                return []
        return [encode(answer)]

    def close(self) -> None:
        self._socket.close()


def _one_token(request_id: str) -> EngineCoreOutputs:
    output = EngineCoreOutput(request_id, [65], finish_reason=FinishReason.LENGTH)
    return EngineCoreOutputs(outputs=[output])

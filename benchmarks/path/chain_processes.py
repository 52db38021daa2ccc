"""What runs in the other processes of the chain (``chain`` draws it)."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
import uvloop
import zmq
import zmq.asyncio
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from transfer.link import KvPublisher, OnMessage, WorkerLink
from transfer.messages import Frame, Message, Ready
from transfer.parent_death import die_with_parent
from workers.arena_worker import ArenaReader
from workers.engine_inputs import EngineInputs
from workers.engine_polling import nap_instead_of_polling
from workers.frontends import Frontends
from workers.inbox import Inbox
from workers.kv_state import KvState
from workers.nixl_transfer import NixlTransfer
from workers.outbox import Outbox
from workers.worker_process import attach

ENGINE = b"\x00\x00"
ENGINE_READY = b"ready"
ATTACH = b"attach"

Way = Literal["plain", "foveal"]


class Addresses(msgspec.Struct, frozen=True):
    """Where the processes listen."""

    plain: str
    """This process, as vLLM's engine client."""
    routed: str
    """The worker, as vLLM's engine client."""
    requests: str
    """The worker, to frontends."""
    kv: str
    reports: str
    gate: str
    """This process lets the runner read."""
    plain_gate: str

    @classmethod
    def within(cls, directory: Path) -> Addresses:
        return cls(*(f"ipc://{directory}/{name}" for name in cls.__struct_fields__))


def total_bytes(frames: Iterable[Any]) -> int:
    """Add up what the frames of a message hold."""
    return sum(memoryview(frame).nbytes for frame in frames)


class Report(msgspec.Struct, array_like=True):
    """When a process did what with a request, and how many bytes it passed on."""

    request_id: str
    times: dict[str, float]
    counts: dict[str, int] = {}


def run_worker(addresses: Addresses, ready: bytes) -> None:
    """Our worker's inbox, before an engine client."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    uvloop.run(_work(addresses, msgspec.msgpack.decode(ready, type=Ready)))


async def _work(addresses: Addresses, ready: Ready) -> None:
    context = zmq.asyncio.Context()
    link = _StampedLink(context, addresses.requests)
    engine = _EngineLine(context, addresses)
    await engine.connected()
    client, frontends = cast(AsyncMPClient, engine), Frontends()
    inputs = _StampedInputs(client, link, addresses)
    inbox = Inbox(
        ready,
        client,
        inputs,
        link,
        KvPublisher(context, addresses.kv),
        KvState(ready.facts.block_size, ready.epoch),
        frontends,
        Outbox(client, inputs, link, frontends),
        NixlTransfer(0, 1.0, partial(attach, client)),
    )
    await inbox.run()


class _StampedLink(WorkerLink):
    """Remembers when the last message came, and of which request it was."""

    received = 0.0
    request_id = ""

    async def listen(self, on_message: OnMessage) -> None:
        def stamp(name: str, message: Message, payload: Sequence[Frame]) -> None:
            self.received = time.monotonic()
            self.request_id = getattr(message, "request_id", "")
            on_message(name, message, payload)

        await super().listen(stamp)


class _StampedInputs(EngineInputs):
    """Reports when a request went on."""

    def __init__(
        self, engine: AsyncMPClient, link: _StampedLink, addresses: Addresses
    ) -> None:
        super().__init__(engine)
        self._link = link
        self._reports = zmq.Context.instance().socket(zmq.PUSH)
        self._reports.connect(addresses.reports)

    def add(self, frames: Sequence[Frame]) -> None:
        super().add(frames)
        times = {"received": self._link.received, "forwarded": time.monotonic()}
        counts = {"worker": total_bytes(frames)}
        report = Report(self._link.request_id, times, counts)
        self._reports.send(msgspec.msgpack.encode(report))


class _EngineLine:
    """What our parts use of vLLM's AsyncMPClient, before the engine of this chain."""

    core_engine = ENGINE

    def __init__(self, context: zmq.asyncio.Context, addresses: Addresses) -> None:
        self.input_socket: Any = make_zmq_socket(
            context, addresses.routed, zmq.ROUTER, bind=True
        )

    async def connected(self) -> None:
        await self.input_socket.recv_multipart()

    def ensure_alive(self) -> None:
        pass

    async def collective_rpc_async(self, method: str, args: tuple[str, bytes]) -> list[str]:
        if method != "attach_arena":
            raise NotImplementedError(method)
        message = [ENGINE, ATTACH, msgspec.msgpack.encode(args)]
        await self.input_socket.send_multipart(message)
        return [""]  # the runner ends if it cannot


def run_engine(addresses: Addresses, way: Way, pipe: Connection) -> None:
    """An engine that schedules every request at once and alone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if way == "foveal":
        nap_instead_of_polling()  # as workers.process_death has engines do
    context = zmq.Context()
    reports = context.socket(zmq.PUSH)
    reports.connect(addresses.reports)
    broadcast: Any = MessageQueue(
        1, 1, max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20
    )
    counted = _CountingSocket(broadcast.local_socket)
    pipe.send(broadcast.export_handle())
    broadcast.wait_until_ready()
    broadcast.local_socket = counted

    arrived: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
    address = addresses.routed if way == "foveal" else addresses.plain
    receiver = partial(_receive, context, address, pipe, arrived)
    threading.Thread(target=receiver, daemon=True).start()
    while (message := arrived.get()) is not None:
        method, argument = message
        if method == "attach_arena":
            broadcast.enqueue((method, argument, {}, None))
            continue
        decoded = time.monotonic()
        scheduled = _scheduled(argument)
        counted.nbytes = 0
        broadcast.enqueue((method, (scheduled,), {}, None))
        times = {"decoded": decoded, "broadcast": time.monotonic()}
        counts = {"engine": counted.nbytes + _bytes_in_ring(broadcast)}
        report = Report(argument.request_id, times, counts)
        reports.send(msgspec.msgpack.encode(report))
        del argument, scheduled, message
    broadcast.enqueue(None)
    reports.close(linger=1000)


def _receive(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    pipe: Connection,
    arrived: queue.SimpleQueue[tuple[str, Any] | None],
) -> None:
    """The engine's input thread; what comes by the pipe ends it."""
    decoder = MsgpackDecoder(EngineCoreRequest)
    poller = zmq.Poller()
    sock: Any = make_zmq_socket(context, address, zmq.DEALER, identity=ENGINE, bind=False)
    sock.send(ENGINE_READY)
    poller.register(sock, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    while pipe.fileno() not in dict(poller.poll()):
        kind, *frames = sock.recv_multipart(copy=False)
        if bytes(kind.buffer) == ATTACH:
            arrived.put(("attach_arena", msgspec.msgpack.decode(frames[0].buffer)))
        else:
            arrived.put(("execute_model", decoder.decode(frames)))
        del kind, frames
    arrived.put(None)


def _scheduled(request: EngineCoreRequest) -> SchedulerOutput:
    """What vLLM's scheduler broadcasts for a request that it starts."""
    tokens = len(request.prompt_token_ids or ())
    new = NewRequestData.from_request(
        Request.from_engine_core_request(request, None), (list(range(tokens // 32)),)
    )
    return replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=[new],
        num_scheduled_tokens={request.request_id: tokens},
        total_num_scheduled_tokens=tokens,
        scheduled_encoder_inputs={request.request_id: [0]},
    )


class _CountingSocket:
    """The queue's socket for what does not fit into its ring."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.nbytes = 0

    def send_multipart(self, buffers: list[Any], **options: Any) -> Any:
        self.nbytes += total_bytes(buffers)
        return self._socket.send_multipart(buffers, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def _bytes_in_ring(broadcast: MessageQueue) -> int:
    """The bytes of the last message that went through the ring itself."""
    ring = broadcast.buffer
    with ring.get_data((broadcast.current_idx - 1) % ring.max_chunks) as chunk:
        return ring_message_bytes(chunk)


def ring_message_bytes(chunk: memoryview) -> int:
    """Add up the buffers in one chunk of a MessageQueue; none if they did not fit.

    The layout is MessageQueue.enqueue's: a flag, a count in two bytes, and for each
    buffer its length in four bytes before it.
    """
    if chunk[0]:
        return 0
    total, offset = 0, 3
    for _ in range(int.from_bytes(chunk[1:3], "big")):
        length = int.from_bytes(chunk[offset : offset + 4], "big")
        total += length
        offset += 4 + length
    return total


class _Model:
    """Stands where vLLM's worker class stands; looks at pixels and reports."""

    def __init__(self, reports: str, gate: str) -> None:
        context = zmq.Context()
        self._reports = context.socket(zmq.PUSH)
        self._reports.connect(reports)
        self._gate = context.socket(zmq.PULL)
        self._gate.connect(gate)
        self.dequeued = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        request = scheduler_output.scheduled_new_reqs[0]
        item = request.mm_features[0].data
        pixels = None if item is None else item["pixel_values"].data
        if not isinstance(pixels, torch.Tensor):
            raise TypeError("the pixels are not there")
        flat = pixels.view(-1)
        flat[0].item()
        self._report(
            request.req_id,
            {"dequeued": self.dequeued, "usable": time.monotonic()},
            {"address": pixels.data_ptr(), "nbytes": pixels.nbytes},
        )
        self._gate.recv()  # may it read all of them?
        begun = time.monotonic()
        flat.view(torch.int64).sum().item()
        self._report(request.req_id, {"read begun": begun, "read": time.monotonic()}, {})

    def _report(
        self, request_id: str, times: dict[str, float], counts: dict[str, int]
    ) -> None:
        self._reports.send(msgspec.msgpack.encode(Report(request_id, times, counts)))


class _Runner(ArenaReader, _Model):
    """Our worker class, before a model that looks at pixels."""


def run_runner(addresses: Addresses, way: Way, pipe: Connection) -> None:
    """The model runner's process: does what it is told until it is told None."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if way == "foveal":
        runner: _Model = _Runner(addresses.reports, addresses.gate)
    else:
        runner = _Model(addresses.reports, addresses.plain_gate)
    broadcast = MessageQueue.create_from_handle(pipe.recv(), 0)
    broadcast.wait_until_ready()
    while (call := broadcast.dequeue(indefinite=True)) is not None:
        runner.dequeued = time.monotonic()
        method, args, kwargs, _ = call
        refusal = getattr(runner, method)(*args, **kwargs)
        if refusal:
            raise RuntimeError(refusal)
        del call, args

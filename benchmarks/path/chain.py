"""The processes between a picture's processor and the model runner, without a model.

Plain vLLM: this process -> engine -> runner. Foveal: this process -> worker -> engine ->
runner. Each way has an engine and a runner of its own, which wait for each other as they do
there: vLLM's runner polls, ours sleeps where it would take a processor from others. The
runner whose turn it is not stands still.

- this process sends as vLLM's engine client does, or as our frontend does;
- the worker runs our inbox (decode, check of references, pass on) before an engine client;
- the engine decodes in its input thread and broadcasts what its scheduler would, through
  vLLM's MessageQueue;
- the runner dequeues and calls ``execute_model`` of our worker class, which stands before
  a model that only looks at the pixels.

Every process reports, after it has passed a request on, when it did what; the clock is
one for all processes of a machine.

vLLM names relied on: v1.engine.core_client.AsyncMPClient._send_input and
v1.engine.core.EngineCoreProc.process_input_sockets, whose few lines are repeated here;
MessageQueue, SchedulerOutput, NewRequestData, Request.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
import zmq
import zmq.asyncio
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

from benchmarks.path.chain_processes import (
    ENGINE,
    ENGINE_READY,
    Addresses,
    Report,
    Way,
    run_engine,
    run_runner,
    run_worker,
    total_bytes,
)
from benchmarks.path.facts import demo_facts
from frontend.arena_cache import ArenaProcessorCache
from transfer.arena import Arena
from transfer.identity import SEED_BYTES, IdentityHasher
from transfer.link import FrontendLink
from transfer.messages import PROTOCOL_VERSION, AddRequest, Hello, Ready
from transfer.payload import encode_payload

_ROLES: dict[Way, tuple[str, str]] = {
    "plain": ("plain engine", "plain runner"), "foveal": ("engine", "runner")
}
"""Engine and runner of each way."""
_WAYS: tuple[Way, ...] = ("plain", "foveal")

SECONDS_TO_START = 240.0
SECONDS_TO_PASS = 30.0
MIB = 1 << 20
_ROW = 1024
_BYTES_PER_TOKEN = 4704
"""Of Qwen-VL's pixels: four patches of 1176 bytes make one token."""


class TimedHasher(IdentityHasher):
    """Knows how long the last digest took."""

    last_seconds = 0.0

    def digest(self, *args: Any) -> bytes:
        began = time.monotonic()
        digest = super().digest(*args)
        self.last_seconds = time.monotonic() - began
        return digest


class Passage(msgspec.Struct):
    """One item on its way: seconds on the machine's clock, and what was counted."""

    times: dict[str, float]
    counts: dict[str, int]

    def seconds(self, since: str, until: str) -> float:
        return self.times[until] - self.times[since]


def make_item(nbytes: int, number: int) -> MultiModalKwargsItem:
    """What Qwen-VL's processor returns for a picture; another one for each number."""
    pixels = torch.arange(nbytes // 8).view(torch.uint8).clone()
    pixels[:8].view(torch.int64).fill_(-1 - number)
    rows = nbytes // _ROW
    flat = MultiModalFlatField(slices=[slice(0, rows)], dim=0)
    on_cpu = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem({
        "pixel_values": MultiModalFieldElem(pixels.view(rows, _ROW), flat),
        "image_grid_thw": MultiModalFieldElem(torch.tensor([1, 2 * rows, 2]), on_cpu),
    })


def make_request(
    request_id: str, item: MultiModalKwargsItem, tokens: int
) -> EngineCoreRequest:
    """The request for one picture and nothing else."""
    feature = MultiModalFeatureSpec(
        data=item,
        modality="image",
        identifier=request_id,
        mm_position=PlaceholderRange(offset=0, length=tokens),
        mm_hash=request_id,
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[151655] * tokens,
        mm_features=[feature],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class Chain:
    """All its processes."""

    def __init__(self, arena_bytes: int) -> None:
        self.arena = Arena(arena_bytes)
        self._directory = Path(tempfile.mkdtemp(prefix="foveal-bench-", dir="/tmp"))
        self._addresses = Addresses.within(self._directory)
        self.hasher = TimedHasher(bytes(SEED_BYTES), "xxh3_128")
        self.cache = ArenaProcessorCache(self.arena, self.hasher, "benchmark")
        self.processes: dict[str, BaseProcess] = {}
        self._context = zmq.asyncio.Context()
        self._links = ExitStack()
        self._encoder = MsgpackEncoder()
        self._number = 0
        self._engines: list[Connection] = []
        self._turn: Way | None = None

    async def __aenter__(self) -> Chain:
        try:
            await self._start()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def pids(self) -> dict[str, int]:
        """All processes by role; this one is the frontend."""
        children = {role: process.pid or 0 for role, process in self.processes.items()}
        return {"frontend": os.getpid(), **children}

    async def pass_plain(self, item: MultiModalKwargsItem) -> Passage:
        """Send an item as plain vLLM does; returns when the runner can use it."""
        await self._turn_to("plain")
        request_id = self._next_id()
        tokens = _tokens_of(item)
        started = time.monotonic()
        request = make_request(request_id, item, tokens)
        frames = (EngineCoreRequestType.ADD.value, *self._encoder.encode(request))
        await self._plain.send_multipart((ENGINE, *frames), copy=False)
        times = {"started": started, "sent": time.monotonic()}
        counts = {"frontend": total_bytes(frames)}
        return await self._collect(Passage(times, counts), request_id, {"usable"})

    async def pass_foveal(self, item: MultiModalKwargsItem) -> Passage:
        """Send an item as Foveal does; returns when the runner can use it."""
        await self._turn_to("foveal")
        request_id = self._next_id()
        tokens = _tokens_of(item)
        started = time.monotonic()
        stored, _ = self.cache.get_and_update_item((item, ()), request_id)
        put = time.monotonic()
        if stored is None:
            raise RuntimeError("the cache returned nothing for an item it was given")
        request = make_request(request_id, stored, tokens)
        message, payload = AddRequest(request_id), encode_payload(request)
        self._link.send(message, payload)
        times = {"started": started, "stored": put, "sent": time.monotonic()}
        times["hashed"] = started + self.hasher.last_seconds
        counts = {"frontend": total_bytes(payload)}
        # `request` holds the lease while the runner looks.
        passage = await self._collect(
            Passage(times, counts), request_id, {"usable", "forwarded"}
        )
        del request
        return passage

    async def read_all(self, passage: Passage) -> None:
        """Let the runner read all pixels of the last item; it waits for this."""
        await self._gates[self._turn or "plain"].send(b"")
        await self._collect(passage, f"r{self._number}", {"read", "broadcast"})

    def _next_id(self) -> str:
        self._number += 1
        return f"r{self._number}"

    async def _collect(self, passage: Passage, request_id: str, wanted: set[str]) -> Passage:
        """Take in reports until all that is wanted is known."""
        async with asyncio.timeout(SECONDS_TO_PASS):
            while not wanted <= passage.times.keys():
                report = msgspec.msgpack.decode(await self._reports.recv(), type=Report)
                if report.request_id == request_id:
                    passage.times.update(report.times)
                    passage.counts.update(report.counts)
        return passage

    async def _start(self) -> None:
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._directory)  # inherited
        addresses = self._addresses
        context = self._context
        self._reports = context.socket(zmq.PULL)
        self._reports.bind(addresses.reports)
        self._gates: dict[Way, Any] = {
            "plain": context.socket(zmq.PUSH), "foveal": context.socket(zmq.PUSH)
        }
        self._gates["plain"].bind(addresses.plain_gate)
        self._gates["foveal"].bind(addresses.gate)
        self._plain: Any = make_zmq_socket(context, addresses.plain, zmq.ROUTER, bind=True)

        ready = Ready(
            worker="worker",
            facts=demo_facts(self._directory, self.hasher.fingerprint),
            epoch="",
            kv_address="",
            transfer="inline",
            transfer_reason="",
        )
        self._spawn("worker", run_worker, (addresses, msgspec.msgpack.encode(ready)))
        for way in _WAYS:
            await self._start_engine(way)

        _, hello = await self._within(self._plain.recv_multipart())
        if hello != ENGINE_READY:
            raise RuntimeError(f"the engine says {hello!r}")
        self._link = FrontendLink(context, "frontend", addresses.requests)
        self._links.callback(self._link.close)
        self._link.send(
            Hello(
                frontend="frontend",
                protocol=PROTOCOL_VERSION,
                arena=self.arena.id,
                transfer="shm",
                identity_seed_fingerprint=self.hasher.fingerprint,
            )
        )
        answer, _ = await self._within(self._link.receive())
        if not isinstance(answer, Ready) or answer.transfer != "shm":
            raise RuntimeError(f"the worker answers {answer}")

    async def _start_engine(self, way: Way) -> None:
        engine_role, runner_role = _ROLES[way]
        engine, of_engine = multiprocessing.Pipe()
        to_runner, of_runner = multiprocessing.Pipe()
        self._spawn(engine_role, run_engine, (self._addresses, way, of_engine))
        self._spawn(runner_role, run_runner, (self._addresses, way, of_runner))
        to_runner.send(await self._within(_received(engine)))
        self._engines.append(engine)

    async def _turn_to(self, way: Way) -> None:
        """Let the runner of one way go on, and none else: one that polls has a core.

        It has slept meanwhile, so an item that is not measured wakes it.
        """
        if way == self._turn:
            return
        for other in _WAYS:
            if other != way:
                self._signal_runner(other, signal.SIGSTOP)
        self._signal_runner(way, signal.SIGCONT)
        self._turn = way
        passes = self.pass_plain if way == "plain" else self.pass_foveal
        await self.read_all(await passes(make_item(_ROW, -2 - self._number)))  # another one

    def _signal_runner(self, way: Way, number: signal.Signals) -> None:
        process = self.processes.get(_ROLES[way][1])
        if process is not None and process.pid is not None and process.is_alive():
            os.kill(process.pid, number)

    def _spawn(self, role: str, target: Any, args: tuple[Any, ...]) -> None:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=target, args=args, name=f"bench {role}", daemon=True)
        process.start()
        self.processes[role] = process

    async def _within(self, work: Any) -> Any:
        """Await ``work`` while all processes live.

        Raises:
            RuntimeError: one of them has ended.
            TimeoutError: it takes too long.
        """
        task = asyncio.ensure_future(work)
        deadline = time.monotonic() + SECONDS_TO_START
        while not task.done():
            dead = [role for role, p in self.processes.items() if not p.is_alive()]
            if dead or time.monotonic() > deadline:
                task.cancel()
                if dead:
                    raise RuntimeError(f"ended while starting: {', '.join(dead)}")
                raise TimeoutError("the processes did not start in time")
            await asyncio.wait([task], timeout=0.2)
        return task.result()

    def _end(self) -> None:
        for way in _WAYS:
            self._signal_runner(way, signal.SIGCONT)
        for engine in self._engines:
            engine.close()  # it stops, and so does its runner, which removes the queue
        for role in (*_ROLES["plain"], *_ROLES["foveal"]):
            if role in self.processes:
                self.processes[role].join(timeout=5)
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._links.close()  # the context knows nothing of their sockets, and waits for them
        self._context.destroy(linger=0)
        self.arena.close()
        os.environ.pop("VLLM_RPC_BASE_PATH", None)
        shutil.rmtree(self._directory, ignore_errors=True)


async def _received(pipe: Connection) -> Any:
    # Not in a thread: one that waits in vain would keep this process from ending.
    while not pipe.poll():
        await asyncio.sleep(0.02)
    return pipe.recv()


def _tokens_of(item: MultiModalKwargsItem) -> int:
    pixels = item["pixel_values"].data
    if not isinstance(pixels, torch.Tensor):
        raise TypeError("pixels are a tensor")
    return max(1, pixels.nbytes // _BYTES_PER_TOKEN)
